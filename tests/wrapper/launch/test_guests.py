"""Standing guests: what a job of blocks asks of Slurm by itself, and that it may be cut off anywhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ones_wrapper.launch import guests as guests_module
from ones_wrapper.launch.guests import GuestKeeper
from ones_wrapper.membership.files import HotFolder, Leader
from ones_wrapper.process.block import Block
from ones_wrapper.protocol import SPOOL_MARK, Order, decode_order
from ones_wrapper.protocol.standing import NEAR_S, StandingGuests, lines_of
from tests.waiting import until
from tests.wrapper.runs import write_order

ARRAY, NOW, END = 7, 1000.0, 90_000.0
COMMENT = "ones: gpus=1-4 batch=32-256 array=blocks guests=partition:scavenge"


class Cut(Exception):
    """The launcher dies here."""


@dataclass
class FakeTask:
    state: str = "PENDING"
    partition: str = "gpu"
    qos: str = "normal"
    limit: str = "1-00:00:00"
    begin: float = 0.0
    held: bool = False


@dataclass
class FakeSlurm:
    """An array of which task 0 runs and the others wait behind the throttle."""

    comment: str = COMMENT
    count: int = 6
    refuses: Callable[[list[str]], str] = lambda command: ""
    tasks: dict[int, FakeTask] = field(default_factory=dict)
    throttle: int = 1
    commands: list[str] = field(default_factory=list)
    cut_after: int = -1
    ordered: tuple[int, ...] = ()
    said: list[str] = field(default_factory=list)
    now: float = NOW

    def __post_init__(self) -> None:
        self.tasks = {number: FakeTask() for number in range(self.count)}
        self.tasks[0].state = "RUNNING"

    def line(self, number: int, task: FakeTask) -> str:
        waits = task.state == "PENDING"
        late = "BeginTime" if task.begin > self.now else "Resources"
        reason = "JobHeldUser" if task.held else late if waits else "None"
        words = [task.state, task.partition, task.qos, task.limit, "N/A" if waits else f"{END:.0f}", reason]
        return "|".join([str(number), *words, self.comment])

    def run(self, command: list[str]) -> tuple[str, str]:
        if command[0] == "squeue":
            return "\n".join(self.line(*item) for item in self.tasks.items()), ""
        if command[0] == "sinfo":
            return "12:00:00\n", ""
        if self.cut_after == len(self.commands):
            raise Cut
        self.commands.append(" ".join(command))
        if why := self.refuses(command):
            return "", why
        self.change(command)
        return "", ""

    def change(self, command: list[str]) -> None:
        if command[1] == "requeue":
            self.tasks[int(command[2].partition("_")[2])].state = "PENDING"
            return
        words = dict(word.split("=", 1) for word in command[2:])
        array, _, number = words.pop("JobId").partition("_")
        assert int(array) == ARRAY
        if "ArrayTaskThrottle" in words:
            self.throttle = int(words["ArrayTaskThrottle"])
            return
        task = self.tasks[int(number)]
        assert task.state == "PENDING", command
        task.partition = words.get("Partition", task.partition)
        task.qos = words.get("QOS", task.qos)
        if start := words.get("StartTime"):
            task.begin = 0.0 if start == "now" else float(start.removeprefix("uts"))

    def order(self, tasks: tuple[int, ...]) -> str:
        if self.cut_after == len(self.commands):
            raise Cut
        self.ordered = self.ordered or tasks
        return ""

    def guests(self) -> StandingGuests:
        return StandingGuests(ARRAY, (1, 1), self.run, self.order, self.said.append, lambda: self.now)

    def starts(self) -> None:
        for task in self.tasks.values():
            running = sum(one.state == "RUNNING" for one in self.tasks.values())
            may = task.state == "PENDING" and not task.held and task.begin <= self.now
            if may and (not self.throttle or running < self.throttle):
                task.state = "RUNNING"

    def where(self, state: str = "PENDING") -> dict[int, str]:
        return {number: task.partition for number, task in self.tasks.items() if task.state == state}


def test_the_waiting_tasks_become_guests_but_one() -> None:
    """As many guests as the comment allows; the others wait in the job's own queue, not held, until the base is nearly
    over."""
    slurm = FakeSlurm()
    assert slurm.guests().look()
    assert slurm.where() == {1: "scavenge", 2: "scavenge", 3: "scavenge", 4: "gpu", 5: "gpu"}
    assert slurm.commands[0] == "scontrol update JobId=7_1 Partition=scavenge TimeLimit=720"
    assert [slurm.tasks[number].begin for number in (4, 5)] == [END - NEAR_S] * 2
    assert slurm.commands[-1] == "scontrol update JobId=7 ArrayTaskThrottle=0"
    assert slurm.ordered == (0, 4, 5, 1, 2, 3)
    slurm.starts()
    assert slurm.where("RUNNING") == {0: "gpu", 1: "scavenge", 2: "scavenge", 3: "scavenge"}
    before = len(slurm.commands)
    guests = slurm.guests()
    assert guests.look() and guests.look()
    # A launcher that comes later sets the time and the throttle again, once.
    assert len(slurm.commands) == before + 3


@pytest.mark.parametrize("cut", range(6))
def test_a_launcher_may_die_between_any_two_commands(cut: int) -> None:
    """One block is in the job's own queue, Slurm starts another if that ends, and the next launcher ends where the
    first would have."""
    whole, slurm = FakeSlurm(), FakeSlurm(cut_after=cut)
    whole.guests().look()
    with pytest.raises(Cut):
        slurm.guests().look()
    slurm.cut_after = -1
    assert not any(task.held for task in slurm.tasks.values())
    slurm.starts()
    assert list(slurm.where("RUNNING").values()) == ["gpu"]
    slurm.tasks[0].state = "FAILED"
    slurm.starts()
    assert len(slurm.where("RUNNING")) == 1
    slurm.tasks[0].state = "RUNNING"
    slurm.tasks[min(slurm.where("RUNNING").keys() - {0})].state = "PENDING"
    slurm.guests().look()
    assert (slurm.where(), slurm.throttle, slurm.ordered) == (whole.where(), whole.throttle, whole.ordered)


def test_two_launchers_at_once_do_what_one_does() -> None:
    slurm = FakeSlurm()
    one, other = slurm.guests(), slurm.guests()
    one.look()
    before = slurm.where(), slurm.throttle
    other.look()
    one.look()
    assert (slurm.where(), slurm.throttle) == before


def test_the_next_base_has_no_time_limit_if_the_last_had_none() -> None:
    """A guest's limit is that of its queue, and would end the job."""
    slurm = FakeSlurm(count=3)
    slurm.tasks[0].limit = "UNLIMITED"
    for number in (1, 2):
        slurm.tasks[number] = FakeTask(partition="scavenge", limit="12:00:00")
    slurm.guests().look()
    assert (
        slurm.commands[0]
        == f"scontrol update JobId=7_2 StartTime=uts{END - NEAR_S:.0f} Partition=gpu TimeLimit=UNLIMITED"
    )


