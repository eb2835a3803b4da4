"""The window of `slurm-ones top`: a table of jobs, and below it why, log or nodes. It reads, and changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from ones_db import Store, StoreError
from slurm_ones.config import ConfigError, Settings
from slurm_ones.show.columns import ShownJob
from slurm_ones.show.live import Live, NotSeenYet
from slurm_ones.show.table import JobOrder, columns_within, header, rows
from slurm_ones.show.why import told
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.connect import connect
from slurm_ones.slurm.model import Job
from slurm_ones.text import plain
from slurm_ones.untrusted_files import NotBelieved, read_from

DECISIONS = 3
LOG_LINES = 200
ERRORS = (StoreError, ConfigError, NotSeenYet, OSError)
"""What may be otherwise at the next look."""


class TopApp(App[None]):
    """The jobs that `look` finds, and more of the one under the cursor from `opened`."""

    TITLE = "slurm-ones top"
    CSS = """
    #header { height: auto; padding: 0 1; background: $panel; }
    #jobs { height: 1fr; }
    #below { height: 40%; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("w", "below('why')", "Why"),
        Binding("l", "below('log')", "Log"),
        Binding("n", "below('nodes')", "Nodes"),
        Binding("s", "sort", "Sort"),
        Binding("r", "turn", "Reverse"),
        Binding("a", "ended", "Ended too"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        settings: Settings,
        look: Callable[[], Live],
        opened: Callable[[], Store],
        choice: JobOrder,
        every_s: float,
    ) -> None:
        """Use `run`. `look` is called every `every_s` seconds from a thread; `opened` opens the database."""
        super().__init__()
        self._look, self._opened, self._choice, self._every_s = look, opened, choice, every_s
        self._logs = Logs(settings)
        self._live = Live("")
        self._shown: list[ShownJob] = []
        self._below = "why"
        self._asked: tuple[object, ...] = ()
        """What the part below was last made for."""

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        yield Static(id="header")
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="below"):
            yield Static(id="text")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Look now, and then again and again."""
        self.query_one(DataTable).focus()
        self.look_again()
        self.set_interval(self._every_s, self.look_again)

    def on_resize(self) -> None:
        """The width says which columns there are."""
        self._draw()

    def on_data_table_row_highlighted(self) -> None:
        """Another job is under the cursor."""
        self._fill_below()

    def action_below(self, what: str) -> None:
        """Show why, log or nodes below."""
        self._below = what
        self._fill_below()

    def action_sort(self) -> None:
        """Sort by the next column that is shown."""
        names = [column.title for column in columns_within(self.size.width)]
        at = names.index(self._choice.by) if self._choice.by in names else -1
        self._choice.by = names[(at + 1) % len(names)]
        self._draw()

    def action_turn(self) -> None:
        """The other way round."""
        self._choice.falling = not self._choice.falling
        self._draw()

    def action_ended(self) -> None:
        """Show jobs that have ended as well, or no longer."""
        self._choice.every_state = not self._choice.every_state
        self._draw()

    @work(thread=True, exclusive=True, group="look")
    def look_again(self) -> None:
        """Read the jobs, beside what the window does."""
        worker = get_current_worker()
        try:
            live = self._look()
        except ERRORS as error:
            if not worker.is_cancelled:
                self.call_from_thread(self._complain, str(error))
            return
        if not worker.is_cancelled:
            self.call_from_thread(self._show, live)

    def _complain(self, text: str) -> None:
        self.query_one("#header", Static).update(Text(f"cannot read the jobs: {plain(text, 500)}", style="bold red"))

    def _show(self, live: Live) -> None:
        self._live = live
        self._draw()

    def _draw(self) -> None:
        table, columns = self.query_one(DataTable), columns_within(self.size.width)
        at = self._current()
        self._shown = self._choice.jobs(self._live)
        lines = header(self._live, time.time(), self._shown)
        turned = " (largest first)" if self._choice.falling else ""
        self.query_one("#header", Static).update(Text("\n".join([*lines, f"sorted by {self._choice.by}{turned}"])))
        scroll = table.scroll_offset
        table.clear(columns=True)
        for column in columns:
            width = None if column is columns[-1] else column.width
            table.add_column(Text(column.title), width=width, key=column.name)
        for one, row in zip(self._shown, rows(self._shown, columns), strict=True):
            table.add_row(*map(Text, row), key=str(one.job.job_id))
        ids = [one.job.job_id for one in self._shown]
        if at in ids:
            table.move_cursor(row=ids.index(at), animate=False)
        table.scroll_to(y=scroll.y, animate=False)
        self._fill_below()

    def _current(self) -> int | None:
        """The job under the cursor."""
        row = self.query_one(DataTable).cursor_row
        return self._shown[row].job.job_id if 0 <= row < len(self._shown) else None

    def _fill_below(self) -> None:
        asked = (self._below, self._current(), self._live)
        if asked != self._asked:
            self._asked = asked
            self.tell(self._below, self._current(), self._live)

    @work(thread=True, exclusive=True, group="below")
    def tell(self, what: str, job_id: int | None, live: Live) -> None:
        """Make the part below, beside what the window does."""
        worker = get_current_worker()
        try:
            text = self._told(what, job_id, live)
        except ERRORS as error:
            text = Text(plain(str(error), 500), style="red")
        if not worker.is_cancelled:
            self.call_from_thread(self.query_one("#text", Static).update, text)

    def _told(self, what: str, job_id: int | None, live: Live) -> Text:
        if what == "nodes":
            return nodes_text(live, job_id)
        if job_id is None:
            return Text("no elastic job is shown")
        if what == "log":
            return Text("\n".join(self._logs.tail(job_id, LOG_LINES)))
        with self._opened() as store:
            found = store.job_summaries([job_id])
            lines = list(told(store, found[0], DECISIONS)) if found else [f"job {job_id} is no longer there"]
        return Text.from_markup("\n".join(lines), emoji=False)


def nodes_text(live: Live, job_id: int | None) -> Text:
    """Each node with the GPUs that each elastic job holds there, those of `job_id` in bold."""
    text = Text()
    for node in live.node_rows:
        taken = sum(node.held.values())
        text.append(f"{plain(node.name, 16):16} {node.state:9} ")
        text.append(f"{taken}/{node.gpus} " if node.gpus else f"{taken} ")
        for number, count in node.held.items():
            text.append(f" {number}", style="bold" if number == job_id else "")
            text.append(" " + "■" * min(count, 64), style="bold" if number == job_id else "")
        text.append("\n")
    return text if text else Text("no node is known")


ASK_AGAIN_S = 60.0
"""Seconds for which Slurm's answer holds."""
READ = 1 << 16
"""Bytes at the end of a log that are looked at."""
WIDTH = 500


