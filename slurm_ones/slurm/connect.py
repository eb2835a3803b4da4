"""Choosing a client: PySlurm if it is installed and fits, else the command line."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from importlib import import_module

from slurm_ones.config import ConfigError, Settings
from slurm_ones.slurm.client import SlurmClient, SlurmMissing
from slurm_ones.slurm.command import CommandClient

log = logging.getLogger(__name__)


def why_not_pyslurm() -> str:
    """Return the reason why PySlurm cannot be used here; "" if it can."""
    try:
        import slurm_ones.slurm.pyslurm  # noqa: F401
    except ImportError as error:
        # PySlurm is not installed, or was built for another libslurm: both raise the same error.
        return str(error)
    return ""


def connect(settings: Settings, keepalive: Callable[[], None] = lambda: None) -> SlurmClient:
    """Return the client that the settings name; it calls `keepalive` before each command. Raises `SlurmMissing`,
    `ConfigError`."""
    check_client(settings)
    if ":" in settings.client:
        try:
            return _class_of(settings.client)(timeout_s=settings.timeout_s, keepalive=keepalive)
        except TypeError as error:
            raise ConfigError(f"client {settings.client!r} cannot be made: {error}") from None
    if shutil.which("scontrol") is None:
        raise SlurmMissing(
            "scontrol is not on the PATH: there is no Slurm on this machine; run the companion on a login or service "
            "node, or load the site's slurm module"
        )
    if settings.client != "command":
        why = why_not_pyslurm()
        if not why:
            from slurm_ones.slurm.pyslurm import PySlurmClient

            return PySlurmClient(timeout_s=settings.timeout_s, keepalive=keepalive)
        log.info("using the command line: %s", why)
    return CommandClient(timeout_s=settings.timeout_s, keepalive=keepalive)


def check_client(settings: Settings) -> None:
    """Raise `ConfigError` if the settings name a client that is not installed or does not exist."""
    if ":" in settings.client:
        _class_of(settings.client)
    elif settings.client == "pyslurm" and (why := why_not_pyslurm()):
        raise ConfigError(f'PySlurm cannot be used: {why}; set client = "command" or install the fitting PySlurm')


def _class_of(name: str) -> Callable[..., SlurmClient]:
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., SlurmClient] = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the module is somebody else's
        raise ConfigError(f"client {name!r} cannot be imported: {type(error).__name__}: {error}") from None
    # A client that forwards calls, for example to another process, accepts any attribute name.
    needed = () if hasattr(found, "__getattr__") else vars(SlurmClient)
    lacking = [method for method in needed if not method.startswith("_") and not hasattr(found, method)]
    if not isinstance(found, type) or lacking:
        why = f"it lacks {', '.join(lacking)}" if isinstance(found, type) else "it is no class"
        raise ConfigError(f"client {name!r} is no Slurm client (slurm_ones.slurm.client.SlurmClient): {why}")
    return found
