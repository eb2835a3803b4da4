"""Job directories that were laid out to do harm: whatever is in one, the look goes on, the other jobs are seen, it
takes neither long nor much memory, nothing of anybody else's is read, and what was not believed is told.

Most of it is worth most as root, whom no permission stops from reading what a link points to.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from ones_db import Store
from ones_wrapper.protocol import (
    MAX_SPEC,
    ORDERS,
    SPEC,
    Checkpoint,
    Epoch,
    Order,
    Throughput,
    decode_order,
    encode,
    encode_report,
    reports_name,
    spool_order_name,
)
from slurm_ones.act.orders import OrderError, OrderWriter, write_order
from slurm_ones.config import Settings
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.jobs.observer import Observer
from slurm_ones.jobs.reports import (
    BURST,
    MAX_BYTES,
    MAX_LINES,
    MAX_PROBLEM,
    PER_S,
    checkpoint_stands,
    lines_per_job,
    read_reports,
)
from slurm_ones.slurm.model import SlurmJob
from tests.jobs import make
from tests.marks import NIGHTLY, nightly

ROOT = os.geteuid() == 0
OWNER = 12345 if ROOT else os.geteuid()
"""Of the hostile job's files."""
VICTIM = 54321
SECRET = b'{"n":1,"t":900,"kind":"epoch","epoch":1,"step":1,"samples":31337}\n'
"""What the victim has would pass for a report: believing it would show."""
NOW = 1000.0
SWAPS_S = 3.0 if NIGHTLY else 0.5
"""How long files are swapped while they are read."""
REPORTS = reports_name(0)
root_only = pytest.mark.skipif(not ROOT, reason="giving files to somebody else takes root")


def line(number: int) -> bytes:
    return encode_report(number, 900.0, Epoch(number, number, 1000, 0.5))


def job(job_id: int, place: Path | str, uid: int = OWNER) -> SlurmJob:
    """A running elastic job whose wrapper keeps its files in `place`."""
    return make.job(job_id, uid=uid, work_dir=str(place))


class Site:
    """A companion's eyes, one job that behaves and one that does not."""

    def __init__(self, place: Path, empty: Path) -> None:
        self.place = place
        self.url = f"sqlite:///{shutil.copy(empty, place / 'ones.sqlite')}"
        self.store = Store.open(self.url, "here")
        self.queue = make.Queue()
        self.observer = Observer(self.queue, self.store, Settings())  # type: ignore[arg-type]
        self.folder = self._directory(7)
        self._directory(8)
        self.looks = 0

    def _directory(self, job_id: int) -> Path:
        work = self.place / f"work{job_id}"
        folder = work / f"ones-{job_id}"
        folder.mkdir(parents=True)
        self.queue.jobs[job_id] = job(job_id, work)
        return folder

    def look(self) -> None:
        """One look, bounded in time and memory, by which the job that behaves is seen to have gone on."""
        self.looks += 1
        good = self.place / "work8/ones-8"
        with (good / REPORTS).open("ab") as file:
            file.write(line(self.looks))
        for folder in (self.folder, good):
            self.give(folder)
        tracemalloc.start()
        begun = time.process_time()
        try:
            self.observer.observe()
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert time.process_time() - begun < 5.0
        assert peak < 24 * MAX_BYTES
        assert self.stored(8) == self.looks

    def give(self, path: Path) -> None:
        """The directory and what is in it to the job's user; links and what has another name elsewhere stay."""
        if not ROOT or path.is_symlink() or not path.is_dir():
            return
        os.chown(path, OWNER, OWNER)
        for entry in path.iterdir():
            if entry.lstat().st_nlink == 1 and entry.lstat().st_uid == 0:
                os.chown(entry, OWNER, OWNER, follow_symlinks=False)

    def stored(self, job_id: int) -> int:
        """Rows of epochs that the database has of a job."""
        runs = "SELECT runs.id FROM runs JOIN jobs ON runs.job_id = jobs.id WHERE jobs.job_id"
        return self.count(f"SELECT count(*) FROM epochs WHERE run_id IN ({runs} = {job_id})")

    def count(self, sql: str) -> int:
        engine = create_engine(self.url)
        try:
            with engine.connect() as connection:
                return int(connection.execute(text(sql)).scalar() or 0)
        finally:
            engine.dispose()

    def note(self) -> str:
        """What the hostile job's owner is told, as the database has it after another look."""
        self.look()
        return self.store.job_summaries([7])[0].report_note


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may pass through, which those of pytest are not."""
    found = Path(tempfile.mkdtemp(prefix="ones-hostile-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.fixture
def site(place: Path, empty_sqlite: Path) -> Iterator[Site]:
    found = Site(place, empty_sqlite)
    with found.store:
        yield found


def victims(site: Site) -> Path:
    """A file of somebody else's that looks like reports."""
    path = site.place / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    if ROOT:
        os.chown(path, VICTIM, VICTIM)
    return path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 9))  # /dev/urandom, which never ends
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


