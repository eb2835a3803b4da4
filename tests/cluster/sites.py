"""The two sites we keep: which Slurm each runs, from which Debian, and how its nodes are cut up.

Both have the same layout, so a test can run on either:

* partition `gpu` (the default): nodes n1-n4, 16 CPUs and 4 GPUs each, as GRES;
* partition `whole`: nodes w1-w4, handed out whole, with 4 GPUs that Slurm knows nothing of.

Nothing here has effects; `root.py` builds a site and `cluster.py` runs one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

USERS: dict[str, int] = {"alice": 2001, "bob": 2002, "ops": 2003}
"""The ordinary users of every site, with their uid (and gid)."""
OPERATOR = "ops"
"""The one of them whom Slurm calls an Operator, where there is accounting."""
ACCOUNT = "lab"
"""The account of all of them, where there is accounting."""


@dataclass(frozen=True)
class Partition:
    """A partition and the nodes that only it has: `prefix`1 to `prefix``nodes`."""

    name: str
    prefix: str
    first_port: int
    nodes: int = 4
    cpus: int = 16
    memory_mb: int = 4000
    gpus: int = 4
    gres: bool = True
    """Whether Slurm knows of the GPUs. If not, only the site's own configuration does."""
    options: str = ""
    kinds: tuple[str, ...] = ()
    """Type of the GPUs of each node; empty where they have none."""

    @property
    def groups(self) -> list[tuple[str, str, str]]:
        """Nodes that are alike, their ports, and the type of their GPUs."""
        if not self.kinds:
            return [(self.hostlist, self.ports, "")]
        return [
            (name, str(self.first_port + i), kind)
            for i, (name, kind) in enumerate(zip(self.names, self.kinds, strict=True))
        ]

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}{i}" for i in range(1, self.nodes + 1)]

    @property
    def hostlist(self) -> str:
        return f"{self.prefix}[1-{self.nodes}]"

    @property
    def ports(self) -> str:
        return f"[{self.first_port}-{self.first_port + self.nodes - 1}]"


GPU = Partition("gpu", "n", 17001, options="Default=YES OverSubscribe=NO MaxTime=1-00:00:00")
WHOLE = Partition("whole", "w", 17011, gres=False, options="OverSubscribe=EXCLUSIVE MaxTime=1-00:00:00")

SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
# What a Python built on Debian loads, whichever way it was built, and what torch (libgomp1) loads.
PYTHON_LIBRARIES = (
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "libgomp1",
    "liblzma5",
    "libncursesw6",
    "libsqlite3-0",
    "libstdc++6",
    "libuuid1",
    "zlib1g",
)
# MariaDB's server alone: its clients, its Perl and its scripts are for people.
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server-core")
TOOLS = ("procps", "iproute2")
# What PySlurm and our own plugin are compiled with.
COMPILER = ("libslurm-dev", "gcc", "libc6-dev")


@dataclass(frozen=True)
class Site:
    """One real Slurm: the Debian release it is installed from and what that release asks for."""

    name: str
    about: str
    suite: str
    packages: tuple[str, ...]
    auth: Literal["slurm", "munge"]
    """23.11 and later can sign with a shared key of their own; before that there is only munge."""
    requeue_delay: bool
    """Whether `SchedulerParameters=requeue_delay` exists (25.11); else a requeued job's wait is
    tied to `AuthInfo=cred_expire`."""
    cgroup_plugin: str
    """What cgroup.conf says so that slurmd starts where there are no cgroups: later releases can
    do without; for older ones v1 is the plugin that does not look whether cgroups are mounted."""
    accounting: bool = False
    """Whether there is a slurmdbd: jobs are recorded, GPUs are counted as TRES, users have an account,
    and OPERATOR is an operator."""
    pyslurm: str | None = None
    """The PySlurm to build for it, or None where only the command line is used."""
    pyslurm_cflags: str = ""
    pyslurm_poses_as: str = ""
    """The SLURM_VERSION_NUMBER that this PySlurm insists on."""
    partitions: tuple[Partition, ...] = (GPU, WHOLE)
    metrics: bool = False
    """Whether slurmctld can serve its own figures as OpenMetrics (25.11)."""
    max_jobs: int = 2000
    """Jobs that slurmctld keeps at once."""
    base: str = ""
    """The site whose built root it uses, "" for one of its own."""
    conf: tuple[str, ...] = ()
    """Further lines of slurm.conf."""
    accounts: tuple[str, ...] = ()
    """What sacctmgr is told besides, a command each."""

    def recipe(self) -> str:
        """A hash over everything that decides what the built root holds."""
        # Raise `format` when root.py itself puts something else into a root.
        parts = {"format": 1, "suite": self.suite, "packages": self.packages, "users": USERS}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]

    def pyslurm_recipe(self) -> str:
        fields = {k: v for k, v in asdict(self).items() if k.startswith("pyslurm")}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:6]


