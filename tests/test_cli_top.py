"""`slurm-ones top`: what it prints, the window itself, and in a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from ones_db import HealthRecord, JobSummary, NodeRecord, Store
from ones_db.leader import LeaderLock
from ones_db.shape import Shape
from slurm_ones.cli.jobs import reader
from slurm_ones.config import ConfigError, Settings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.show import logs, window
from slurm_ones.show.columns import TOP
from slurm_ones.show.live import Live, NotSeenYet, node_rows, read_live
from slurm_ones.show.table import JobOrder, columns_within, header, lines
from slurm_ones.show.window import TopApp
from slurm_ones.slurm.client import Unreachable
from slurm_ones.slurm.model import JobState
from slurm_ones.text import hours, left_s, progress, seconds
from slurm_ones.text import throughput as throughput_of
from tests.commands import printed
from tests.db.make import SPEC, decision, hello, job, report, resized_job, run, said, throughput
from tests.marks import nightly
from tests.slurm.make import job_of
from tests.test_cli import HOSTILE

NOW = 5000.0


@pytest.fixture
def filled(empty_url: str) -> str:
    """A companion that leads, a job that runs on a node, one that waits, one that is refused and hostile, one that
    has ended."""
    url = empty_url
    with Store.open(url, "gres") as store, LeaderLock(url, "gres") as lock:
        lock.take(NOW)
        resized_job(store, 7)
        store.record_jobs([job(4, state="COMPLETED", end_time=4000.0)])
        store.record_jobs([job(8, state="PENDING", user="bob", account="physics")])
        store.record_jobs([job(9, name=HOSTILE, user=HOSTILE, refusal=said(HOSTILE), state="PENDING")])
        store.record_jobs([job(10, state="RUNNING", name="trains", partition="fast")])
        store.record_runs([run(10, gpus=2, start_time=2000.0, node_list=("n3",))])
        report(store, 10, 0, spec=SPEC, hello=hello(), throughput=throughput(2), offset=50, number=2)
        states = {"n1": "UP", "n2": "DOWN", "n3": "UP"}
        store.record_nodes(NOW, [NodeRecord(name, state, state == "UP", 4, "") for name, state in states.items()])
        store.add_decision(decision(2400.0, 7, 8, 10))
        store.record_health(HealthRecord(NOW, "act", 60.0, NOW, 0.5, 1, 2, 2))
    return url


def live_of(url: str) -> Live:
    with Store.open(url, "gres", read_only=True) as store:
        return read_live(store)


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_every_line_fits_the_terminal(filled: str, width: int) -> None:
    """Protects the table on a narrow terminal: a job's number, state, shape and why are always there."""
    live = live_of(filled)
    long = "no change of its GPUs would repay a pause of 0.03 s, or whatever else there is to say about it: 日本語"
    live = replace(live, jobs=tuple(replace(one, why=long) for one in live.jobs))
    shown = lines(live, NOW + 3, JobOrder(every_state=True), width)
    assert width < 80 or " ".join(shown).split().count("whatever") == len(live.jobs) == 5, shown
    assert all(cell_len(line) <= width for line in shown), shown
    always = ["job", "st", "shape", "why"]
    assert [column.title for column in columns_within(width) if column.title in always] == always
    assert any(line.split()[:1] == ["10"] for line in shown)


def test_the_header_tells_how_the_companion_is(filled: str) -> None:
    live = live_of(filled)
    shown = JobOrder().jobs(live)
    first, second, *_ = header(live, NOW + 3, shown)
    assert "mode act, last tick 3.0 s ago" in first and "SILENT" not in first
    # Those of n2 cannot be used; a sign of the meter is half a GPU.
    assert second.startswith(f"{12 * '█'}{4 * '·'} 2 run on 6 of 8 GPUs, 2 wait")
    assert header(replace(live, nodes=()), NOW + 3, shown)[1].startswith("2 run on 6 GPUs")
    assert header(replace(live, jobs=()), NOW + 3, [])[1].startswith(f"{16 * '·'} 0 run on 0 of 8 GPUs")
    assert "SILENT" in header(live, NOW + 1000, shown)[0]
    assert "no companion has led here yet" in header(Live("gres"), NOW, [])[0]


