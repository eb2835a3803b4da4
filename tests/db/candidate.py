"""A candidate for the lead, in a process of its own.

It asks for the lead again and again, until it is killed. While it leads it writes actions that name its term. It says
what `Leadership` says, "wrote TERM" of each action, and "lost" where it led.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from ones_db import ActionRecord, NotLeader, Store, StoreError
from ones_db.leader import LeaderLock
from slurm_ones.service.leadership import Leadership


def main(url: str, takeover_s: float, say: Callable[[str], None]) -> NoReturn:
    lead = Leadership(LeaderLock(url, "gres"), takeover_s, say=say)
    store: Store | None = None
    while True:
        try:
            if not lead.take():
                if store is not None:
                    say("lost")
                store = None
                time.sleep(lead.wait_s)
                continue
            if store is None:
                store = Store.open(url, "gres", term=lead.term)
            store.add_action(ActionRecord(time.time(), "candidate", "write", str(lead.term)))
            lead.check()
            say(f"wrote {lead.term}")
            time.sleep(0.05)
        except NotLeader:
            continue
        except StoreError:
            time.sleep(lead.wait_s)
