"""Registry of policies by name: all policies in `slurm_ones.rivals`, in `ones` and in other distributions."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from ones_wrapper.protocol.choices import listed
from slurm_ones import rivals
from slurm_ones.ones import Ones
from slurm_ones.policy.contract import Policy

GROUP = "slurm_ones.policies"
"""Entry point group in which other distributions register policies: `name = package.module:Class`."""


def policies_in(package: ModuleType) -> Iterator[Any]:
    """Yield the policies in the package's modules: each class with a text `name` and a method `decide`."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and _is_policy(cls):
                yield cls


def _is_policy(cls: Any) -> bool:
    return callable(getattr(cls, "decide", None)) and isinstance(getattr(cls, "name", None), str)


POLICIES: dict[str, Any] = {policy.name: policy for policy in (Ones, *policies_in(rivals))}
"""Built-in policy classes by name. A class with an `options_type`, a dataclass, takes an instance of it."""


def find_policy(name: str) -> Any:
    """Return the class of a policy: one built in, one of another distribution, or `package.module:Class`.

    Raises ValueError if the name is unknown or its module cannot be imported.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        return _load(f"policy: {name!r}", EntryPoint(name, name, GROUP))
    others = {found.name: found for found in entry_points(group=GROUP)}
    if name not in others:
        known = listed(sorted({*POLICIES, *others}), name)
        raise ValueError(f"policy: {name!r} is none of {known}, and no package.module:Class")
    dist = others[name].dist
    return _load(f"policy: {name!r} of {dist.name} {dist.version}" if dist else f"policy: {name!r}", others[name])


def make_policy(name: str, **options: Any) -> Policy:
    """Make a new policy. Raises ValueError that lists the accepted policies or options.

    A policy without an `options_type` takes no options.
    """
    cls = find_policy(name)
    options_type = getattr(cls, "options_type", None)
    known = [field.name for field in fields(options_type)] if options_type else []
    for option in options:
        if option not in known:
            raise ValueError(f"policy {name} has no option {option!r}; it has {listed(known, option) or 'none'}")
    policy: Policy = cls(options_type(**options)) if options_type else cls()
    return policy


def _load(what: str, point: EntryPoint) -> Any:
    module, _, attribute = point.value.partition(":")
    try:
        cls: Any = importlib.import_module(module.strip())
        for part in attribute.strip().split("."):
            cls = getattr(cls, part)
    except Exception as error:
        raise ValueError(f"{what} cannot be loaded from {point.value}: {type(error).__name__}: {error}") from error
    if not _is_policy(cls):
        raise ValueError(f"{what} is no policy: {point.value} has no name or no method decide")
    return cls
