"""`examples/gpt.py` as it is, whose steps take time until there is a file: its first argument."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))
from wrapper.examples import gpt

HURRY = Path(sys.argv.pop(1))


def pause(seconds: float) -> None:
    """Stands for what a GPU would compute."""
    if not HURRY.exists():
        time.sleep(seconds)


gpt.time = SimpleNamespace(sleep=pause)  # type: ignore[assignment]
gpt.main()
