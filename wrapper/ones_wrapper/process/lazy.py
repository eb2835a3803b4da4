"""Names of a package that are imported at their first use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ones_wrapper.process.log import TORCH_MISSING


def at_first_use(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Import `name` from its module in `homes` and return it. If torch is missing, the process ends with a message."""
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_module(homes[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(TORCH_MISSING, file=sys.stderr)
        raise SystemExit(2) from None
