"""What the controller's settings, as `SlurmClient.config` gives them, mean for a job whose blocks share nodes."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ones.slurm.parse import DIGITS


def _setting(config: Mapping[str, str], name: str) -> str:
    """A setting in lower case, however its name is written; empty where it is not shown."""
    return next((value.strip().lower() for key, value in config.items() if key.lower() == name.lower()), "")


def hides_gpus(config: Mapping[str, str]) -> bool | None:
    """Whether device cgroups hide from a job the GPUs that other jobs have of its node, so that two blocks on one node
    may not reach each other's GPUs; None where Slurm does not show it.

    It shows cgroup.conf where a plugin uses cgroups; devices are constrained by task/cgroup alone.
    """
    plugins = _setting(config, "TaskPlugin")
    if plugins and "cgroup" not in plugins:
        return False
    return {"yes": True, "no": False}.get(_setting(config, "ConstrainDevices"))


def allows_arrays(config: Mapping[str, str]) -> bool:
    """Whether job arrays of more than one task may be submitted; where Slurm shows no limit they may."""
    most = _setting(config, "MaxArraySize")
    return not DIGITS.fullmatch(most) or int(most) > 1


def started_at(config: Mapping[str, str]) -> float:
    """When slurmctld started, by its own clock; 0 if Slurm does not show it."""
    time = _setting(config, "BOOT_TIME")
    return float(time) if DIGITS.fullmatch(time) else 0.0
