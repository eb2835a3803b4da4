"""Loading of objects from other packages, by a registered name or as `package.module:Name`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any


def load(group: str, name: str, ours: Iterable[str]) -> Any:
    """Return the object that a package registers as `name` in the entry points of `group`, or the object at
    `package.module:Name`. Raises ValueError if it is not found or cannot be imported. The message lists `ours` and the
    registered names."""
    from importlib.metadata import entry_points  # not at the top: `ones-run` and every rank import this module

    registered = entry_points(group=group)
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(import_module(module), attribute)
        for entry in registered:
            if entry.name == name:
                return entry.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from None
    names = ", ".join([*ours, *sorted(registered.names)]) or "the registered names (there are none)"
    raise ValueError(f"{name!r} is none of {names}, nor package.module:Name")
