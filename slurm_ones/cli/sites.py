"""Sites with real users: what a batch script there looks like, and which public page says so.

Read in November 2026 from public user guides, or from stored copies of them. Limits change without notice: each site's
own command tells them (`qlimits`, `sinfo`, `sacctmgr`). What no guide was found to say has no source, and is to be
asked. Nothing here was tried at these sites.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

TACC_GUIDE = "docs.tacc.utexas.edu/hpc"
FRONTERA_GUIDE = f"{TACC_GUIDE}/frontera, last update 2025-07-09"
LS6_GUIDE = f"{TACC_GUIDE}/lonestar6, limits of 2025-07-09"
STAMPEDE_OPTIONS = f"{TACC_GUIDE}/stampede3, table of sbatch options, to which Lonestar6's guide refers"
VISTA_GUIDE = f"{TACC_GUIDE}/vista, last update 2025-07-09"
TACC_CONDUCT = "docs.tacc.utexas.edu/basics/conduct, 2026-04-24"
TACC_CHARGES = "github.com/TACC/TACC-Docs, jobaccountingsrc.md, undated"
TACC_CRON = "github.com/TACC/TACC-Docs, horizon-crontab.md, undated"
TACC_CONTAINERS = "docs.tacc.utexas.edu/aiml/containers, undated copy"
NERSC_POLICY = "docs.nersc.gov/jobs/policy, undated copy"
NERSC_NODES = "docs.nersc.gov/beginner-guide/nodetypesfig, undated copy"
NERSC_SCRATCH = "docs.nersc.gov/filesystems/perlmutter-scratch, undated copy"
NERSC_LOGIN = "docs.nersc.gov/policies/resource-usage, undated copy"
NERSC_CRON = "docs.nersc.gov/jobs/workflow/workflow-queue, undated copy"
DELTA_JOBS = "docs.ncsa.illinois.edu/systems/delta, user_guide/running_jobs, policy of 2022-12-19"
DELTA_CHARGES = "docs.ncsa.illinois.edu/systems/delta, user_guide/job_accounting, undated copy"
DELTA_CONTAINERS = "docs.ncsa.illinois.edu/systems/delta, user_guide/containers, undated copy"
DELTA_LOGIN = "docs.ncsa.illinois.edu/systems/delta, user_guide/citizenship, 2025"


@dataclass(frozen=True)
class Fact:
    """One thing that a site's guide says; without a source, one that was looked for and not found, and whom to ask."""

    about: str
    says: str
    source: str = ""


@dataclass(frozen=True)
class SiteRecord:
    """What differs between sites in a batch script."""

    title: str
    partition: str | None
    """The default; None where Slurm's own default will do."""
    gpus_per_node: int
    asks: Literal["gres", "gpus-per-node", "whole nodes"]
    """How GPUs are asked for; `whole nodes`: Slurm knows of none."""
    whole_nodes: bool
    """Whether a job gets and pays whole nodes."""
    arrays: bool
    time: str = "24:00:00"
    directives: tuple[str, ...] = ()
    """Further options of sbatch."""
    scratch: str = ""
    """What becomes of files on $SCRATCH; empty where there is none that we know of."""
    facts: tuple[Fact, ...] = ()
    other_partitions: str = ""

    @property
    def account(self) -> bool:
        """Whether the script names an account: all but the generic one."""
        return bool(self.facts)


_TACC_PURGE = "Files not accessed for ten days may be deleted."
_ASK_TACC = "not found; check with TACC's help desk"
_TASKS = (
    "-N with -n or --ntasks-per-node is called required; slurm-ones cannot resize a job with task counts, so the "
    "script has none: see what `sbatch --test-only` says"
)