@pytest.mark.parametrize("state", ["PREEMPTED", "COMPLETED"])
def test_a_guest_that_slurm_cancelled_comes_back(state: str) -> None:
    """Another task takes the place of one that its owner cancelled."""
    slurm = FakeSlurm()
    guests = slurm.guests()
    guests.look()
    slurm.starts()
    slurm.tasks[1].state, slurm.tasks[2].state = state, "CANCELLED"
    del slurm.commands[:]
    guests.look()
    guests.look()
    assert slurm.commands == [
        "scontrol update JobId=7_4 StartTime=now Partition=scavenge TimeLimit=720",
        "scontrol requeue 7_1",
    ]
    assert slurm.tasks[1] == slurm.tasks[4] == FakeTask(partition="scavenge")
    assert (slurm.tasks[2].state, slurm.tasks[5].partition) == ("CANCELLED", "gpu")


def test_the_next_base() -> None:
    """The task that was kept starts at once if the base is gone, and another is kept then, of the guests if need be."""
    slurm = FakeSlurm(count=5)
    guests = slurm.guests()
    guests.look()
    slurm.starts()
    slurm.tasks[0].state = "FAILED"
    guests.look()
    assert slurm.tasks[4].begin == 0.0
    slurm.starts()
    assert slurm.tasks[4].state == "RUNNING"
    slurm.tasks[3].state = "PENDING"
    guests.look()
    assert slurm.tasks[3] == FakeTask(begin=END - NEAR_S)
    slurm.now = END - NEAR_S
    slurm.starts()
    assert slurm.where("RUNNING") == {1: "scavenge", 2: "scavenge", 3: "gpu", 4: "gpu"}


@pytest.mark.parametrize(
    ("why", "goes_on", "moved"),
    [
        ("Invalid partition name specified", False, 0),
        ("Unable to contact slurm controller (connect failure)", True, 0),
        ("scontrol: no answer within 30 s", True, 0),
        ("Job violates accounting/QOS policy (job submit limit)", True, 2),
    ],
)
def test_what_slurm_refuses_is_one_sentence(why: str, goes_on: bool, moved: int) -> None:
    """Nothing starts that was not moved, and what was moved before is used."""
    slurm = FakeSlurm()
    slurm.refuses = lambda command: why if "Partition=scavenge" in command and len(slurm.commands) > moved else ""
    guests = slurm.guests()
    assert guests.look() is goes_on
    assert guests.look() is goes_on
    assert [text for text in slurm.said if why in text] == [slurm.said[0]]
    slurm.starts()
    assert len(slurm.where("RUNNING")) == 1 + moved
    assert slurm.throttle == (0 if moved else 1)


