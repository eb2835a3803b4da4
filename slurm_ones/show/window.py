"""Window of `slurm-ones top`: a table of jobs, and a pane below it with reasons, log or nodes.

The window itself changes nothing. For a change it runs a command, after showing it and asking.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from ones_db import Store, StoreError
from slurm_ones.config import ConfigError, Settings
from slurm_ones.show.columns import TOP, ShownJob, gpus
from slurm_ones.show.live import Live, NotSeenYet, node_rows
from slurm_ones.show.logs import Logs
from slurm_ones.show.table import JobOrder, cell, columns_within, header
from slurm_ones.show.why import why_lines
from slurm_ones.text import plain

DECISIONS, ALL_DECISIONS = 3, 20
"""Number of decisions shown of a job: in the pane, and if the job fills the window."""
KEYS = [
    Binding("q", "quit", "Quit", tooltip="quit"),
    Binding("w", "below('why')", "Why", tooltip="in the pane: reasons for the job's size"),
    Binding("l", "below('log')", "Log", tooltip="in the pane: the end of the job's log"),
    Binding("n", "below('nodes')", "Nodes", tooltip="in the pane: nodes and their jobs"),
    Binding("s", "sort", "Sort", tooltip="sort by the next column"),
    Binding("r", "flip('falling')", "Reverse", tooltip="reverse the order"),
    Binding("a", "flip('every_state')", "Ended too", tooltip="show ended jobs too"),
    Binding("slash", "filter", "Filter", tooltip="show only jobs with these words; Escape shows all again"),
    Binding("z", "change('resize')", "Resize", tooltip="resize the job"),
    Binding("p", "change('pin')", "Pin", show=False, tooltip="pin the job to a size"),
    Binding("u", "change('release')", "Release", show=False, tooltip="let the companion choose the job's size"),
    Binding("x", "cancel", "Cancel", show=False, tooltip="cancel the job"),
    Binding("question_mark", "help", "Help", tooltip="these keys"),
]
COMMANDS = "Each change of a job is a command. It is shown first, and run only if you agree."
SLURM_ONES = (sys.executable, "-m", "slurm_ones.cli")
LOG_LINES = 200
ERRORS = (StoreError, ConfigError, NotSeenYet, OSError)
"""Errors that may be gone at the next refresh."""


class Question(ModalScreen[str | None]):
    """Dialog with a text, and with an input field if `field` is given. It returns the input, or None after Escape."""

    AUTO_FOCUS = "Input"

    CSS = """
    Question { align: center middle; }
    #question { width: auto; max-width: 90%; height: auto; border: round $primary; padding: 1 2; background: $panel; }
    #question Input { width: 40; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "answer(False)", "Back"), Binding("enter", "answer(True)", "Yes")
    ]  # fmt: skip

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__()
        self._text, self._field = text, field

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="question"):
            yield Static(Text(self._text))
            if self._field is not None:
                yield Input(self._field)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()  # the window behind has a field of its own

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip())

    def action_answer(self, yes: bool) -> None:
        self.dismiss("" if yes else None)