def test_slurm_is_asked_seldom(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects slurmctld from a window that looks every two seconds, and the states of a later tick."""
    asked: list[int] = []

    def slurm_now(settings: Settings, jobs: Sequence[JobSummary]) -> dict[int, WholeJob]:
        asked.append(len(jobs))
        return {10: WholeJob.of(replace(job_of(Shape(1, 2)), job_id=10, state=JobState.CANCELLED))}

    monkeypatch.setattr("slurm_ones.cli.jobs.slurm_now", slurm_now)
    look = reader(Settings(database=filled, cluster="gres"), named=True)
    for tick, state in ((NOW, "CANCELLED"), (NOW, "CANCELLED"), (time.time() + 5, "RUNNING")):
        with Store.open(filled, "gres") as store:
            store.record_health(HealthRecord(tick, "act", 60.0, tick, 0.5, 1, 2, 2))
        live = look()
        assert [one.job.state for one in live.jobs if one.job.job_id == 10] == [state]
        assert live.asked is (state == "CANCELLED")
        run, wait = (1, 2) if live.asked else (2, 2)
        assert re.search(rf" {run} run on .*, {wait} wait, ", header(live, tick, [])[1])  # a cancelled job does neither
    assert asked == [4]


@pytest.mark.parametrize(
    ("shape", "state", "shown"),
    [
        (Shape(1, 2), JobState.RUNNING, "128.0"),
        (Shape(1, 4), JobState.RUNNING, "measuring"),
        (Shape(1, 4), JobState.PENDING, "–"),
    ],
)
def test_a_throughput_is_of_the_size_that_is_shown(
    filled: str, monkeypatch: pytest.MonkeyPatch, shape: Shape, state: JobState, shown: str
) -> None:
    """Protects users from a time left by another size's throughput, and from a sign that says nothing."""
    slurm = {10: WholeJob.of(replace(job_of(shape), job_id=10, state=state))}
    monkeypatch.setattr("slurm_ones.cli.jobs.slurm_now", lambda settings, jobs: slurm)
    (one,) = [
        one for one in reader(Settings(database=filled, cluster="gres"), named=True)().jobs if one.job.job_id == 10
    ]
    cells = {column.name: column.text(one) for column in TOP}
    assert (cells["samples_per_s"], cells["left_s"] == "–") == (shown, shown != "128.0")
    silent = replace(one.job, samples_per_s=None, batch=None)  # it may never report any
    assert throughput_of(silent) == ""


def test_who_is_on_which_node(filled: str) -> None:
    live = live_of(filled)
    nodes = {node.name: (node.state, node.held, node.gpus) for node in node_rows(live.nodes, live.held)}
    assert nodes["n1"] == ("UP", {7: 4}, 4) and nodes["n3"] == ("UP", {10: 2}, 4) and nodes["n2"] == ("DOWN", {}, 4)


def test_nodes_are_in_the_order_of_their_numbers(filled: str) -> None:
    first, *_ = live_of(filled).nodes
    nodes = [first._replace(name=name) for name in ("n10", "n2", "a1", "n1")]
    assert [node.name for node in node_rows(nodes, ())] == ["a1", "n1", "n2", "n10"]


def test_the_time_left_follows_from_epochs_and_throughput(filled: str) -> None:
    """Protects users from an end that nobody knows."""
    (one,) = [one.job for one in live_of(filled).jobs if one.job.job_id == 10]
    assert one.samples_per_s and one.epochs == SPEC.epochs and one.dataset == SPEC.dataset
    done = (one.epoch or 0) * SPEC.dataset + (one.cursor or 0)
    assert left_s(one) == pytest.approx((SPEC.epochs * SPEC.dataset - done) / one.samples_per_s)
    longer = replace(one, epoch=SPEC.epochs, cursor=SPEC.dataset // 2)
    assert (progress(longer), left_s(longer)) == (f"{SPEC.epochs}.5", None)
    assert progress(replace(longer, cursor=None)) == f"{SPEC.epochs}/{SPEC.epochs}"


def test_figures_for_people(filled: str) -> None:
    """Short enough for a narrow column, and never a nought for what is there."""
    (one,) = [one.job for one in live_of(filled).jobs if one.job.job_id == 10]
    of = [replace(one, epoch=epoch, cursor=700, dataset=1000, epochs=14) for epoch in (0, 12)]
    assert [progress(job) for job in of] == ["0.7/14", "12.7/14"]
    assert progress(replace(of[1], epochs=0)) == "12.7" and progress(replace(of[1], dataset=0)) == "12/14"
    assert [seconds(value) for value in (0.0243, 1.06, 22.4)] == ["0.024 s", "1.1 s", "22 s"]
    assert [hours(value) for value in (0.0243, 12.34, 1234.5)] == ["0.024", "12.3", "1234.5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {7, 8, 9, 10}),
        (("-t", "all"), {4, 7, 8, 9, 10}),
        (("-t", "PD"), {8, 9}),
        (("--states", "completed"), {4}),
        (("-u", "bob,nobody"), {8}),
        (("-p", "fast"), {10}),
        (("-A", "physics"), {8}),
        (("-j", "7,10_3"), {7, 10}),
        (("-u", "bob", "-t", "R"), set()),
    ],
)
def test_the_options_are_squeues(filled: str, options: tuple[str, ...], expected: set[int]) -> None:
    """Protects the habits of people who use squeue; `jobs` has the same, and shows all states by itself."""
    told = printed("top", "--json", *options, "--database", filled)
    assert {one["job_id"] for one in told["jobs"]} == expected
    if options:
        assert {one["job_id"] for one in printed("jobs", "--json", *options, "--database", filled)} == expected


def test_sorting(filled: str) -> None:
    by_shape = printed("top", "--json", "--sort", "-shape", "--database", filled)["jobs"]
    assert [one["job_id"] for one in by_shape][:2] == [7, 10]
    assert [one["job_id"] for one in printed("top", "--json", "--sort", "job", "--database", filled)["jobs"]] == [
        7,
        8,
        9,
        10,
    ]


@pytest.mark.parametrize("falling", [False, True])
def test_what_is_not_known_stands_last(filled: str, falling: bool) -> None:
    shown = JobOrder(by="left", falling=falling).jobs(live_of(filled))
    known = [left_s(one.job) is not None for one in shown]
    assert known == sorted(known, reverse=True) and any(known) and not all(known)


def driven(url: str, play: Callable[[Pilot[None]], Any], width: int = 80) -> None:
    """Play with the window, on a terminal without a screen."""
    settings = Settings(database=url, cluster="gres")

    def opened() -> Store:
        return Store.open(url, "gres", read_only=True)

    async def main() -> None:
        app = TopApp(settings, reader(settings, named=True), opened, JobOrder(), 60.0)
        async with app.run_test(size=(width, 30)) as pilot:
            await until(pilot, lambda: pilot.app.query_one(DataTable).row_count > 0)
            await play(pilot)

    asyncio.run(main())


def below(pilot: Pilot[None]) -> str:
    return str(pilot.app.query_one("#text", Static).render())


async def press(pilot: Pilot[None], *keys: str) -> None:
    """One key after the other. A key goes from app to screen to widget and back, and each pause lets all of them act:
    textual takes a window that a busy machine keeps from running for idle, and the next key reached the old screen."""
    for key in keys:
        await pilot.press(key)
        for _ in range(4):
            await pilot.pause(0)


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Let the window work until that holds: threads of it may take their time."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, below(pilot)
        await pilot.pause(0.02)


@pytest.mark.slow
def test_the_window(filled: str) -> None:
    """Protects the keys: each shows what it says, of the job under the cursor, and a look keeps the cursor there."""

    async def play(pilot: Pilot[None]) -> None:
        table = pilot.app.query_one(DataTable)
        assert table.row_count == 4
        await press(pilot, "down", "down", "down")
        await until(pilot, lambda: "job 10" in below(pilot) and "trains" in below(pilot))
        await press(pilot, "n")
        await until(pilot, lambda: "n3" in below(pilot) and "10 ■■" in below(pilot))
        with Store.open(filled, "gres") as store:
            store.record_jobs([job(6, submit_time=1.0, state="PENDING")])
        await press(pilot, "w")
        assert isinstance(pilot.app, TopApp)
        pilot.app.look_again()
        await until(pilot, lambda: table.row_count == 5 and "job 10" in below(pilot))
        await press(pilot, "a", "s", "r")
        await until(pilot, lambda: table.row_count == 6)

    driven(filled, play)


@pytest.mark.slow
def test_it_filters_helps_and_shows_a_job_alone(filled: str) -> None:
    """Protects whoever has many jobs: words choose among them, keys are explained, Enter reads one at 80 columns."""

    async def play(pilot: Pilot[None]) -> None:
        table = pilot.app.query_one(DataTable)
        await press(pilot, "slash", *"bob pd")
        await until(pilot, lambda: table.row_count == 1 and "job 8" in below(pilot))
        await press(pilot, "enter", "enter")
        await until(pilot, lambda: not table.display and "job 8" in below(pilot))
        assert max(map(cell_len, below(pilot).splitlines())) <= 78
        await press(pilot, "escape")
        await until(pilot, lambda: table.display and table.row_count == 1)
        await press(pilot, "escape")
        await until(pilot, lambda: table.row_count == 4)
        await press(pilot, "question_mark")
        await until(pilot, lambda: isinstance(pilot.app.screen, window.Question))
        await press(pilot, "escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, window.Question))

    driven(filled, play)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("p", *"2x4", "enter", "enter"), "slurm-ones pin 7 2x4: ran pin 7 2x4"),
        nightly(("z", "4", "enter", "enter"), "slurm-ones resize 7 4: ran resize 7 4"),
        (("u", "enter"), "slurm-ones release 7: ran release 7"),
        (("p", "2", "enter", "escape"), ""),
        nightly(("p", "enter", "u", "escape"), ""),
        nightly(("z", "escape"), ""),
        nightly(("x", "escape"), ""),
    ],
)
def test_a_job_changes_by_a_command_that_the_user_agrees_to(
    filled: str, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], expected: str
) -> None:
    """Protects jobs from a slip of a finger, and shows what to type next time."""
    said: list[str] = []
    monkeypatch.setattr(window, "SLURM_ONES", (sys.executable, "-c", "import sys; print('ran', *sys.argv[1:])"))
    monkeypatch.setattr(TopApp, "notify", lambda self, text, *, title, **_: said.append(f"{title}: {text}"))

    async def play(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        await until(pilot, lambda: bool(said) or not expected)
        await pilot.pause(0.1)

    driven(filled, play)
    assert said == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("  a reason of many words that goes on", ["  a reason of many", "    words that goes", "    on"]),
        ("one\n\ntwo", ["one", "", "two"]),
    ],
)
def test_long_lines_hang(text: str, lines: list[str]) -> None:
    """Protects a reader at 80 columns: what continues a line is seen to."""
    assert window.hanging(Text(text), 20, Console()).plain.splitlines() == lines


