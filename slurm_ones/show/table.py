"""Tables for terminals, with fixed widths or widths by content, and their JSON. Also filter and order of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.table import Table

from ones_db import JobSummary
from slurm_ones.show.columns import GIVE_WAY, JOB, NODE, TOP, ShownColumn, ShownJob, gpus, record
from slurm_ones.show.live import Live, counted, node_rows, silent
from slurm_ones.show.usage import bar
from slurm_ones.text import deadline, plain, safe, seconds, troubles

T = TypeVar("T")

BY_WORD: Mapping[str, ShownColumn[ShownJob]] = {word: column for column in TOP for word in (column.title, column.name)}
"""Columns by which `top` can sort: each by its title in `top` and by its name in JSON."""
METER = 16
"""Width of the bar that shows how many GPUs are in use, in characters."""
_ALWAYS = frozenset({"st", "shape", "why"})
"""Columns that `top` shows on every terminal, besides the job id."""


JobFilter = Mapping[str, frozenset[Any]]
"""Values that a job may have in some attributes of its summary, such as `user`. An empty filter takes every job."""


def takes(selection: JobFilter, job: JobSummary) -> bool:
    """Return True if the filter takes the job."""
    return all(getattr(job, name) in values for name, values in selection.items())


@dataclass
class JobOrder:
    """Choice of the jobs to show, and their order."""

    selection: JobFilter = field(default_factory=dict)
    every_state: bool = False
    """True if ended jobs are shown too."""
    by: str = "job"
    """Name of the column to sort by."""
    falling: bool = False

    def jobs(self, live: Live) -> list[ShownJob]:
        """Return the jobs to show, in order. Jobs without a value in the sorted column always come last."""
        alive = [one for one in live.jobs if self.every_state or one.job.end_time is None]
        taken = [one for one in alive if takes(self.selection, one.job)]
        column = BY_WORD[self.by]
        keyed = [((column.key or column.value)(one), one) for one in taken]
        known = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=self.falling)
        return [one for _, one in known] + [one for key, one in keyed if key is None]


def fitting(columns: Sequence[ShownColumn[T]], widths: Mapping[str, int], width: int | None) -> list[ShownColumn[T]]:
    """Return the columns that fit into `width` characters with two blanks between them; all if `width` is None."""
    left = list(columns)
    for name in GIVE_WAY.split():
        if width is None or sum(widths[column.name] for column in left) + 2 * (len(left) - 1) <= width:
            break
        left = [column for column in left if column.name != name or widths.get(f"keep {name}")]
    return left


def measured(columns: Sequence[ShownColumn[T]], rows: Sequence[T], width: int | None) -> tuple[Table, int, list[str]]:
    """Return (table with widths by content, its total width, titles of the columns that do not fit into `width`)."""
    cells = {column.name: [plain(column.text(one), column.most) for one in rows] for column in columns}
    widths = {column.name: max(map(cell_len, [column.title, *cells[column.name]])) for column in columns}
    shown = fitting(columns, widths, width)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in shown:
        left = column.left or column is shown[0]
        table.add_column(column.title, justify="left" if left else "right", no_wrap=True)
    for row in zip(*(cells[column.name] for column in shown), strict=True):
        table.add_row(*map(safe, row))
    left_out = [column.title for column in columns if column not in shown]
    return table, sum(widths[column.name] for column in shown) + 2 * (len(shown) - 1), left_out


def columns_within(width: int) -> list[ShownColumn[ShownJob]]:
    """Return the columns of `top` for a terminal of this width."""
    widths = {column.name: column.width for column in TOP} | {f"keep {name}": 1 for name in _ALWAYS}
    return fitting(TOP, widths, width - 2)


def header(live: Live, now: float, shown: Sequence[ShownJob]) -> list[str]:
    """Return the lines above the table: the companion, numbers of GPUs and jobs, and why jobs keep their sizes."""
    jobs = [one.job for one in live.jobs]
    running = [job for job in jobs if job.running]
    waiting = sum(job.state == "PENDING" for job in jobs)
    there = sum(node.gpus for node in live.nodes if node.usable)
    of = f" of {there}" if there else ""
    resizing = sum(bool(job.resizing) for job in jobs)
    meter = f"{bar(sum(map(gpus, running)), there, METER):·<{METER}} " if there else ""
    lines = [
        f"{plain(live.cluster, 30)}  {_companion(live, now)}{', states from Slurm' if live.asked else ''}",
        f"{meter}{len(running)} run on {sum(map(gpus, running))}{of} GPUs, {waiting} wait, {resizing} resize; "
        f"{len(shown)} shown",
    ]
    kept = counted(one.cause for one in shown if one.cause)
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


def rows(shown: Sequence[ShownJob], columns: Sequence[ShownColumn[ShownJob]]) -> list[list[str]]:
    """Return the cells of a table with fixed widths. The last column is not padded."""
    return [[cell(column.text(one), column) for column in columns[:-1]] + [columns[-1].text(one)] for one in shown]


def lines(live: Live, now: float, choice: JobOrder, width: int) -> list[str]:
    """Return all lines of `top --once`, without markup. Each has at most `width` characters."""
    shown, columns = choice.jobs(live), columns_within(width)
    found = [part for line in header(live, now, shown) for part in wrap(line, width)]
    heads = [cell(column.title, column) for column in columns[:-1]] + [columns[-1].title]
    start = sum(column.width + 2 for column in columns[:-1])
    for *cells, last in [heads, *rows(shown, columns)]:
        first, *more = wrap(last, width - start) or [""]
        found += ["  ".join([*cells, first]).rstrip(), *(" " * start + line for line in more)]
    return [set_cell_size(line, min(cell_len(line), width)) for line in found]


def cell(text: str, column: ShownColumn[Any]) -> str:
    """Return the text aligned and padded for its column. A text that is too long is cut."""
    if cell_len(text) > column.width:
        return set_cell_size(text, column.width - 1) + "…"
    return set_cell_size(text, column.width) if column.left else " " * (column.width - cell_len(text)) + text


def notes(shown: Sequence[ShownJob]) -> list[str]:
    """Return a line of rich's markup for each refusal, wrong start, odd report, trouble and deadline of a job."""
    said = [(one.job, (one.job.refusal, one.wrong, one.job.report_note, *troubles(one.job))) for one in shown]
    said += [(one.job, (deadline(one.promise),)) for one in shown if one.promise and one.job.end_time is None]
    return [f"job {job.job_id}: {safe(text, 300)}" for job, texts in said for text in map(str, texts) if text]


def as_json(live: Live, shown: Sequence[ShownJob]) -> dict[str, Any]:
    """Return all that `top` shows as a JSON object."""
    return {
        "cluster": live.cluster,
        "leader": live.leader._asdict() if live.leader else None,
        "health": live.health._asdict() if live.health else None,
        "jobs": [record(JOB, one) for one in shown],
        "nodes": [record(NODE, node) for node in node_rows(live.nodes, live.held)],
    }