Lay = Callable[[Site, Path], object]
ODD: dict[str, tuple[Lay, str]] = {
    "a link to a file": (lambda site, path: path.symlink_to("/etc/passwd"), "a link"),
    "a link to nothing": (lambda site, path: path.symlink_to("/nowhere/at/all"), "a link"),
    "a link to itself": (lambda site, path: path.symlink_to(path.name), "a link"),
    "a link to a directory": (lambda site, path: path.symlink_to("/etc"), "a link"),
    "a link to the reader's own memory": (lambda site, path: path.symlink_to("/proc/self/mem"), "a link"),
    "a link to the reader's environment": (lambda site, path: path.symlink_to("/proc/self/environ"), "a link"),
    "a link to another user's file": (lambda site, path: path.symlink_to(victims(site)), "a link"),
    "a FIFO": (lambda site, path: os.mkfifo(path), "not a regular file"),
    "a socket": (lambda site, path: _socket(path), "not a regular file"),
    "a device": (lambda site, path: _device(path), "not a regular file"),
    "a directory": (lambda site, path: path.mkdir(), "not a regular file"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly(SPEC), REPORTS])
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file(site: Site, kind: str, name: str) -> None:
    lay, words = ODD[kind]
    lay(site, site.folder / name)
    site.look()
    assert words in site.note() and name in site.note()
    assert site.stored(7) == 0


@root_only
@pytest.mark.parametrize("name", [SPEC, REPORTS])
def test_another_name_of_somebody_elses_file(site: Site, name: str) -> None:
    """A hard link gives a file another name, not another owner; nothing of it gets into a message."""
    os.link(victims(site), site.folder / name)
    site.look()
    assert f"belongs to uid {VICTIM}" in site.note()
    assert "31337" not in site.note()
    assert site.stored(7) == 0


