"""Choosing a client: PySlurm where it is installed and fits, the command line everywhere else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from importlib import import_module

from slurm_ones.config import Settings
from slurm_ones.slurm.client import Refused, SlurmClient, SlurmMissing
from slurm_ones.slurm.command import CommandClient

log = logging.getLogger(__name__)


def why_not_pyslurm() -> str:
    """Why PySlurm cannot be used here, empty where it can."""
    try:
        import slurm_ones.slurm.pyslurm  # noqa: F401
    except ImportError as error:
        # Not installed, or built for another libslurm: both look like this.
        return str(error)
    return ""


def connect(settings: Settings, keepalive: Callable[[], None] = lambda: None) -> SlurmClient:
    """The client that the settings ask for. `keepalive` is called before each thing that Slurm is asked.

    Raises `SlurmMissing`, or `Refused` when PySlurm or a client of another's was demanded in vain.
    """
    if ":" in settings.client:
        return _client_of(settings.client)(timeout_s=settings.timeout_s, keepalive=keepalive)
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
        if settings.client == "pyslurm":
            raise Refused(f'PySlurm cannot be used: {why}; set client = "command" or install the fitting PySlurm')
        log.info("using the command line: %s", why)
    return CommandClient(timeout_s=settings.timeout_s, keepalive=keepalive)


def _client_of(name: str) -> Callable[..., SlurmClient]:
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., SlurmClient] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Refused(f"client {name!r} cannot be imported: {error}") from None
    return found
