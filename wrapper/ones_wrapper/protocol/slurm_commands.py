"""Command lines that change a job in Slurm, for the job's own launcher and for the companion.

No other module builds such command lines. A job is given by its id, or as a task `<array>_<task>`. Needs only the
standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

NO_LICENSES = "none"
"""Word in `QueueWords` that removes all licences from a job."""
QueueWords = tuple[str, str, str, float, str]
"""Partition, QOS, account, time limit in seconds (infinity for none), and licences. An empty text or 0 keeps the job's
own."""
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
    """Return the command that requeues a running or ended job; with `hold`, the job starts only after it was
    released."""
    return ["scontrol", "requeuehold" if hold else "requeue", str(job)]


def hold_command(job: object) -> list[str]:
    # uhold, since the owner could not release an operator's hold.
    return ["scontrol", "uhold", str(job)]


def hold_tasks_command(array: int, tasks: Iterable[int]) -> list[str]:
    # One command for all: Slurm splits an array's record if a command concerns only a part of it.
    return hold_command(f"{array}_[{','.join(map(str, sorted(tasks)))}]")


def move_command(job: object, queue: QueueWords, *words: str) -> list[str]:
    """Return the command that moves a pending job to another queue. Its time limit is set too, since a change of QOS
    resets it."""
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
    """Return the command that changes a pending job's shape. `kind` is the GPU type of the job's request, `others` its
    further GRES: Slurm drops both unless they are repeated. With `tasks` the number of tasks becomes the number of
    nodes. With `cpus_per_gpu` the number of CPUs follows the GPUs.

    Nodes are given as N-N, since a job submitted with -N1 also has a maximum. The number of CPUs is set, too, because
    Slurm raises it with the nodes, but never lowers it. A job that shrinks to one node might otherwise request more
    CPUs than the node has, and could not be released. Slurm itself adds the CPUs of --cpus-per-gpu and --cpus-per-task.
    """
    cpus = max(shape.nodes, shape.nodes * shape.gpus_per_node * cpus_per_gpu)
    words = [f"NumNodes={shape.nodes}-{shape.nodes}", f"NumCPUs={cpus}"]
    words += [f"NumTasks={shape.nodes}"] if tasks else []
    gpus = f"gpu:{f'{kind}:' if kind else ''}{shape.gpus_per_node}"
    words += [] if whole_nodes else [f"Gres={','.join(filter(None, (gpus, others)))}"]
    return move_command(job, queue, *words)


def defer_command(job: object, when: str) -> list[str]:
    """Return the command that sets a pending job's earliest start. `when` is `now`, `now+SECONDS` or `utsSECONDS`."""
    return ["scontrol", "update", f"JobId={job}", f"StartTime={when}"]


def release_commands(job: object, *, start: str = "") -> list[list[str]]:
    """Return the commands that release a held job. With `start`, its earliest start is set first (as in
    `defer_command`)."""
    return [*([defer_command(job, start)] if start else []), ["scontrol", "release", str(job)]]


def throttle_command(array: int, most: int) -> list[str]:
    """Return the command that limits an array to `most` running tasks; 0 for no limit."""
    return ["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={most}"]


ALREADY_ENDED = "already finished"
"""Part of Slurm's error for a change of the throttle of an array that has ended tasks. Slurm changes the throttle
nevertheless."""


def cancel_waiting_command(array: int) -> list[str]:
    return ["scancel", "--state=PENDING", str(array)]