@root_only
def test_a_directory_that_belongs_to_somebody_else(site: Site) -> None:
    (site.folder / REPORTS).write_bytes(line(1))
    site.look()
    assert site.stored(7) == 1
    os.chown(site.folder, VICTIM, VICTIM)
    (site.folder / REPORTS).write_bytes(line(1) + line(2))
    site.give = lambda path: None  # type: ignore[method-assign]
    os.chown(site.place / "work8/ones-8", OWNER, OWNER)
    site.look()
    assert f"belongs to uid {VICTIM}" in site.note()
    assert site.stored(7) == 1


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "missing"])
def test_a_directory_that_is_none(site: Site, kind: str) -> None:
    moved = site.place / "elsewhere"
    site.folder.rename(moved)
    (moved / REPORTS).write_bytes(line(1))
    if kind == "link":
        site.folder.symlink_to(moved)
    elif kind == "file":
        site.folder.write_bytes(b"")
    elif kind == "fifo":
        os.mkfifo(site.folder)
    site.look()
    assert site.stored(7) == 0
    assert ("ones-7" in site.note()) == (kind != "missing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "work_dir",
    ["", ".", "work7", "../work7", "\0", "/x\0/y", "/\ud800", "/" + "x" * 300, "/x" * 4000, "/proc/self/cwd",
     "/dev/null", "/proc/self/fd", "//", "/\x1b]0;owned\x07", "/a\nERROR job 8: forged"],
)  # fmt: skip
def test_working_directories_that_are_none(site: Site, work_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to nothing, not a name, far too long, the reader's own: refused, or simply not there."""
    monkeypatch.chdir(site.place / "work7")
    (site.folder / REPORTS).write_bytes(line(1))
    site.queue.jobs[7] = replace(site.queue.jobs[7], work_dir=work_dir)
    if work_dir in ("/proc/self/cwd",):
        # A link above is followed, as sites have them; what is found there is the user's own, or is not believed.
        site.look()
        assert site.stored(7) == 1
        return
    site.look()
    assert site.stored(7) == 0
    assert site.note().isprintable()


@pytest.mark.parametrize("name", [SPEC, REPORTS])
@pytest.mark.parametrize("size", [MAX_SPEC + 1, 1 << 30, 1 << 40])
def test_huge_files(site: Site, name: str, size: int) -> None:
    """A line of a gigabyte, a terabyte of nothing: a bounded piece of it is read, at each look."""
    _sparse(site.folder / name, size)
    for _ in range(3):
        site.look()
    if name == SPEC:
        assert f"longer than {MAX_SPEC} bytes" in site.note()


def test_a_million_lines_of_nothing(site: Site) -> None:
    (site.folder / REPORTS).write_bytes(b"\n" * 1_000_000 + encode_report(1, 900.0, make.HELLO) + line(2))
    site.look()
    assert f"{MAX_LINES} unreadable lines" in site.note()
    piece, _ = read_reports(WholeJob.of(site.queue.jobs[7]), 0, 0, 0, now=NOW)
    assert piece.offset == MAX_LINES


@pytest.mark.slow
def test_a_job_fills_no_database(site: Site) -> None:
    """Of as many sound reports as it may write, a look takes so many and a run has so many, by Slurm's clock."""
    (site.folder / REPORTS).write_bytes(b"".join(line(n) for n in range(1, 30_001)))
    site.look()
    assert site.stored(7) == MAX_LINES
    for _ in range(4):
        site.look()
    most = BURST + PER_S * (NOW - 110)
    assert site.stored(7) == most
    assert "faster than" in site.note()
    assert lines_per_job(1) == MAX_LINES and lines_per_job(2_000) * 2_000 <= 128_000 and lines_per_job(10**6) > 0


def test_reports_that_jump_ahead(site: Site) -> None:
    """A number that no run can have reached is not believed, and so shuts nobody out: it can be written again."""
    (site.folder / REPORTS).write_bytes(line(1) + line(2**50))
    site.look()
    assert site.stored(7) == 1
    (site.folder / REPORTS).write_bytes(line(1) + line(2))
    site.look()
    assert site.stored(7) == 2


@pytest.mark.parametrize(
    "words",
    [b"[" * 10_000, b'{"a":' * 3_000, b"9" * 5_000, b'"' + b"\xff" * 200, b'{"base_batch": 1e999}', b"\0" * 100,
     b'{"\x1b[2J": "\x1b]0;owned\x07"}', b'{"base_batch": "\\u001b[31m\\u202e<script>"}'],
)  # fmt: skip
def test_a_spec_that_is_a_trap(site: Site, words: bytes) -> None:
    """Deep, long, of no character set, of escapes: it costs the spec, and its complaint is short and printable."""
    (site.folder / SPEC).write_bytes(words)
    (site.folder / REPORTS).write_bytes(line(1))
    site.look()
    note = site.note()
    assert note.startswith("spec.json: ") and note.isprintable() and len(note) <= MAX_PROBLEM
    assert site.stored(7) == 1


def test_a_complaint_that_changes_at_every_look(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """At most a line a look in the log, and the job's one row; what is kept of it goes with the job."""
    for n in range(5):
        (site.folder / SPEC).write_bytes(b'{"base_batch": "%d"}' % n)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            site.look()
        assert len(caplog.records) == 1
    assert site.count("SELECT count(*) FROM jobs") == 2
    del site.queue.jobs[7]
    site.look()
    assert not site.observer._notes.text(7, NOW)


def _swap(path: Path, ways: list[Callable[[Path], object]], stop: threading.Event) -> None:
    while not stop.is_set():
        for way in ways:
            new = path.with_name(".swap")
            with suppress(OSError):
                way(new)
                if path.is_dir() and not path.is_symlink():
                    path.rename(path.with_name(f".old-{time.monotonic_ns()}"))
                new.replace(path)


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_read(site: Site) -> None:
    """File, link, FIFO and directory in turn, as fast as they come: only the job's own lines are ever believed."""
    path, secret = site.folder / REPORTS, victims(site)

    def own(new: Path) -> None:
        new.write_bytes(line(1) + line(2))
        if ROOT:
            os.chown(new, OWNER, OWNER)

    ways = [own, lambda new: new.symlink_to(secret), os.mkfifo, lambda new: new.mkdir(), own]
    if ROOT:
        ways.append(lambda new: os.link(secret, new))
    site.give(site.folder)
    stop = threading.Event()
    thread = threading.Thread(target=_swap, args=(path, ways, stop))
    thread.start()
    seen = set()
    try:
        until = time.monotonic() + SWAPS_S
        while time.monotonic() < until:
            piece, _ = read_reports(WholeJob.of(site.queue.jobs[7]), 0, 0, 0, now=NOW)
            seen |= {report.report.samples for report in piece.lines if isinstance(report.report, Epoch)}
    finally:
        stop.set()
        thread.join()
    assert seen <= {1000}


@pytest.mark.slow
@root_only
def test_a_directory_that_is_swapped_while_it_is_read(site: Site) -> None:
    """By whoever owns a directory above it, between the job's own and the victim's: the open one is what counts."""
    other = site.place / "victims"
    other.mkdir()
    (other / REPORTS).write_bytes(SECRET)
    for path in (other, other / REPORTS):
        os.chown(path, VICTIM, VICTIM)
    (site.folder / REPORTS).write_bytes(line(1))
    site.give(site.folder)
    own = site.folder.rename(site.place / "own")
    stop = threading.Event()
    work = site.place / "swapped"
    work.symlink_to(site.place / "work7")
    for n, path in enumerate((own, other)):
        (site.place / f"w{n}").mkdir()
        path.rename(site.place / f"w{n}/ones-7")
    ways: list[Callable[[Path], object]] = [
        lambda new: new.symlink_to(site.place / "w0"),
        lambda new: new.symlink_to(site.place / "w1"),
    ]
    thread = threading.Thread(target=_swap, args=(work, ways, stop))
    thread.start()
    seen = []
    try:
        until = time.monotonic() + SWAPS_S
        while time.monotonic() < until or (not seen and time.monotonic() < until + 60):
            piece, _ = read_reports(WholeJob.of(job(7, work)), 0, 0, 0, now=NOW)
            seen += [report.report.samples for report in piece.lines if isinstance(report.report, Epoch)]
    finally:
        stop.set()
        thread.join()
    assert seen and set(seen) == {1000}


def test_a_file_that_grows_while_it_is_read(site: Site) -> None:
    """What comes after the look is of the next one; no line is lost or seen twice."""
    path = site.folder / REPORTS
    path.touch()
    site.give(site.folder)
    most = 2_000

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            for n in range(1, most + 1):
                text = line(n)
                file.write(text[:7])
                file.write(text[7:])

    thread = threading.Thread(target=grow)
    thread.start()
    offset, numbers = 0, [0]
    while numbers[-1] < most:
        piece, _ = read_reports(WholeJob.of(site.queue.jobs[7]), 0, offset, numbers[-1], now=NOW)
        offset = piece.offset
        numbers += [report.number for report in piece.lines]
    thread.join()
    assert numbers == list(range(most + 1))


@root_only
def test_without_permission(site: Site) -> None:
    (site.folder / REPORTS).write_bytes(line(1))
    for path, mode in ((site.folder.parent, 0o755), (site.folder, 0o755), (site.folder / REPORTS, 0o644)):
        path.chmod(mode)  # whatever the umask is
    site.give(site.folder)
    os.seteuid(VICTIM)
    try:
        assert len(read_reports(WholeJob.of(site.queue.jobs[7]), 0, 0, 0, now=NOW)[0].lines) == 1
        os.seteuid(0)
        (site.folder / REPORTS).chmod(0)
        os.seteuid(VICTIM)
        assert (
            "reports-0.jsonl: Permission denied" in read_reports(WholeJob.of(site.queue.jobs[7]), 0, 0, 0, now=NOW)[1]
        )
        os.seteuid(0)
        site.folder.chmod(0)
        os.seteuid(VICTIM)
        assert "ones-7: Permission denied" in read_reports(WholeJob.of(site.queue.jobs[7]), 0, 0, 0, now=NOW)[1]
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["../../../etc", "a/b", ".", "..", "", "x" * 300, "a\0b", ".tmp-step-000000001"])
def test_checkpoints_that_lead_elsewhere(site: Site, name: str) -> None:
    """A checkpoint's name is a name in the job's own folder, or there is no such checkpoint."""
    said = json.loads(encode_report(1, 900.0, Checkpoint("x", 0, 0, 1, 1, 1.0)))
    (site.folder / REPORTS).write_bytes(json.dumps({**said, "name": name}).encode() + b"\n")
    site.look()
    assert not checkpoint_stands(WholeJob.of(site.queue.jobs[7]), name.replace("\0", "?"))
    assert not checkpoint_stands(WholeJob.of(site.queue.jobs[7]), name)


def test_names_stay_names(site: Site) -> None:
    """What a job calls itself is stored printable, and as one value: no SQL, no escapes, no second row."""
    name = "\x1b]0;owned\x07'; DROP TABLE jobs; --\n\u202e<script>\ud800\0"
    site.queue.jobs[7] = replace(site.queue.jobs[7], name=name, account=name, partitions=("gpu",), user=name)
    (site.folder / REPORTS).write_bytes(encode_report(1, 900.0, Throughput(0, 1, 32, 32, 1.0, 32, 1.0)))
    site.look()
    (found,) = site.store.job_summaries([7])
    assert found.name == "?]0;owned?'; DROP TABLE jobs; --??<script>??"
    assert found.user.isprintable()
    assert site.count("SELECT count(*) FROM jobs") == 2


# Orders: the one thing that is written where others may write


@pytest.fixture
def own(tmp_path: Path) -> SlurmJob:
    """A job of the hostile user, into whose directory this companion may write."""
    tmp_path.chmod(0o755)
    (tmp_path / "ones-7").mkdir()
    if ROOT:
        os.chown(tmp_path / "ones-7", OWNER, OWNER)
    return job(7, tmp_path)


@pytest.mark.parametrize("planted", [ORDERS, f".{ORDERS}.{{pid}}"], ids=["in force", "being written"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "file", "dangling link"])
def test_an_order_is_written_through_nothing(own: SlurmJob, tmp_path: Path, planted: str, kind: str) -> None:
    """What the user left under its name, or under the one it is written under first, is replaced and not written to."""
    victim, path = tmp_path / "victim", tmp_path / "ones-7" / planted.format(pid=os.getpid())
    victim.write_bytes(b"mine")
    {
        "link": lambda: path.symlink_to(victim),
        "hard link": lambda: os.link(victim, path),
        "fifo": lambda: os.mkfifo(path),
        "file": lambda: path.write_bytes(b"theirs"),
        "dangling link": lambda: path.symlink_to(tmp_path / "made"),
    }[kind]()
    write_order(own, Order(5, 0, 64), None)
    found = tmp_path / "ones-7" / ORDERS
    assert decode_order(found.read_bytes()).number == 5
    assert stat.S_IMODE(found.lstat().st_mode) == 0o644 and stat.S_ISREG(found.lstat().st_mode)
    assert victim.read_bytes() == b"mine" and not (tmp_path / "made").exists()
    assert [entry.name for entry in (tmp_path / "ones-7").iterdir()] == [ORDERS]


@pytest.mark.parametrize("planted", [ORDERS, f".{ORDERS}.{{pid}}"], ids=["in force", "being written"])
def test_an_order_that_cannot_be_put_there(own: SlurmJob, tmp_path: Path, planted: str) -> None:
    """A directory in its place: it is said, nothing is left behind, and it costs that job its order alone."""
    planted = planted.format(pid=os.getpid())
    (tmp_path / "ones-7" / planted / "full").mkdir(parents=True)
    with pytest.raises(OrderError, match="ones-7"):
        write_order(own, Order(5, 0, 64), None)
    assert [entry.name for entry in (tmp_path / "ones-7").iterdir()] == [planted]


@root_only
@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o775, False)])
def test_a_spool_that_others_may_write_to(place: Path, mode: int, safe: bool) -> None:
    """Who may rename in it could give one job's order to another: it is not used."""
    spool = place / "spool"
    spool.mkdir()
    os.chown(spool, OWNER, OWNER)
    spool.chmod(mode)
    other = job(7, place, uid=VICTIM)
    os.seteuid(OWNER)
    try:
        if safe:
            write_order(other, Order(5, 0, 64), spool)
            assert decode_order((spool / spool_order_name(7)).read_bytes()).number == 5
        else:
            with pytest.raises(OrderError, match="others may write there"):
                write_order(other, Order(5, 0, 64), spool)
            assert list(spool.iterdir()) == []
    finally:
        os.seteuid(0)


