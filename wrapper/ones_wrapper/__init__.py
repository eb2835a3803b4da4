"""Inside the job: makes an ordinary PyTorch training loop elastic.

`init` is the way in. Importing the package costs nothing: torch is imported at first use, since the companion
imports `ones_wrapper.protocol` where there is no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ones_wrapper.api import Job, init

__all__ = ["Job", "init"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ones_wrapper import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
