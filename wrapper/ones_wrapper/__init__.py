"""Inside the job: makes an ordinary PyTorch training loop elastic.

`init` is the way in. Importing the package costs nothing: torch is imported at first use, since the companion
imports `ones_wrapper.protocol` where there is no torch.
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
    from ones_wrapper.api import Job, init
    from ones_wrapper.data.coreset import Coreset, last_layer_gradient
    from ones_wrapper.decentralized import DecentLam, Lsgd
    from ones_wrapper.fusion import fuse
    from ones_wrapper.fusion.sweep import sweep
    from ones_wrapper.launch.restart_policy import DONT_RESTART

__version__ = "0.2.0"

__all__ = ["DONT_RESTART", "Coreset", "DecentLam", "Job", "Lsgd", "fuse", "init", "last_layer_gradient", "sweep"]

_HOMES = {
    "Coreset": "ones_wrapper.data.coreset",
    "DONT_RESTART": "ones_wrapper.launch.restart_policy",
    "DecentLam": "ones_wrapper.decentralized",
    "Job": "ones_wrapper.api",
    "Lsgd": "ones_wrapper.decentralized",
    "fuse": "ones_wrapper.fusion",
    "init": "ones_wrapper.api",
    "last_layer_gradient": "ones_wrapper.data.coreset",
    "sweep": "ones_wrapper.fusion.sweep",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            print(import_module("ones_wrapper.job_io").TORCH_MISSING, file=sys.stderr)
            raise SystemExit(2) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