def test_a_database_that_fails_is_said_and_looked_at_again(filled: str) -> None:

    async def play(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, TopApp)

        def header() -> str:
            return str(app.query_one("#header", Static).render())

        look, app._look = app._look, failing
        app.look_again()
        await until(pilot, lambda: "cannot read the jobs" in header())
        for error in (NotSeenYet("nothing yet"), ConfigError("no such cluster")):
            failure[0] = error
            app.look_again()
            await until(pilot, lambda said=str(error): said in header())  # type: ignore[misc]
        app._look = look
        app.look_again()
        await until(pilot, lambda: "mode act" in header())

    failure: list[Exception] = [OSError("gone")]

    def failing() -> Live:
        raise failure[0]

    driven(filled, play)


def test_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the terminal from a log, other users' logs from being read, and the reader from links."""
    log = tmp_path / "out"
    log.write_bytes(b"x" * 100_000 + b"\nfirst\n 10 %\r 20 %\n\x1b[2Jlast\n")
    asked = {"job": job_of(Shape(1, 1), job_id=7, uid=os.geteuid(), stdout=str(log))}

    class Client:
        def details(self, job_ids: list[int]) -> dict[int, Any]:
            if asked["job"] is None:
                raise Unreachable("down")
            return {7: asked["job"]}

    monkeypatch.setattr(logs, "connect", lambda settings: Client())

    def tail() -> list[str]:
        return logs.Logs(Settings()).tail(7, 10)

    assert tail() == ["first", " 20 %", "?[2Jlast"]
    asked["job"] = job_of(Shape(1, 1), job_id=7, uid=4711, stdout=str(log))
    assert "not yours to see" in logs.Logs(Settings(), own_only=True).tail(7, 10)[0]
    link = tmp_path / "link"
    link.symlink_to(log)
    asked["job"] = job_of(Shape(1, 1), job_id=7, uid=os.geteuid(), stdout=str(link))
    assert "links are not followed" in tail()[0]
    monkeypatch.setattr(os, "geteuid", lambda: 4712)
    assert "not yours to see" in tail()[0]
    asked["job"] = None
    assert "cannot be asked" in tail()[0]
    monkeypatch.undo()
    (tmp_path / "slurm-7_0.out").write_text("by its usual name\n")
    monkeypatch.setattr(logs, "connect", lambda settings: Client())
    assert logs.Logs(Settings()).tail(7, 10, str(tmp_path)) == ["by its usual name"]


