"""Companions that kill themselves in a resize: run inside a cluster as `python -m tests.endtoend.killed`.

    killed SETTINGS JOB FIRST STRIDE SHAPE
    killed SETTINGS JOB EVENT,EVENT… SHAPE

The job is resized from 1x1 to SHAPE, back, and so on; one of blocks to 0xG, which is G GPUs wherever they lie. In the
n-th resize the companion sends itself SIGKILL at its event FIRST + n * STRIDE: before or after a journal write, an
order, or a command that changes something in Slurm; or at the first event of a name, for each of several, in as many
resizes as it takes until one has it. A second companion, which begins nothing, then closes what it finds. A FIRST of
-1 - N is N after one resize without a death. Each round is one JSON line on stdout; with numbers the last is that of
the resize that had fewer events than that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from ones_db import Store, migrate
from ones_db.shape import Shape
from ones_wrapper.protocol import Membership, decode_report, directory_name
from slurm_ones.act import orders as orders_module
from slurm_ones.act.orders import write_order
from slurm_ones.companion import Tick
from slurm_ones.config import Settings, load
from slurm_ones.policy.contract import Allocation
from slurm_ones.service.daemon import Daemon
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import SlurmJob
from tests.endtoend.scripted import Scripted, companion

SMALL = Shape(1, 1)
CHANGES = ("requeuehold", "uhold", "update", "release")
WRITES = ("begin_resize", "step_resize", "end_resize")
WAITS = ("BeginTime", "Resources", "Priority")
LIMIT_S = 60.0
LOOK_S = 0.3
"""Between two questions to Slurm, which start a process each."""
TRIES = 4
"""Resizes in which an event of a name is looked for: some are of one direction alone."""
NEVER = 10**6


Fatal = int | str


class Events:
    """Counts what a resize does, and ends this process at one of them."""

    def __init__(self, fatal: Fatal, told: int) -> None:
        """`fatal` is its number, or its name; `told` is the descriptor to which the fatal event's name goes."""
        self._fatal = fatal
        self._told = told
        self._number = 0

    def __call__(self, name: str) -> None:
        if self._fatal in (self._number, name):
            os.write(self._told, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self._number += 1

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, between two events."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self(f"before {name}")
            result = call(*arguments, **options)
            self(f"after {name}")
            return result

        return wrapped


class Client(CommandClient):
    """The command-line client; each command that changes something stands between two events."""

    events: Events | None = None

    def run(self, argv: Sequence[str], **options: Any) -> str:
        if self.events is not None and argv[1] in CHANGES:
            name = argv[3].split("=")[0] if argv[1] == "update" else argv[1]
            return str(self.events.around(name, super().run)(argv, **options))
        return super().run(argv, **options)


def look_after(settings: Settings, job_id: int, to: Allocation | None, events: Events | None) -> None:
    """One companion, until it has begun that resize (if one is asked for) and none is open."""
    client, policy, stop = Client(), Scripted({job_id: [to] if to else []}), threading.Event()
    client.events = events
    with Store.open(settings.database_url, settings.cluster) as store:

        def on_tick(tick: Tick) -> None:
            if tick.begun:
                policy.steps.clear()  # one resize, however it ends
            if policy.done and not store.open_resizes():
                stop.set()

        order = write_order
        if events is not None:
            order = events.around("order", write_order)
            for name in WRITES:
                setattr(store, name, events.around(name, getattr(store, name)))
        with mock.patch.object(orders_module, "write_order", order):
            Daemon(lambda: companion(settings, client, store, policy)).run(stop, on_tick)


def in_child(work: Callable[[], None]) -> int:
    """Do it in a process of its own; its wait status."""
    pid = os.fork()
    if pid == 0:
        _and_exit(work)
    return os.waitpid(pid, 0)[1]


def _and_exit(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def settled(client: CommandClient, job_id: int) -> SlurmJob:
    """The job once it runs, or waits as it did from the first; or as it is after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        job = client.job(job_id)
        if job.running or (job.pending and job.restart == 0 and job.reason in WAITS):
            break
        time.sleep(LOOK_S)
    return job


def blocks_settled(client: CommandClient, job_id: int) -> tuple[dict[int, SlurmJob], str]:
    """The tasks of a job of blocks once those run that train together and all others wait in a hold or have ended; and
    what is not so after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        tasks = {job.array_tasks[0]: job for job in client.tasks(job_id)}
        trains, wrong = _train_together(job_id, Path(next(iter(tasks.values())).work_dir)), ""
        for task, job in tasks.items():
            if job.running != (task in trains):
                wrong = f"{trains} train, task {task} is {job.state.value}"
            # Behind the throttle none starts while the job trains.
            elif job.pending and not job.held and not job.throttle:
                wrong = f"task {task} waits, held by nobody: {job.reason}"
        if not wrong or time.monotonic() > deadline:
            return tasks, wrong
        time.sleep(LOOK_S)


def _train_together(job_id: int, work_dir: Path) -> tuple[int, ...]:
    paths = work_dir.joinpath(directory_name(job_id)).glob("reports-*.jsonl")
    newest = max(paths, key=lambda path: int(path.stem.rpartition("-")[2]))
    reports = [decode_report(line)[2] for line in newest.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return next((m.blocks for m in reversed(reports) if isinstance(m, Membership)), ())


def round_of_blocks(settings: Settings, job_id: int, fatal: Fatal, big: Shape) -> dict[str, Any]:
    """`one_round` of a job of blocks: it trains on, whatever happens."""
    client = CommandClient()
    before = _gpus(settings, blocks_settled(client, job_id)[0])
    to = Allocation(big, 32) if before == 1 else Allocation(Shape(0, 1), 16)
    event, statuses = _with_a_death(settings, job_id, fatal, to)
    tasks, wrong = blocks_settled(client, job_id)
    trained = [job for job in tasks.values() if job.running]
    return {
        **_found(settings, job_id, fatal, event, statuses),
        "from": str(before),
        "shape": str(_gpus(settings, tasks)),
        "state": "RUNNING" if trained else "none",
        "held": False,
        "wrong": wrong,
    }


def _gpus(settings: Settings, tasks: Mapping[int, SlurmJob]) -> int:
    whole = settings.whole_node_gpus
    return sum(job.nodes * whole.get(job.partition, job.gpus_per_node) for job in tasks.values() if job.running)


def one_round(settings: Settings, job_id: int, fatal: Fatal, big: Shape) -> dict[str, Any]:
    """One resize with a death in it, its end, and what was found then."""
    client = CommandClient()
    before = settled(client, job_id)
    small = (before.nodes, before.gpus_per_node) == (SMALL.nodes, SMALL.gpus_per_node)
    to = Allocation(big, 32) if small else Allocation(SMALL, 16)
    event, statuses = _with_a_death(settings, job_id, fatal, to)
    job = settled(client, job_id)
    return {
        **_found(settings, job_id, fatal, event, statuses),
        "from": str(Shape(before.nodes, before.gpus_per_node)),
        "shape": str(Shape(job.nodes, job.gpus_per_node)),
        "state": job.state.value,
        "held": job.held,
        "restarts": job.restart - before.restart,
        "wrong": "",
    }


def _with_a_death(settings: Settings, job_id: int, fatal: Fatal, to: Allocation) -> tuple[str, list[int]]:
    """Have a companion begin that resize and die at that event, and another one close what it finds; the event, and
    the wait statuses of both."""
    told, tell = os.pipe()
    status = in_child(lambda: look_after(settings, job_id, to, Events(fatal, tell)))
    os.close(tell)
    event = os.read(told, 1000).decode()
    os.close(told)
    return event, [status, in_child(lambda: look_after(settings, job_id, None, None))]


def _found(settings: Settings, job_id: int, fatal: Fatal, event: str, statuses: list[int]) -> dict[str, Any]:
    with Store.open(settings.database_url, settings.cluster, read_only=True) as store:
        resizes = store.resizes(job_id)
        left = len(store.open_resizes())
    return {
        "fatal": fatal,
        "event": event,
        "killed": os.WIFSIGNALED(statuses[0]) and os.WTERMSIG(statuses[0]) == signal.SIGKILL,
        "statuses": statuses,
        "open": left,
        "resize": resizes[-1].state if resizes else None,
        "outcome": str(resizes[-1].outcome) if resizes else None,
    }


def main(path: str, job: str, *deaths: str) -> None:
    settings = load(Path(path))
    migrate.upgrade(settings.database_url)
    to = Shape.parse(deaths[-1])
    play = round_of_blocks if to.nodes == 0 < to.gpus_per_node else one_round

    def told(fatal: Fatal) -> bool:
        found = play(settings, int(job), fatal, to)
        print(json.dumps(found), flush=True)
        return bool(found["killed"])

    if len(deaths) == 2:
        for name in deaths[0].split(","):
            any(told(name) for _ in range(TRIES))
        return
    fatal, stride = map(int, deaths[:2])
    if fatal < 0:
        # So that what follows meets the resizes of the other direction.
        fatal = -fatal - 1
        play(settings, int(job), NEVER, to)
    while told(fatal):
        fatal += stride


if __name__ == "__main__":
    main(*sys.argv[1:])
