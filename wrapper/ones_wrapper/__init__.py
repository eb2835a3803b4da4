"""Inside the job: makes an ordinary PyTorch training loop elastic.

`init` is the way in. Importing the package costs nothing: torch is imported at first use, since the companion imports
`ones_wrapper.protocol` without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036, since an installer sees to it, but a path set by hand does not
    sys.exit(
        f"ones_wrapper needs Python 3.10 or newer; {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}"
    )

if TYPE_CHECKING:
    from ones_wrapper import strategies
    from ones_wrapper.api import Job, init
    from ones_wrapper.launch.submit import submit
    from ones_wrapper.process.exit_codes import DONT_RESTART

from ones_wrapper.process.lazy import at_first_use

__version__ = "0.2.0"

__all__ = ["DONT_RESTART", "Job", "init", "strategies", "submit"]

_HOMES = {
    "DONT_RESTART": "ones_wrapper.process.exit_codes",
    "Job": "ones_wrapper.api",
    "init": "ones_wrapper.api",
    "submit": "ones_wrapper.launch.submit",
}


def __getattr__(name: str) -> Any:
    if name == "strategies":
        return import_module("ones_wrapper.strategies")
    return at_first_use(__name__, name, _HOMES)