GRES = Site(
    name="gres",
    about="Slurm 26.05 (Debian forky) with PySlurm and accounting",
    suite="forky",
    packages=(
        *SLURM_PACKAGES,
        *ACCOUNTING_PACKAGES,
        *PYTHON_LIBRARIES,
        *TOOLS,
        *("libssl3t64", "libreadline8t64"),
        *COMPILER,
    ),
    auth="slurm",
    requeue_delay=True,
    cgroup_plugin="disabled",
    metrics=True,
    accounting=True,
    pyslurm="25.11.2",
    # The first is Slurm's own switch for callers written against an older release; the others
    # give two names that PySlurm uses the meaning they had in 25.11.
    pyslurm_cflags=(
        "-DSLURM_BACKWARD_COMPAT -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=2100 -Dslurm_free_ctl_conf=slurm_free_conf"
    ),
    pyslurm_poses_as="0x190b00",
)

OLD = Site(
    name="old",
    about="Slurm 22.05 (Debian 12), command line only",
    suite="bookworm",
    packages=(*SLURM_PACKAGES, *PYTHON_LIBRARIES, *TOOLS, *COMPILER, "libssl3", "libreadline8"),
    auth="munge",
    requeue_delay=False,
    cgroup_plugin="cgroup/v1",
)

TYPED = Partition("gpu", "t", 17001, nodes=3, kinds=("2080ti", "a100", "a100"), options="Default=YES")
"""Nodes with GPUs of two types, on sites that the tests of those alone start."""
GRES_TYPED = replace(GRES, name="gres-typed", base="gres", accounting=False, partitions=(TYPED,))
OLD_TYPED = replace(OLD, name="old-typed", base="old", partitions=(TYPED,))

OTHERS = (
    "PartitionName=other Nodes=n[1-4] PriorityTier=10 PreemptMode=OFF MaxTime=1-00:00:00",
    "PartitionName=high Nodes=n[1-4] PriorityTier=20 PreemptMode=OFF MaxTime=1-00:00:00",
    "PartitionName=excl Nodes=n[1-4] PriorityTier=10 PreemptMode=OFF OverSubscribe=EXCLUSIVE MaxTime=1-00:00:00",
)
"""Partitions of others over the nodes of partition gpu, in slurm.conf."""
MEMORY = ("SelectTypeParameters=CR_Core_Memory", "DefMemPerCPU=100")
TIER = "PriorityTier=10 PreemptMode=OFF"
GUEST_PARTITIONS = (
    "PartitionName=scavenge Nodes=n[1-4] PriorityTier=1 PreemptMode=CANCEL MaxTime=1-00:00:00",
    "PartitionName=scavenge-whole Nodes=w[1-4] OverSubscribe=EXCLUSIVE PriorityTier=1 PreemptMode=CANCEL",
)
"""Over the nodes of partitions gpu and whole."""
GUEST_ACCOUNT = ("add account guests", "add user alice account=guests")
PREEMPTIBLE = (replace(GPU, options=f"{GPU.options} {TIER}"), replace(WHOLE, options=f"{WHOLE.options} {TIER}"))
GRES_GUESTS = replace(
    GRES,
    name="gres-guests",
    base="gres",
    conf=(
        *(line.replace("PreemptMode=OFF ", "") for line in OTHERS),
        *MEMORY,
        "PreemptType=preempt/qos",
        "PreemptMode=CANCEL",
        "PreemptParameters=youngest_first,send_user_signal,reclaim_licenses",
        "AccountingStorageEnforce=associations,limits,qos",
        "PriorityWeightQOS=100000",
        "RequeueExit=99",
    ),
    accounts=(
        "add qos guest",
        "modify qos guest set priority=0 preemptmode=cancel",
        "modify qos normal set priority=10 preempt=guest",
        *GUEST_ACCOUNT,
    ),
)
"""Guests are of QOS `guest`, which no user has, or in account `guests`, which alice may charge."""
GRES_SCAVENGE = replace(
    GRES,
    name="gres-scavenge",
    base="gres",
    partitions=PREEMPTIBLE,
    conf=(
        *OTHERS,
        *GUEST_PARTITIONS,
        *MEMORY,
        "PreemptType=preempt/partition_prio",
        "PreemptMode=CANCEL",
        "PreemptParameters=youngest_first,send_user_signal,reclaim_licenses",
        "AccountingStorageEnforce=associations,limits,qos",
    ),
    accounts=GUEST_ACCOUNT,
)
"""Guests are in partition `scavenge`, or `scavenge-whole`."""
OLD_GUESTS = replace(
    OLD,
    name="old-guests",
    base="old",
    partitions=PREEMPTIBLE,
    conf=(
        *OTHERS,
        *GUEST_PARTITIONS,
        *MEMORY,
        "PreemptType=preempt/partition_prio",
        "PreemptMode=CANCEL",
        "RequeueExit=99",
    ),
)
"""The same without accounting."""

SITES: dict[str, Site] = {site.name: site for site in (GRES, OLD, GRES_GUESTS, GRES_SCAVENGE, OLD_GUESTS)}