def _tacc(guide: str) -> tuple[Fact, ...]:
    return (
        Fact("task counts", _TASKS, guide),
        Fact("memory", "--mem is refused", guide),
        Fact("environment", "a job inherits that of sbatch, with its modules; --export is to be avoided", guide),
        Fact("charges", "whole nodes, at least 15 minutes for each start", TACC_CHARGES),
        Fact("$SCRATCH", "job output belongs there; files not accessed in ten days may be purged", TACC_CONDUCT),
        Fact("login nodes", "no jobs; a script that polls jobs does so once every few minutes", TACC_CONDUCT),
        Fact("cron", "allowed; a crontab belongs to the login node where it was made", TACC_CRON),
        Fact("containers", "Apptainer, on compute nodes alone: `module load tacc-apptainer`", TACC_CONTAINERS),
        Fact("requeue", _ASK_TACC),
        Fact("`scontrol update` by users", _ASK_TACC),
        Fact("srun in a job", f"{_ASK_TACC}; else `ones-run --launcher ibrun`"),
    )


SITES: dict[str, SiteRecord] = {
    "gres": SiteRecord(
        title="a site where Slurm knows the GPUs (GRES)",
        partition=None,
        gpus_per_node=1,
        asks="gres",
        whole_nodes=False,
        arrays=True,
        directives=("--cpus-per-gpu=4",),
    ),
    "frontera": SiteRecord(
        title="Frontera (TACC)",
        partition="rtx",
        gpus_per_node=4,
        asks="whole nodes",
        whole_nodes=True,
        arrays=False,
        scratch=_TACC_PURGE,
        facts=(
            Fact(
                "partition", "rtx: 4 GPUs a node, at most 16 nodes a job, 48 hours, 3 SUs a node-hour", FRONTERA_GUIDE
            ),
            Fact("limits of a user", "rtx: 32 nodes, 15 jobs that run and 36 submitted", FRONTERA_GUIDE),
            Fact("job arrays", "not available, so the job is resized by a requeue", FRONTERA_GUIDE),
            Fact("account", "needed by users with several projects", FRONTERA_GUIDE),
            *_tacc(FRONTERA_GUIDE),
        ),
        other_partitions="rtx-dev (2 hours)",
    ),
    "lonestar6": SiteRecord(
        title="Lonestar6 (TACC)",
        partition="gpu-a100",
        gpus_per_node=3,
        asks="whole nodes",
        whole_nodes=True,
        arrays=True,
        scratch=_TACC_PURGE,
        facts=(
            Fact("partition", "gpu-a100: at most 8 nodes a job, 48 hours, 4 SUs a node-hour", LS6_GUIDE),
            Fact("limits of a user", "gpu-a100: 12 nodes, 8 jobs that run and 40 submitted", LS6_GUIDE),
            Fact("GPUs a node", "3 in gpu-a100, 2 in gpu-h100: set ONES_GPUS_PER_NODE there", LS6_GUIDE),
            Fact(
                "Slurm",
                "20.11.8 by its guide; slurm-ones was tried with 22.05 and 26.05: `squeue --version`",
                LS6_GUIDE,
            ),
            Fact("job arrays", "supported", STAMPEDE_OPTIONS),
            Fact("account", "needed by users with several projects", STAMPEDE_OPTIONS),
            Fact("--gres", "not supported", STAMPEDE_OPTIONS),
            *_tacc(STAMPEDE_OPTIONS),
        ),
        other_partitions="gpu-a100-dev (2 hours), gpu-a100-small, gpu-h100",
    ),
    "vista": SiteRecord(
        title="Vista (TACC)",
        partition="gh",
        gpus_per_node=1,
        asks="whole nodes",
        whole_nodes=True,
        arrays=True,
        scratch=_TACC_PURGE,
        facts=(
            Fact("partition", "gh: 1 GPU a node, at most 64 nodes a job, 48 hours, 1 SU a node-hour", VISTA_GUIDE),
            Fact("limits of a user", "gh: 192 nodes, 20 jobs that run and 40 submitted", VISTA_GUIDE),
            Fact("job arrays", "supported", VISTA_GUIDE),
            Fact("account", "needed by users with several projects", VISTA_GUIDE),
            Fact("--gres", "not supported", VISTA_GUIDE),
            Fact("processors", "ARM: the environment, or the image, must be built for aarch64", VISTA_GUIDE),
            *_tacc(VISTA_GUIDE),
        ),
        other_partitions="gh-dev (2 hours)",
    ),
    "perlmutter": SiteRecord(
        title="Perlmutter (NERSC)",
        partition=None,
        gpus_per_node=4,
        asks="gpus-per-node",
        whole_nodes=True,
        arrays=True,
        time="12:00:00",
        directives=("--constraint=gpu", "--qos=regular", "--cpus-per-gpu=16"),
        scratch="Files that were not accessed for 8 weeks may be deleted.",
        facts=(
            Fact("queue", "a QOS (-q): most jobs use regular, and without one a job gets debug", NERSC_POLICY),
            Fact("GPUs a node", "4, with one processor of 64 cores (EPYC 7763)", NERSC_NODES),
            Fact("account", "-A names the project where it is not your default one", NERSC_POLICY),
            Fact("charges", "nodes and the time used, times the factor of the QOS", NERSC_POLICY),
            Fact("$SCRATCH", "jobs belong there; files not accessed for 8 weeks may be deleted", NERSC_SCRATCH),
            Fact("login nodes", "no computation; a user's processes are throttled to half the CPUs", NERSC_LOGIN),
            Fact("cron", "scrontab, in UTC, with the workflow QOS (on request) and -C cron", NERSC_CRON),
            Fact("walltime of regular", "not found; check with docs.nersc.gov/jobs/policy"),
            Fact("suffix _g of accounts", "not found; check with iris.nersc.gov"),
            Fact("job arrays", "not found; check with docs.nersc.gov/jobs/examples"),
            Fact("requeue", "not found; check with NERSC's help desk"),
            Fact("`scontrol update` by users", "not found; check with NERSC's help desk"),
        ),
    ),
    "delta": SiteRecord(
        title="Delta (NCSA)",
        partition="gpuA100x4",
        gpus_per_node=4,
        asks="gpus-per-node",
        whole_nodes=False,
        arrays=True,
        directives=("--cpus-per-gpu=16", "--mem-per-gpu=58G"),
        scratch="What is deleted when was not found: check with NCSA's help.",
        facts=(
            Fact("partition", "gpuA100x4: 4 A100 a node, 48 hours; without --time a job gets 30 minutes", DELTA_JOBS),
            Fact("sharing", "nodes are shared; without --mem a job gets 1000 MB a core", DELTA_JOBS),
            Fact("requeue", "a job is requeued only if it was submitted with --requeue", DELTA_JOBS),
            Fact("job arrays", "supported", DELTA_JOBS),
            Fact("preemption", "partitions that end in -preempt cost half; SIGTERM comes 5 minutes before", DELTA_JOBS),
            Fact("account", "`accounts` lists yours; those for GPUs end in -delta-gpu", DELTA_CHARGES),
            Fact("charges", "a GPU-hour with up to 16 cores and 62.5 GB; at least 1 SU a job", DELTA_CHARGES),
            Fact("containers", "Apptainer; $HOME is bound, /projects is not", DELTA_CONTAINERS),
            Fact("$SCRATCH", "set by `module reset`", DELTA_CONTAINERS),
            Fact("login nodes", "no production; codes that look like applications are stopped", DELTA_LOGIN),
            Fact("purge, cron", "not found; check with NCSA's help"),
            Fact("`scontrol update` by users", "not found; check with NCSA's help"),
        ),
        other_partitions="gpuA40x4, gpuA100x8, gpuH200x8, and with -preempt gpuA100x4-preempt",
    ),
}
"""By the name that `slurm-ones template` takes."""


def page() -> str:
    """The sections of docs/sites.md, as Markdown."""
    lines: list[str] = []
    for name, site in SITES.items():
        if not site.facts:
            continue
        account = "PROJECT-delta-gpu" if name == "delta" else "PROJECT"
        lines += [f"### {site.title}", "", "```", f"slurm-ones template {name} --account {account} > job.sbatch"]
        lines += ["slurm-ones check job.sbatch", "sbatch job.sbatch train.py --epochs 90", "```", ""]
        if site.other_partitions:
            lines += [f"Other partitions (`--partition`): {site.other_partitions}.", ""]
        lines += ["| about | | source |", "| --- | --- | --- |"]
        lines += [f"| {fact.about} | {fact.says} | {fact.source or 'none'} |" for fact in site.facts]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