@pytest.mark.parametrize(
    ("words", "guests"),
    [
        ("gpus=1-4 guests=partition:scavenge", 3),
        ("gpus=1-1 guests=partition:scavenge", 0),
        ("nodes=1-3 guests=qos:low", 2),
        ("gpus=1-9 guests=qos:low", 4),
        ("gpus=1-4", 0),
        ("gpus=1-4 guests=off", 0),
        ("gpus=1-4 guests=partition:", 0),
    ],
)
def test_how_many_become_guests(words: str, guests: int) -> None:
    """Nobody's who did not ask for it, nor beyond the limits that an owner sets."""
    slurm = FakeSlurm(comment=f"ones: batch=32-256 array=blocks {words}")
    assert slurm.guests().look() is bool(guests)
    assert sum(task.partition == "scavenge" or task.qos == "low" for task in slurm.tasks.values()) == guests
    assert bool(slurm.commands) is bool(guests)


def test_what_squeue_prints() -> None:
    """Other forms of a time, a comment with bars; what is no line is passed over."""
    text = (
        "3|RUNNING|gpu|normal|UNLIMITED|N/A|None|a|b\n1|PENDING|gpu|(null)|30:00|1764160000|Priority|(null)\nnonsense\n"
    )
    assert [(one.task, one.limit_s, one.end, one.comment) for one in lines_of(text)] == [
        (3, 0.0, 0.0, "a|b"),
        (1, 1800.0, 1764160000.0, "(null)"),
    ]


# The launcher's thread, with commands on the PATH.


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GuestKeeper]:
    """Of task 0, which leads, with commands that note what they are called with."""
    commands = tmp_path / "bin"
    commands.mkdir()
    shown = "\\n".join(FakeSlurm().line(*item) for item in FakeSlurm().tasks.items())
    for name, text in {"squeue": f"printf '{shown}'", "scontrol": "", "sinfo": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/called\n{text}\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(guests_module, "_TURN_S", 0.01)
    monkeypatch.setattr(guests_module, "LOOK_S", 0.05)

    def made(task: int = 0) -> GuestKeeper:
        return GuestKeeper(Block(ARRAY, task, 0), tmp_path, tmp_path / "spool", (1, 1))

    hot = HotFolder(tmp_path, ARRAY)
    hot.prepare()
    assert hot.claim(Leader(0, "127.0.0.1", 1234, "place", 0, 0))
    return made


def called(tmp_path: Path) -> str:
    return (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""


def test_the_launcher_of_the_block_that_leads_sees_to_it(tmp_path: Path, keeper: Callable[..., GuestKeeper]) -> None:
    """The others read a file alone."""
    other, leads = keeper(3), keeper()
    other.start()
    time.sleep(0.1)
    assert not called(tmp_path)
    leads.start()
    until(lambda: "ArrayTaskThrottle=0" in called(tmp_path), lambda: called(tmp_path))
    other.stop()
    leads.stop()
    assert decode_order((tmp_path / "orders.json").read_bytes()) == Order(1, 0, blocks=(0, 4, 5, 1, 2, 3))
    assert "Partition=scavenge" in called(tmp_path)


@pytest.mark.parametrize("how", ["an order", "a spool", "no commands"])
def test_a_companion_decides(tmp_path: Path, keeper: Callable[..., GuestKeeper], how: str,
                             monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Its order is not replaced; and a node without commands of Slurm's says what to do."""
    if how == "an order":
        write_order(tmp_path, Order(1_764_160_000_000, 0, blocks=(0,)))
    elif how == "a spool":
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / SPOOL_MARK).touch()
    else:
        monkeypatch.setenv("PATH", "/nowhere")
    one = keeper()
    one.start()
    one._thread.join(10.0)
    assert not one._thread.is_alive()
    assert not called(tmp_path)
    assert ("slurm-ones guests 7" in capsys.readouterr().err) is (how == "no commands")


def test_a_companion_that_comes_later_takes_over(tmp_path: Path, keeper: Callable[..., GuestKeeper]) -> None:
    """From its first order on nothing more is asked for here."""
    one = keeper()
    one.start()
    until(lambda: "ArrayTaskThrottle=0" in called(tmp_path), lambda: called(tmp_path))
    order = Order(1_764_160_000_000, 0, blocks=(0, 2))
    write_order(tmp_path, order)
    one._thread.join(10.0)
    assert not one._thread.is_alive()
    assert decode_order((tmp_path / "orders.json").read_bytes()) == order


def test_commands_that_hang_do_not_keep_a_job_from_ending(tmp_path: Path, keeper: Callable[..., GuestKeeper],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/called\nexec sleep 60\n")
    monkeypatch.setattr(guests_module, "STOP_S", 0.1)
    one = keeper()
    one.start()
    until(lambda: called(tmp_path))
    started = time.monotonic()
    one.stop()
    assert time.monotonic() - started < 30
    # Else its thread would log after 30 s, into another test's output.
    os.kill(int(called(tmp_path)), signal.SIGKILL)
    one._thread.join()