class Logs:
    """Logs of jobs, whose places are asked of Slurm once a minute at most, however often they are looked at."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._found: dict[int, tuple[float, Job | str | None]] = {}

    def tail(self, job_id: int, most: int) -> list[str]:
        """At most so many of the log's last lines, without control characters; where there is none to show, one line
        that says why."""
        now = self._clock()
        self._found = {id_: found for id_, found in self._found.items() if now - found[0] < ASK_AGAIN_S}
        if job_id not in self._found:
            self._found[job_id] = now, self._ask(job_id)
        found = self._found[job_id][1]
        return [found] if isinstance(found, str) else _tail(found, job_id, most)

    def _ask(self, job_id: int) -> Job | str | None:
        """The job, or why it cannot be had."""
        try:
            return connect(self._settings).details([job_id]).get(job_id)
        except SlurmError as error:
            return f"Slurm cannot be asked where the log of job {job_id} is: {plain(str(error))}"


def _tail(job: Job | None, job_id: int, most: int) -> list[str]:
    if job is None or not job.stdout:
        return [f"Slurm no longer knows where the log of job {job_id} is"]
    if os.geteuid() not in (0, job.uid):
        return [f"the log of job {job_id} is {plain(job.user, 40)}'s, and not yours to see"]
    try:
        _, size = read_from(None, job.stdout, job.uid, 0, 0)
        text, _ = read_from(None, job.stdout, job.uid, max(size - READ, 0), READ)
    except FileNotFoundError:
        return [f"{plain(job.stdout)}: no such file here; it may lie on another machine"]
    except NotBelieved as error:
        return [plain(str(error))]
    # The first may have been cut, and a progress bar writes over its own line.
    found = text.decode("utf-8", "replace").rstrip("\n").split("\n")[1 if size > READ else 0 :]
    shown = [plain(line.rstrip("\r").rsplit("\r", 1)[-1], WIDTH) for line in found]
    return shown[-most:] if size else [f"{plain(job.stdout)} is empty"]