@root_only
def test_a_spool_that_is_somebody_elses(place: Path) -> None:
    """Neither a link to one: an order of ours would be theirs to change."""
    spool, link = place / "spool", place / "link"
    spool.mkdir()
    link.symlink_to(spool)
    other = job(7, place, uid=VICTIM)
    os.seteuid(OWNER)
    try:
        for there in (spool, link):
            with pytest.raises(OrderError):
                write_order(other, Order(5, 0, 64), there)
    finally:
        os.seteuid(0)
    assert list(spool.iterdir()) == []


def test_a_forged_number_raises_no_other_jobs(place: Path) -> None:
    """Protects others' orders: a number that follows a forged one far ahead is too large for any reader."""
    orders = OrderWriter(None, None, lambda: NOW)  # type: ignore[arg-type]
    for job_id in (7, 8):
        folder = place / f"ones-{job_id}"
        folder.mkdir()
        if job_id == 7:
            (folder / ORDERS).write_bytes(encode(Order(2**53, 0)))
        if ROOT:
            os.chown(folder, OWNER, OWNER)
        orders.write(job(job_id, place), Order(orders.next_number(job(job_id, place)), 0, 64))
    assert decode_order((place / "ones-8" / ORDERS).read_bytes()).number == 1000 * NOW


@root_only
def test_a_file_of_anothers_in_the_spool_keeps_no_old_order(place: Path) -> None:
    """Protects a job with an id that Slurm uses again from the order to an earlier one."""
    place.chmod(0o1777)
    for job_id in range(40):
        path = place / spool_order_name(job_id)
        path.touch()
        os.chown(path, *[OWNER if job_id % 2 else VICTIM] * 2)
    os.seteuid(OWNER)
    try:
        OrderWriter(None, place, lambda: NOW).clear({1})  # type: ignore[arg-type]
    finally:
        os.seteuid(0)
    assert {path.name for path in place.iterdir()} == {spool_order_name(job_id) for job_id in (1, *range(0, 40, 2))}
