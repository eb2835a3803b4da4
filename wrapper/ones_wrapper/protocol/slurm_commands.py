"""Command lines by which Slurm changes a job, for the job's own launcher and for the companion.

Only this module builds them. Needs only the standard library. A job is named by its id, or as a task `<array>_<task>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

NO_LICENSES = "none"
"""Word for "no licences"."""
QueueWords = tuple[str, str, str, float, str]
"""Partition, QOS, account, time limit in seconds (infinity for none), and licences; empty or 0 leaves the job's own."""
UNCHANGED: QueueWords = ("", "", "", 0.0, "")


class NodesAndGpus(Protocol):
    """Shape of a job."""

    @property
    def nodes(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...


def requeue_command(job: object, *, hold: bool = True) -> list[str]:
    # Incomplete: without it, a job that its user cancelled a moment ago comes back to life.
    return ["scontrol", "requeuehold" if hold else "requeue", "Incomplete", str(job)]


def again_command(job: object, *, hold: bool) -> list[str]:
    """Return the command that requeues a running or ended job; with `hold` the job starts only after its release."""
    return ["scontrol", "requeuehold" if hold else "requeue", str(job)]


def hold_command(job: object) -> list[str]:
    # uhold, since the owner could not release an operator's hold.
    return ["scontrol", "uhold", str(job)]


def hold_tasks_command(array: int, tasks: Iterable[int]) -> list[str]:
    # One command for all: Slurm splits an array's record if a command concerns only a part of it.
    return hold_command(f"{array}_[{','.join(map(str, sorted(tasks)))}]")


def move_command(job: object, queue: QueueWords, *words: str) -> list[str]:
    """Return the command that moves a pending job to another queue and sets its time limit, which the QOS resets."""
    names = zip(("Partition", "QOS", "Account", "TimeLimit"), queue[:4], strict=True)
    found = [f"{key}={_minutes(value) if isinstance(value, float) else value}" for key, value in names if value]
    found += [f"Licenses={'' if queue[4] == NO_LICENSES else queue[4]}"] if queue[4] else []
    return ["scontrol", "update", f"JobId={job}", *words, *found]


def _minutes(seconds: float) -> str:
    return "UNLIMITED" if math.isinf(seconds) else f"{seconds // 60:.0f}"


def reshape_command(
    job: object,
    shape: NodesAndGpus,
    *,
    whole_nodes: bool,
    kind: str,
    queue: QueueWords = UNCHANGED,
    tasks: bool = False,
    cpus_per_gpu: int = 0,
    others: str = "",
) -> list[str]:
    """Return the command that changes a pending job's shape. `kind` is the GPU type that the job asks for, `others` its
    further GRES: Slurm would drop a type or GRES that is not repeated. With `tasks` the number of tasks changes, too;
    with `cpus_per_gpu` the number of CPUs follows the GPUs.

    Nodes are given as N-N, since a job submitted with -N1 also has a maximum. CPUs must change as well: Slurm raises
    their number with the nodes and leaves it there. Back on one node the job might ask for more CPUs than a node has. A
    job whose node count was refused can be neither updated nor released. Slurm adds the CPUs of --cpus-per-gpu and
    --cpus-per-task.
    """
    cpus = max(shape.nodes, shape.nodes * shape.gpus_per_node * cpus_per_gpu)
    words = [f"NumNodes={shape.nodes}-{shape.nodes}", f"NumCPUs={cpus}"]
    words += [f"NumTasks={shape.nodes}"] if tasks else []
    gpus = f"gpu:{f'{kind}:' if kind else ''}{shape.gpus_per_node}"
    words += [] if whole_nodes else [f"Gres={','.join(filter(None, (gpus, others)))}"]
    return move_command(job, queue, *words)


def defer_command(job: object, when: str) -> list[str]:
    """Return the command that sets a pending job's earliest start: `when` is `now`, `now+SECONDS` or `utsSECONDS`."""
    return ["scontrol", "update", f"JobId={job}", f"StartTime={when}"]


def release_commands(job: object, *, start: str = "") -> list[list[str]]:
    """Return the commands that release a held job; with `start`, its earliest start is set first (`defer_command`)."""
    return [*([defer_command(job, start)] if start else []), ["scontrol", "release", str(job)]]


def throttle_command(array: int, most: int) -> list[str]:
    """Return the command that lets at most `most` tasks of an array run at once; 0 for any number."""
    return ["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={most}"]


ALREADY_ENDED = "already finished"
"""Part of Slurm's error for a throttle once a task has ended, although the throttle was changed."""


def cancel_waiting_command(array: int) -> list[str]:
    return ["scancel", "--state=PENDING", str(array)]