def test_slurm_is_asked_once_a_minute_where_a_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the controller from each look of each user, and lets a log grow."""
    log, asked, now = tmp_path / "out", [], [0.0]
    log.write_text("first\n")

    class Client:
        def details(self, job_ids: list[int]) -> dict[int, Any]:
            asked.append(job_ids)
            return {7: job_of(Shape(1, 1), job_id=7, uid=os.geteuid(), stdout=str(log))}

    monkeypatch.setattr(logs, "connect", lambda settings: Client())
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = logs.Logs(Settings())
    assert found.tail(7, 10) == ["first"]
    log.write_text("first\nsecond\n")
    now[0] = 59.0
    assert found.tail(7, 10) == ["first", "second"] and asked == [[7]]
    now[0] = 61.0
    assert found.tail(7, 10) == ["first", "second"] and asked == [[7], [7]]


@pytest.fixture
def screen(filled: str) -> Iterator[Callable[[bytes, str], str]]:
    """A real terminal of 80 × 24 in which `top` runs: types keys, and returns the screen once it shows a text."""
    pyte = pytest.importorskip("pyte")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "slurm_ones.cli", "top", "--database", filled]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"})
    os.close(theirs)
    shown = pyte.Screen(80, 24)
    stream = pyte.ByteStream(shown)

    def type_until(keys: bytes, text: str) -> str:
        os.write(ours, keys)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.2)[0]:
                stream.feed(os.read(ours, 65536))
            found = "\n".join(shown.display)
            if text in found:
                return found
        raise AssertionError(f"{text!r} did not come:\n{found}")

    yield type_until
    with suppress(OSError):
        os.write(ours, b"q")
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


@pytest.mark.slow
def test_in_a_real_terminal(screen: Callable[[bytes, str], str]) -> None:
    """Protects `top` as people meet it, over ssh in 80 columns: it shows the jobs, reacts to keys, and ends by q."""
    shown = screen(b"", "trains")
    assert "why" in shown and "mode act" in shown
    assert "n2" in screen(b"n", "DOWN")
    assert json.dumps(screen(b"w", "job 7"))
