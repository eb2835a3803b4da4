"""What the guide's hosts are made of: the Debian of the site `gres`, with systemd, Slurm's commands and PostgreSQL."""

from __future__ import annotations

from tests.cluster.sites import GRES, Site

HOST = Site(
    name="host",
    about="a service node of the site gres: systemd, Slurm's commands, PostgreSQL",
    suite=GRES.suite,
    packages=(
        *("slurm-client", "slurm-wlm-basic-plugins", "sackd"),
        *("systemd", "systemd-sysv", "dbus", "sudo", "procps", "iproute2", "util-linux", "sqlite3", "less"),
        *("python3", "python3-venv", "postgresql", "postgresql-client"),
    ),
    auth=GRES.auth,
    requeue_delay=GRES.requeue_delay,
    cgroup_plugin=GRES.cgroup_plugin,
)