class TopApp(App[None]):
    """Window with the jobs that `look` returns. Threads read the jobs and, from the database, details of the selected
    one."""

    TITLE = "slurm-ones top"
    CSS = """
    #header { height: auto; padding: 0 1; background: $panel; }
    #jobs { height: 1fr; }
    #below { height: 40%; border-top: solid $primary; padding: 0 1; }
    #below.whole { height: 1fr; border: none; }
    .gone { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [*KEYS, Binding("escape", "leave", "Back", show=False)]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        settings: Settings,
        look: Callable[[], Live],
        opened: Callable[[], Store],
        choice: JobOrder,
        every_s: float,
    ) -> None:
        """Call `look` every `every_s` seconds in a thread. `opened` opens the database."""
        super().__init__()
        self._look, self._opened, self._choice, self._every_s = look, opened, choice, every_s
        self._logs = Logs(settings)
        self._live = Live("")
        self._shown: list[ShownJob] = []
        self._below = "why"
        self._alone = False
        """True if the selected job fills the window."""
        self._asked: tuple[object, ...] = ()
        """Selection, data and width of the pane when it was last filled."""

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        yield Input(id="filter", placeholder="words that jobs must have", classes="gone")
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="below"):
            yield Static(id="text")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.look_again()
        self.set_interval(self._every_s, self.look_again)

    def on_resize(self) -> None:
        self._draw()

    def on_data_table_row_highlighted(self) -> None:
        self._fill_below()

    def action_below(self, what: str) -> None:
        self._below = what
        self._fill_below()

    def action_sort(self) -> None:
        names = [column.title for column in columns_within(self.size.width)]
        at = names.index(self._choice.by) if self._choice.by in names else -1
        self._choice.by = names[(at + 1) % len(names)]
        self._draw()

    def action_flip(self, what: str) -> None:
        setattr(self._choice, what, not getattr(self._choice, what))
        self._draw()

    def action_filter(self) -> None:
        self._words.remove_class("gone").focus()

    @property
    def _words(self) -> Input:
        return self.query_one("#filter", Input)

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        """Leave the field for filter words. The words stay in force."""
        self.query_one(DataTable).focus()

    def on_data_table_row_selected(self) -> None:
        """Let the selected job fill the window (Enter)."""
        self._set_alone(True)

    def action_leave(self) -> None:
        """Show the table again if a job fills the window; otherwise clear the filter."""
        if not self._alone:
            self._words.value = ""
            self._words.add_class("gone")
        self._set_alone(False)

    def _set_alone(self, alone: bool) -> None:
        self._alone = alone
        self.query_one(DataTable).set_class(alone, "gone")
        below = self.query_one("#below")
        below.set_class(alone, "whole")
        (below if alone else self.query_one(DataTable)).focus()
        self._fill_below()

    def action_help(self) -> None:
        keys = {"up, down": "another job", "Enter": "only the job, with its older decisions; Escape leads back"}
        keys |= {self.get_key_display(key): key.tooltip for key in KEYS}
        self.push_screen(Question("\n".join([*(f"{key:10} {text}" for key, text in keys.items()), "", COMMANDS])))

    def action_change(self, what: str) -> None:
        """Resize, pin or release the job, after the user has entered a size or agreed."""
        one = next((one for one in self._shown if one.job.job_id == self._current()), None)
        if one is None:
            return
        number = str(one.job.job_id)

        def given(size: str | None) -> None:
            if size:
                self._agreed((*SLURM_ONES, what, number, size))

        if what == "release":
            self._agreed((*SLURM_ONES, what, number))
        else:
            text = f"{what} job {number}, which has {gpus(one.job)} GPUs, to how many? (4, or 2x4; Escape: nothing)"
            self.push_screen(Question(text, ""), given)

    def action_cancel(self) -> None:
        if (job_id := self._current()) is not None:
            self._agreed(("scancel", str(job_id)))

    def _agreed(self, command: Sequence[str]) -> None:
        shown = " ".join(["slurm-ones", *command[3:]] if command[:3] == SLURM_ONES else command)

        def answered(answer: str | None) -> None:
            if answer is not None:
                self.run_command(command, shown)

        self.push_screen(Question(f"Run  {shown}  ? (Enter: yes, Escape: no)"), answered)

    @work(thread=True, group="command")
    def run_command(self, command: Sequence[str], shown: str) -> None:
        """Run a command in a session of its own, so that a resize is completed even if the window closes."""
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True, check=False,
            )  # fmt: skip
            code, said = done.returncode, done.stdout.strip()
        except OSError as error:
            code, said = 1, str(error)
        # In markup a bracket begins a style.
        text = plain(said.splitlines()[-1] if said else "done", 500).replace("[", "\\[")
        self.call_from_thread(self.notify, text, title=shown, severity="error" if code else "information")

    @work(thread=True, exclusive=True, group="look")
    def look_again(self) -> None:
        worker = get_current_worker()
        try:
            live = self._look()
        except ERRORS as error:
            if not worker.is_cancelled:
                problem = Text(f"cannot read the jobs: {plain(str(error), 500)}", style="bold red")
                self.call_from_thread(self.query_one("#header", Static).update, problem)
            return
        if not worker.is_cancelled:
            self.call_from_thread(self._show, live)

    def _show(self, live: Live) -> None:
        self._live = live
        self._draw()

    def _draw(self) -> None:
        table, columns = self.query_one(DataTable), columns_within(self.size.width)
        room = self.size.width - sum(column.width + 2 for column in columns[:-1]) - 2 - table.scrollbar_size_vertical
        columns[-1] = replace(columns[-1], width=max(room, columns[-1].width))
        at = self._current()
        words = self._words.value.lower().split()
        self._shown = [one for one in self._choice.jobs(self._live) if has_words(one, words)]
        lines = header(self._live, time.time(), self._shown)
        turned = " (largest first)" if self._choice.falling else ""
        self.query_one("#header", Static).update(Text("\n".join([*lines, f"sorted by {self._choice.by}{turned}"])))
        scroll = table.scroll_offset
        table.clear(columns=True)
        for column in columns:
            table.add_column(Text(cell(column.title, column)), width=column.width, key=column.name)
        for one in self._shown:
            row = (cell(column.text(one), column) for column in columns)
            table.add_row(*map(Text, row), key=str(one.job.job_id))
        ids = [one.job.job_id for one in self._shown]
        if at in ids:
            table.move_cursor(row=ids.index(at), animate=False)
        table.scroll_to(y=scroll.y, animate=False)
        self._fill_below()

    def _current(self) -> int | None:
        row = self.query_one(DataTable).cursor_row
        return self._shown[row].job.job_id if 0 <= row < len(self._shown) else None

    def _fill_below(self) -> None:
        asked = (self._below, self._current(), self._live, self._alone, self.size.width)
        if asked != self._asked:
            self._asked = asked
            self.fill_pane(self._below, self._current(), self._live)

    @work(thread=True, exclusive=True, group="below")
    def fill_pane(self, what: str, job_id: int | None, live: Live) -> None:
        worker = get_current_worker()
        try:
            text = self._pane_text(what, job_id, live)
        except ERRORS as error:
            text = Text(plain(str(error), 500), style="red")
        if not worker.is_cancelled:
            self.call_from_thread(self.query_one("#text", Static).update, text)

    def _pane_text(self, what: str, job_id: int | None, live: Live) -> Text:
        if what == "nodes":
            return nodes_text(live, job_id)
        if job_id is None:
            return Text("no elastic job is shown")
        if what == "log":
            with self._opened() as store:
                known = store.jobs([job_id]).get(job_id)
            return Text("\n".join(self._logs.tail(job_id, LOG_LINES, known.work_dir if known is not None else "")))
        with self._opened() as store:
            found = store.job_summaries([job_id])
            decisions = ALL_DECISIONS if self._alone else DECISIONS
            lines = list(why_lines(store, found[0], decisions)) if found else [f"job {job_id} is no longer there"]
        return hanging(Text.from_markup("\n".join(lines), emoji=False), max(self.size.width - 4, 20), self.console)


def has_words(one: ShownJob, words: Sequence[str]) -> bool:
    """Return True if the text shown about the job has all these words."""
    text = " ".join(column.text(one) for column in TOP).lower() if words else ""
    return all(word in text for word in words)


def hanging(text: Text, width: int, console: Console) -> Text:
    """Wrap text to this width. Continuation lines are indented by two more than their line's beginning."""
    found = []
    for line in text.split("\n"):
        indent = len(line.plain) - len(line.plain.lstrip())
        first, *more = line[indent:].wrap(console, max(width - indent - 2, 10)) if line.plain.strip() else [Text()]
        found.append(Text(" " * indent) + first)
        found += [Text(" " * (indent + 2)) + one for one in more]
    for line in found:
        line.rstrip()
    return Text("\n").join(found)


def nodes_text(live: Live, job_id: int | None) -> Text:
    """Return a line for each node, with the GPUs that each elastic job holds on it. The job `job_id` is bold."""
    text = Text()
    for node in node_rows(live.nodes, live.held):
        taken = sum(node.held.values())
        text.append(f"{plain(node.name, 16):16} {node.state:9} ")
        text.append(f"{taken}/{node.gpus} " if node.gpus else f"{taken} ")
        for number, count in node.held.items():
            text.append(f" {number}", style="bold" if number == job_id else "")
            text.append(" " + "■" * min(count, 64), style="bold" if number == job_id else "")
        text.append("\n")
    return text if text else Text("no node is known")
