"""The live table: its columns, what is above it, and who is on which node, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size

from ones_db import JobSummary
from slurm_ones.show.live import Live, counted, left_s, silent
from slurm_ones.text import plain, progress, seconds, shape

CODES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
}
"""squeue's short names of states."""
SHORT = {name: code for code, name in CODES.items()}

Row = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column of the table: what it shows of a job, and what it is sorted by."""

    name: str
    width: int
    text: Callable[[JobSummary, Live], str]
    key: Callable[[JobSummary], Any]
    """None where there is nothing to sort by: such a job stands last, whichever way is sorted."""
    left: bool = False
    """Begins at the left."""


def _gpus(job: JobSummary) -> int:
    return (job.nodes or 0) * (job.gpus_per_node or 0) if job.running else 0


COLUMNS = (
    Column("job", 8, lambda job, _: str(job.job_id), lambda job: job.job_id),
    Column("user", 8, lambda job, _: plain(job.user, 16), lambda job: job.user, left=True),
    Column("name", 12, lambda job, _: plain(job.name, 24), lambda job: job.name, left=True),
    Column("st", 3, lambda job, _: SHORT.get(job.state, job.state[:3]), lambda job: job.state, left=True),
    Column("shape", 6, lambda job, _: shape(job) or "–", _gpus, left=True),
    Column("batch", 6, lambda job, _: str(job.batch or "–"), lambda job: job.batch or 0),
    Column(
        "samples/s",
        9,
        lambda job, _: f"{job.samples_per_s:.1f}" if job.running and job.samples_per_s else "–",
        lambda job: (job.samples_per_s or 0.0) if job.running else 0.0,
    ),
    Column("epochs", 9, lambda job, _: progress(job), lambda job: job.epoch or 0),
    Column("left", 8, lambda job, _: seconds(left_s(job)), left_s),
    Column("resizes", 7, lambda job, _: str(job.resizes), lambda job: job.resizes),
    Column("why", 20, lambda job, live: plain(_why(job, live), 300), lambda job: job.state, left=True),
)
"""The last takes what room there is."""
LEFT_OUT = ("resizes", "left", "user", "samples/s", "name", "epochs", "batch")
"""In this order where a terminal is too narrow; the job's number, state, shape and why never are."""
BY_NAME = {column.name: column for column in COLUMNS}


def _why(job: JobSummary, live: Live) -> str:
    if job.resizing:
        return f"resize under way: {job.resizing}"
    return live.why.get(job.job_id, "")


@dataclass(frozen=True)
class Selection:
    """Conditions on a job; an empty one holds for all."""

    users: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    """Base states as Slurm names them."""
    jobs: frozenset[int] = frozenset()

    def takes(self, job: JobSummary) -> bool:
        """Whether the job is among those that are asked for."""
        pairs = (
            (job.user, self.users),
            (job.partition, self.partitions),
            (job.account, self.accounts),
            (job.state, self.states),
            (job.job_id, self.jobs),
        )
        return all(not wanted or value in wanted for value, wanted in pairs)

    @property
    def restricts(self) -> bool:
        """Whether there is a condition."""
        return self != Selection()


@dataclass
class Choice:
    """What of the jobs is shown, and in which order."""

    selection: Selection = field(default_factory=Selection)
    every_state: bool = False
    """Jobs that have ended are shown too."""
    by: str = "job"
    """The column that is sorted by."""
    falling: bool = False

    def jobs(self, live: Live) -> list[JobSummary]:
        """The jobs to show, in order."""
        taken = [job for job in live.jobs if (self.every_state or job.end_time is None) and self.selection.takes(job)]
        keys = {job.job_id: BY_NAME[self.by].key(job) for job in taken}
        with_key = [job for job in taken if keys[job.job_id] is not None]
        without = [job for job in taken if keys[job.job_id] is None]
        return sorted(with_key, key=lambda job: keys[job.job_id], reverse=self.falling) + without


def columns_within(width: int) -> tuple[Column, ...]:
    """The columns for which a terminal of that width has room."""
    left = list(COLUMNS)
    for name in LEFT_OUT:
        if sum(column.width for column in left) + 2 * len(left) <= width:
            break
        left.remove(BY_NAME[name])
    return tuple(left)


def header(live: Live, now: float, shown: Sequence[JobSummary]) -> list[str]:
    """The lines above the table: how the companion is, who runs on how many GPUs, what keeps jobs as they are."""
    running = [job for job in live.jobs if job.running]
    waiting = sum(job.end_time is None and not job.running for job in live.jobs)
    gpus, there = sum(map(_gpus, running)), sum(node.gpus for node in live.nodes if node.usable)
    of = f" of {there}" if there else ""
    resizing = sum(bool(job.resizing) for job in live.jobs)
    lines = [
        f"{plain(live.cluster, 30)}  {_companion(live, now)}",
        f"{len(running)} run on {gpus}{of} GPUs, {waiting} wait, {resizing} resize; {len(shown)} shown",
    ]
    kept = counted(live.causes[job.job_id] for job in shown if job.job_id in live.causes)
    return [*lines, kept] if kept else lines


def _companion(live: Live, now: float) -> str:
    if live.health is None or live.leader is None:
        return "no companion has led here yet"
    if not live.leader.holder:
        return "no companion runs"
    if live.health.tick_time is None:
        return f"mode {live.health.mode}, no tick yet"
    ago = max(now - live.health.tick_time, 0.0)
    late = "SILENT: " if silent(live.health, now) else ""
    return f"{late}mode {live.health.mode}, last tick {seconds(ago)} ago, every {live.health.interval_s:.0f} s"


def rows(live: Live, shown: Sequence[JobSummary], columns: Sequence[Column]) -> list[Row]:
    """The texts of the table, a row each."""
    return [tuple(column.text(job, live) for column in columns) for job in shown]


def lines(live: Live, now: float, choice: Choice, width: int) -> list[str]:
    """All of it as plain lines of at most `width` characters, for `--once`."""
    shown, columns = choice.jobs(live), columns_within(width)
    found = [line[:width] for line in header(live, now, shown)]
    table = [tuple(column.name for column in columns), *rows(live, shown, columns)]
    for row in table:
        cells = [cell(text, column) for text, column in zip(row[:-1], columns, strict=False)]
        line = "  ".join([*cells, row[-1]])
        found.append(set_cell_size(line, min(cell_len(line), width)).rstrip())
    return found


def cell(text: str, column: Column) -> str:
    """The text on its side of the column, cut where it is too long."""
    if cell_len(text) > column.width:
        return set_cell_size(text, column.width - 1) + "…"
    return set_cell_size(text, column.width) if column.left else " " * (column.width - cell_len(text)) + text


def node_map(live: Live) -> list[tuple[str, str, dict[int, int], int]]:
    """Each node with its state, the GPUs that each elastic job holds there, and its GPUs in all (0 unknown)."""
    holding: dict[str, dict[int, int]] = {}
    for one in live.held:
        of_node = holding.setdefault(one.node, {})
        of_node[one.job_id] = of_node.get(one.job_id, 0) + one.gpus
    known = {node.name: (node.state, node.gpus) for node in live.nodes}
    names = [*known, *sorted(holding.keys() - known.keys())]
    return [(name, known.get(name, ("", 0))[0], holding.get(name, {}), known.get(name, ("", 0))[1]) for name in names]


def as_json(job: JobSummary) -> dict[str, Any]:
    """A job as `--json` prints it."""
    return {**asdict(job), "shape": shape(job), "local_batch": job.local_batch, "jct_s": job.jct_s}
