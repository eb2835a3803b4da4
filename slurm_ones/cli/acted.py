"""Who ran a command that changes something, written into the job database."""

from __future__ import annotations

import getpass
import os
import time

from ones_db import ActionRecord, Store


def person() -> str:
    """Login name of who runs this process; of who became root or another user by sudo, both."""
    user, before = getpass.getuser(), os.environ.get("SUDO_USER", "")
    return f"{before} as {user}" if before and before != user else user


def note(store: Store, action: str, detail: str = "") -> None:
    """Write down that the person behind this process does this."""
    store.add_action(ActionRecord(time.time(), person(), action, detail))
