"""A real Slurm with the plugin, as an administrator installs it, and without it again afterwards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from subprocess import CompletedProcess

from tests.cluster import Cluster
from tests.guide import guide
from tests.waiting import until

ETC = "etc/slurm"
LINES = "JobSubmitPlugins=lua\nCliFilterPlugins=lua\n"
SPANK = "optional /etc/slurm/slurm_ones_spank.so\n"
OURS = ("slurm_ones.lua", "job_submit.lua", "cli_filter.lua", "slurm_ones_spank.so")
PLAIN = ("-H", "--wrap", "true")
"""A job that says nothing of ours, and waits."""


def reconfigure(cluster: Cluster) -> None:
    """Have the controller read its files again, and wait until it answers."""
    cluster.run(["scontrol", "reconfigure"], user="root")
    answers(cluster)


def answers(cluster: Cluster) -> None:
    """Wait until the controller answers."""
    ping = ["scontrol", "ping"]
    until(lambda: "is UP" in cluster.run(ping, user="root", check=False).stdout, "an answer after a reconfiguration")


@contextlib.contextmanager
def installed(cluster: Cluster) -> Iterator[str]:
    """The plugin in a running cluster; what the installation said."""
    etc = cluster.root / ETC
    conf = etc / "slurm.conf"
    before = conf.read_text()
    try:
        said = cluster.run(["slurm-ones", "plugin", "install", "/etc/slurm"], user="root").stdout
        conf.write_text(LINES + before)
        (etc / "plugstack.conf").write_text(SPANK)
        reconfigure(cluster)
        yield said
    finally:
        clear(cluster)
        conf.write_text(before)
        (block,) = guide.blocks("Uninstall", "console plugin")
        for command in block:
            cluster.run(["bash", "-c", command.line], user="root")
        answers(cluster)
        (etc / "plugstack.conf").unlink()
        assert not [name for name in OURS if (etc / name).exists()]


def clear(cluster: Cluster) -> None:
    """Cancel alice's jobs."""
    cluster.run(["scancel", "-u", "alice"], user="root", check=False)


def submit(cluster: Cluster, *options: str, env: dict[str, str] | None = None) -> CompletedProcess[str]:
    """sbatch, as alice."""
    return cluster.run(["sbatch", *options], check=False, env=env)


def comment(cluster: Cluster, done: CompletedProcess[str]) -> str:
    """The comment of the job that was submitted."""
    match = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert match is not None, done
    shown = cluster.run(["scontrol", "show", "job", match[1]]).stdout
    line = re.search(r"^ +Comment=(.*)$", shown, re.MULTILINE)
    return line[1].rstrip() if line is not None else ""
