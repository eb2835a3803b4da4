"""What this site writes into its settings and its drop-in: itself, and times that nobody has to wait long for."""

from __future__ import annotations

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
"""
"""For `str.format`. The policy gives free GPUs away without asking what a change costs, so there is always a resize to
break."""
DROP_IN = "WatchdogSec=30s\n"
