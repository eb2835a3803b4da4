"""The site: what its hosts are made of, and what it writes into its settings and its drop-in (itself, short times)."""

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


SETTINGS = """\
cluster = "{cluster}"
database = "{url}"
spool = "{spool}"
tick_s = 2
takeover_s = 6
timeout_s = 8
policy = "ones-sc21"
policy_options = {{ epochs_before_doubling = 1 }}
dwell_s = 2
max_wait_s = 20
drain_timeout_s = 10
start_timeout_s = 30
park_lease_s = 30
leave_s = 20
near_end_s = 0
near_limit_s = 0
growth_cost = 1000
"""
"""For `str.format`. The policy gives free GPUs away without asking what a change costs, so there is always a resize to
break."""
DROP_IN = "WatchdogSec=30s\n"
