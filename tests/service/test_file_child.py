"""Users' files on a file system that does not answer: nobody waits for it, and nobody else is left alone."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ones_db import Store
from ones_wrapper.protocol import Order, decode_order, encode, encode_report
from slurm_ones import untrusted_files
from slurm_ones.act.orders import OrderError, write_order
from slurm_ones.config import Settings
from slurm_ones.jobs.observer import Observer
from slurm_ones.service import file_child
from slurm_ones.service.file_child import FileChild, mount_points
from slurm_ones.untrusted_files import NoAnswer, NotBelieved, read_file, read_files, run_by
from tests.jobs.make import HELLO, Queue, job
from tests.jobs.test_observer import SPEC
from tests.service import hanging
from tests.waiting import until

ME = os.geteuid()


@pytest.fixture
def child() -> Iterator[FileChild]:
    found = FileChild().start()
    yield found
    found.close()


@pytest.fixture
def patient(child: FileChild, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run` of the child that waits for what comes, however late: the machine may be loaded."""

    def run(*request: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(file_child, "QUICK_S", 30.0)
            return child.run(*request)

    return run


@contextmanager
def answers_after(monkeypatch: pytest.MonkeyPatch, answer_s: float) -> Iterator[Callable[[], float]]:
    """A clock by which each answer takes so long, and nothing else does; it gives the seconds that have passed."""
    began = now = time.monotonic()
    take = FileChild._take

    def wait(child: FileChild, seconds: float) -> None:
        nonlocal now
        if seconds == 0.0 or seconds > answer_s:
            take(child, 60.0 if seconds else 0.0)
        now += min(seconds, answer_s)

    clock = SimpleNamespace(monotonic=lambda: now, time=time.time, strftime=time.strftime, localtime=time.localtime)
    with monkeypatch.context() as patch:
        patch.setattr(FileChild, "_take", wait)
        patch.setattr(file_child, "time", clock)
        yield lambda: now - began


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_files_are_the_same_through_a_child(patient: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "ones-1").mkdir()
    own = job(work_dir=str(tmp_path))
    with run_by(patient):
        whole, link, none = read_files(tmp_path, ME, [("a", 1, 2), ("b", 0, 9), ("c", 0, 9)])
        assert whole == (b"23", 5) and isinstance(none, FileNotFoundError)
        assert isinstance(link, NotBelieved) and "links are not followed" in str(link)
        with pytest.raises(FileNotFoundError):
            read_file(tmp_path / "d", ME, "a", 1)
        write_order(own, Order(7, 0, 64), None)
    assert decode_order((tmp_path / "ones-1/orders.json").read_bytes()).number == 7


def test_who_hangs_is_waited_for_once(
    child: FileChild, patient: Callable[..., Any], fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His other requests there fail at once, others' do not, and he is served again once that one has ended."""
    good = fifo.with_name("good")
    good.write_bytes(b"1")
    assert patient(hanging.read, good, 1) == b"1"
    with answers_after(monkeypatch, math.inf) as passed, pytest.raises(NoAnswer, match="has not answered since"):
        child.run(hanging.read, fifo, 1)
    assert 0.0 < passed() < file_child.WAIT_S + 0.001
    assert [uid for _, uid in child.hanging] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(FileChild, "_ask", lambda *_: pytest.fail("it was asked again"))
        with pytest.raises(NoAnswer):
            child.run(hanging.read, good, 1)
    assert patient(hanging.read, good, 2) == b"1"
    fifo.write_bytes(b"at last")
    until(lambda: child._take(0.1) or not child.hanging)
    assert patient(hanging.read, good, 1) == b"1"


def test_many_who_hang_share_one_patience(
    child: FileChild, patient: Callable[..., Any], fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo.with_name("good").write_bytes(b"1")
    with answers_after(monkeypatch, math.inf) as passed:
        for uid in range(20):
            with pytest.raises(NoAnswer):
                child.run(hanging.read, fifo, uid)
    assert passed() < 2 * file_child.WAIT_S
    assert patient(hanging.read, fifo.with_name("good"), 99) == b"1"


def test_many_quick_answers_of_one_user(child: FileChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes soon enough; a thousand of them would be a tick of 15 s."""
    (tmp_path / "a").write_bytes(b"1")
    monkeypatch.setattr(file_child, "OF_ONE_S", 0.2)
    with answers_after(monkeypatch, 0.015):
        with pytest.raises(NoAnswer):
            for _ in range(200):
                child.run(hanging.read, tmp_path / "a", 1)
        assert child.run(hanging.read, tmp_path / "a", 2) == b"1"


def test_file_systems_of_one_user(
    child: FileChild, patient: Callable[..., Any], fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileChild, "_file_system", lambda _, path: path.name)
    monkeypatch.setattr(file_child, "MOST_HANGING", file_child.MOST_OF_ONE + 1)
    for number in range(3 * file_child.MOST_OF_ONE):
        (fifo.parent / str(number)).symlink_to(fifo)
        with pytest.raises(NoAnswer):
            child.run(hanging.read, fifo.with_name(str(number)), 1)
    assert len(child.hanging) == file_child.MOST_OF_ONE
    fifo.with_name("good").write_bytes(b"1")
    assert patient(hanging.read, fifo.with_name("good"), 2) == b"1"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_is_gone_or_stands_still(
    child: FileChild,
    patient: Callable[..., Any],
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_child, "STOPPED_S", 0.0)
    (tmp_path / "a").write_bytes(b"1")
    assert patient(hanging.read, tmp_path / "a", 1) == b"1"
    process = child._process
    assert process is not None
    process.send_signal(number)

    def answer() -> object:
        run = child.run if child._process is process else patient
        with suppress(NoAnswer):
            return run(hanging.read, tmp_path / "a", 1)
        return None

    assert until(answer) == b"1"
    assert child._process is not None and child._process.pid != process.pid


def test_it_ends_with_its_parent(child: FileChild, patient: Callable[..., Any], tmp_path: Path) -> None:
    """Whether or not that could say so."""
    (tmp_path / "a").write_bytes(b"1")
    patient(hanging.read, tmp_path / "a", 1)
    assert child._process is not None and child._connection is not None
    child._connection.close()
    assert child._process.wait(60) == 0


def test_what_took_too_long_is_not_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another companion may lead by then, and have ordered something else."""
    (tmp_path / "ones-1").mkdir()
    own = job(work_dir=str(tmp_path))
    write_order(own, Order(7, 0, 64), None)
    monkeypatch.setattr(untrusted_files, "WRITTEN_WITHIN_S", -1.0)
    with pytest.raises(OrderError, match="longer than"):
        write_order(own, Order(8, 0, 64), None)
    assert decode_order((tmp_path / "ones-1/orders.json").read_bytes()).number == 7
    assert len(list((tmp_path / "ones-1").iterdir())) == 1


def test_mount_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /home rw - nfs b rw\n3 1 0:3 / /home/a\\040b rw shared:1 - fuse c rw\n"
    )
    (tmp_path / "mounts").write_text(table)
    monkeypatch.setattr(file_child, "MOUNTS", tmp_path / "mounts")
    assert mount_points() == ["/home/a b", "/home", "/"]
    child = FileChild()
    places = ["/home/a b/x", "/home/../home/me", "/homes/x", "relative"]
    assert [child._file_system(Path(place)) for place in places] == ["/home/a b", "/home", "/", "/"]


@pytest.mark.skipif(not hanging.can_mount(), reason="a file system that hangs needs root and /dev/fuse")
def test_one_of_three_file_systems_hangs(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 100 ticks with a change of leader: ticks stay short, the others are read on, the job is left as it is with a
    reason, and looked after again when the server is back. A request that FUSE has passed on cannot be killed."""
    tmp_path.chmod(0o755)
    queue, users = Queue(), {1: 12341, 2: 12342, 3: 12343}
    quick_s, wait, hang = file_child.QUICK_S, FileChild._wait, set[int]()

    def patient(child: FileChild, number: int, uid: int, lane: file_child._Lane) -> bool:
        # On a busy machine the child may be late itself.
        monkeypatch.setattr(file_child, "QUICK_S", quick_s if uid in hang else 30.0)
        return wait(child, number, uid, lane)

    monkeypatch.setattr(FileChild, "_wait", patient)
    for job_id, uid in users.items():
        folder = tmp_path / f"home{job_id}" / f"ones-{job_id}"
        folder.mkdir(parents=True)
        queue.jobs[job_id] = replace(job(job_id, work_dir=str(folder.parent)), uid=uid)
        (folder / "spec.json").write_bytes(encode(SPEC))
        (folder / "reports-0.jsonl").write_bytes(encode_report(1, 900.0, HELLO))
        for path in (folder.parent, folder, *folder.iterdir()):
            os.chown(path, uid, uid)

    def tick(observer: Observer) -> list[str]:
        queue.now += 1.0
        began = time.monotonic()
        seen = observer.observe()
        took.append(time.monotonic() - began)
        return [one.refusal.code if one.refusal else "" for one in seen.elastic.values()]

    def report(number: int) -> None:
        for job_id in (1, 3):
            with (tmp_path / f"home{job_id}/ones-{job_id}/reports-0.jsonl").open("ab") as file:
                file.write(encode_report(number, 900.0 + number, HELLO))

    took: list[float] = []
    children = [FileChild().start(), FileChild().start()]
    try:
        with run_by(children[0].run):
            observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
            assert tick(observer) == ["", "", ""]
        took.clear()
        hang.add(users[2])
        with hanging.silent_mount(tmp_path / "home2"):
            for number, child in enumerate(children):
                with run_by(child.run):
                    observer = Observer(queue, store, Settings())  # type: ignore[arg-type]
                    report(2 + number)
                    found = [tick(observer) for _ in range(50)]
                    assert found == [["", "files_silent", ""]] * 50
                    with pytest.raises(OrderError, match="has not answered"):
                        write_order(queue.jobs[2], Order(7, 0, 64), None)
                    assert {uid for _, uid in child.hanging} == {users[2]}
                    child.close()  # it hangs in the kernel, and is not waited for
            positions = store.report_positions([1, 2, 3])
            assert [positions[job_id][0][1] for job_id in (1, 2, 3)] == [3, 1, 3]
            refusal = store.jobs([2])[2].refusal
            assert f"the file system {tmp_path}/home2 has not answered since" in str(refusal)
            assert "has not answered" in store.jobs([2])[2].report_note
        assert sorted(took)[90] < 1.0
        hang.clear()
        with run_by(children[1].start().run):
            assert any(tick(observer) == ["", "", ""] for _ in range(100))
    finally:
        for child in children:
            child.close()
