"""Command lines by which Slurm changes a job: built only here, for a job's own launcher and for the companion.

Needs only the standard library. A job is named by its id, or as a task `<array>_<task>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

NO_LICENSES = "none"
"""Word for no licences at all."""
QueueWords = tuple[str, str, str, float, str]
"""Partition, QOS, account, time limit in seconds and licences; what is empty or 0 stays as it is."""
UNCHANGED: QueueWords = ("", "", "", 0.0, "")


class NodesAndGpus(Protocol):
    """A shape."""

    @property
    def nodes(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...


def requeue_command(job: object) -> list[str]:
    # Incomplete: without it, a job that its user cancelled a moment ago comes back to life.
    return ["scontrol", "requeuehold", "Incomplete", str(job)]


def again_command(job: object, *, hold: bool) -> list[str]:
    """Requeue a job that runs or has ended; with `hold` it starts only once the hold is lifted."""
    return ["scontrol", "requeuehold" if hold else "requeue", str(job)]


def hold_command(job: object) -> list[str]:
    # uhold, since a hold by an operator would be one that the owner cannot release.
    return ["scontrol", "uhold", str(job)]


def hold_tasks_command(array: int, tasks: Iterable[int]) -> list[str]:
    # One command for all: what is asked of the whole of a record leaves it whole.
    return hold_command(f"{array}_[{','.join(map(str, sorted(tasks)))}]")


def move_command(job: object, queue: QueueWords, *words: str) -> list[str]:
    """Move a pending job to another queue. The time limit is set too, since Slurm resets it with the QOS."""
    names = zip(("Partition", "QOS", "Account", "TimeLimit"), queue[:4], strict=True)
    found = [f"{key}={int(value // 60) if isinstance(value, float) else value}" for key, value in names if value]
    found += [f"Licenses={queue[4].removeprefix(NO_LICENSES)}"] if queue[4] else []
    return ["scontrol", "update", f"JobId={job}", *words, *found]


def reshape_command(
    job: object,
    shape: NodesAndGpus,
    *,
    whole_nodes: bool,
    kind: str,
    queue: QueueWords = UNCHANGED,
    tasks: bool = False,
) -> list[str]:
    """Change a pending job's shape, as N-N nodes, since a job submitted with -N1 has a maximum too. `kind` is the GPU
    type that the job asks for: without it Slurm would take any.

    The CPUs come along: Slurm raises their number with the nodes and leaves it there. So a job back on one node may ask
    for more CPUs than that has. After a node count that was refused it can be neither updated nor released. Slurm adds
    what --cpus-per-gpu and --cpus-per-task ask for. With `tasks` their number comes along.
    """
    words = [f"NumNodes={shape.nodes}-{shape.nodes}", f"NumCPUs={shape.nodes}"]
    words += [f"NumTasks={shape.nodes}"] if tasks else []
    words += [] if whole_nodes else [f"Gres=gpu:{f'{kind}:' if kind else ''}{shape.gpus_per_node}"]
    return move_command(job, queue, *words)


def defer_command(job: object, when: str) -> list[str]:
    """Set a pending job's earliest start: `when` is `now`, `now+SECONDS` or `utsSECONDS`, as for scontrol."""
    return ["scontrol", "update", f"JobId={job}", f"StartTime={when}"]


def release_commands(job: object, *, start: str = "") -> list[list[str]]:
    """Release a held job; with `start`, set its earliest start first, as `defer_command` does."""
    return [*([defer_command(job, start)] if start else []), ["scontrol", "release", str(job)]]


def throttle_command(array: int, most: int) -> list[str]:
    """Let at most `most` tasks run at once; 0 for any number."""
    return ["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={most}"]


ALREADY_ENDED = "already finished"
"""Slurm's complaint of a throttle once a task has ended, though it has changed it all the same."""


def cancel_waiting_command(array: int) -> list[str]:
    return ["scancel", "--state=PENDING", str(array)]
