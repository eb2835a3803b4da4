"""Slurm's configuration files for a site, as text. Every setting that is not obvious says why."""

from __future__ import annotations

from .sites import Partition, Site

LOGS = "/var/log/slurm"
STATE = "/var/spool/slurmctld"


def slurm_conf(site: Site, cluster: str, accounting: bool = False) -> str:
    """slurm.conf for a cluster whose host name and cluster name are both `cluster`."""
    # By default a requeued job may not start for two minutes, so that its old credentials have
    # expired. Tests cannot wait that long; 25.11 made the wait a setting of its own.
    requeue = ",requeue_delay=0" if site.requeue_delay else ""
    lines = [
        f"ClusterName={cluster}",
        f"SlurmctldHost={cluster}(127.0.0.1)",
        "SlurmUser=slurm",
        *_authentication(site),
        f"StateSaveLocation={STATE}",
        "SlurmdSpoolDir=/var/spool/slurmd.%n",
        "SlurmctldPidFile=/run/slurmctld/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.%n.pid",
        f"SlurmctldLogFile={LOGS}/slurmctld.log",
        f"SlurmdLogFile={LOGS}/slurmd.%n.log",
        # No cgroups and no accounting of memory and CPU: neither is there in every container,
        # and none of our tests is about them.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        "Licenses=matlab:3",
        *(_accounting(cluster) if accounting else []),
        # Believe the CPUs and the memory written below, not what the machine has.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "JobRequeue=1",
        "KillWait=5",
        f"MaxJobCount={site.max_jobs}",
        *(["MetricsType=metrics/openmetrics"] if site.metrics else []),
        f"SchedulerParameters=bf_interval=2,sched_interval=2{requeue}",
    ]
    for partition in site.partitions:
        lines += _partition(partition, cluster)
    # Without accounting slurmctld would end at it.
    lines += [line for line in site.conf if accounting or not line.startswith("AccountingStorageEnforce")]
    return "\n".join(lines) + "\n"


def _accounting(cluster: str) -> list[str]:
    # Nothing is enforced: who has no association may submit all the same, as where there is no accounting.
    # There, Slurm refuses AccountingStorageTRES: it gives out GPUs but no TRES of a job counts them. Only
    # `scontrol --details show job` does (GRES=gpu:4(IDX:0-3)).
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={cluster}",
        "AccountingStorageTRES=gres/gpu",
        # So that accounting can tell an array of blocks from a sweep.
        "AccountingStoreFlags=job_comment",
    ]


def _authentication(site: Site) -> list[str]:
    if site.auth == "slurm":
        return ["AuthType=auth/slurm", "CredType=cred/slurm"]
    # Here the wait of a requeued job is cred_expire + 1 s, and 5 is the least Slurm takes.
    return ["AuthType=auth/munge", "CredType=cred/munge", "AuthInfo=cred_expire=5"]


def _partition(partition: Partition, host: str) -> list[str]:
    def gres(kind: str) -> str:
        return f" Gres=gpu:{f'{kind}:' if kind else ''}{partition.gpus}" if partition.gres else ""

    return [
        *(
            f"NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 "
            f"Port={ports} CPUs={partition.cpus} RealMemory={partition.memory_mb}{gres(kind)} "
            "State=UNKNOWN"
            for names, ports, kind in partition.groups
        ),
        f"PartitionName={partition.name} Nodes={partition.hostlist} {partition.options}",
    ]


def gres_conf(site: Site) -> str:
    """gres.conf. A GPU needs a device file (a bare Count= leaves the node INVALID), so the box
    makes /dev/gpu0 and so on, which are /dev/null by other names."""
    return "".join(
        f"NodeName={names} Name=gpu {f'Type={kind} ' if kind else ''}File=/dev/gpu[0-{p.gpus - 1}]\n"
        for p in site.partitions
        for names, _, kind in p.groups
        if p.gres
    )


def devices(site: Site) -> list[str]:
    """The device files that gres.conf names."""
    return [f"gpu{i}" for i in range(max(p.gpus for p in site.partitions))]


def cgroup_conf(site: Site) -> str:
    return f"CgroupPlugin={site.cgroup_plugin}\n"


def hosts(site: Site, cluster: str) -> str:
    """/etc/hosts: every node is this machine."""
    names = [name for partition in site.partitions for name in partition.names]
    return f"127.0.0.1 localhost\n127.0.0.1 {cluster} {' '.join(names)}\n"
