"""Training that gains and loses members: blocks of slurm-ones and replica groups of torchft, side by side in one run.

    python -m benchmarks.neighbours --torchft-python PYTHON --nvrx-python PYTHON --json neighbours.json

Each `PYTHON` is that of an environment with this torch, and with torchft 0.2 or nvidia-resiliency-ext 0.4. Each system
trains the same model with the same optimizer and schedule, on members of one rank each. Five times a member joins,
another leaves by plan, one joins, and one is killed together with what started it: 20 changes. Members write down when
each step ended, at which rate, and a digest of their weights. A pause is the longest time in which nobody ends a step,
less the median step. Everything is on one machine, by gloo and the loopback device, outside Slurm and without a GPU.
With `--kills N` N of them are killed in place of that, one of three each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ones_wrapper.process.placement import free_port

CYCLE = ("join", "leave", "join", "kill")
CYCLES = 5
STEPS = 10
"""Steps of every member after a change that are looked at."""
BEFORE_S = 3.0
"""Before a change, for the median."""
LIMIT_S = 45.0
"""For a change."""
JOIN_TIMEOUT_MS = 1000
"""Of torchft's lighthouse: its default of 60 s holds each planned leave up for that long, and at 0.1 s groups part."""

COMMON = """
import hashlib, json, os, sys, time
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
log, width, step_s = open(sys.argv[1], "a", buffering=1), 512, float(sys.argv[2])
net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))


def note(step, world):
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    line = {"ended": time.time(), "step": step, "world": world, "rate": optimizer.param_groups[0]["lr"]}
    log.write(json.dumps(line | {"digest": digest}) + "\\n")
"""
OURS = (
    COMMON
    + """
import ones_wrapper as ones
from torch.utils.data import TensorDataset

job = ones.init(batch=32, epochs=1_000_000)
data = TensorDataset(torch.randn(640, width, generator=torch.Generator().manual_seed(1)))
model, optimizer, loader, rate = job.prepare(net, optimizer, torch.utils.data.DataLoader(data, 32, shuffle=True), rate)
for _ in job.epochs():
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(step_s)
        optimizer.step()
        rate.step()
        note(job.progress.step, job.world)
"""
)
TORCHFT = (
    COMMON
    + """
from datetime import timedelta
import torchft
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
kept = {"model": net, "optimizer": optimizer, "rate": rate}
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, rank=0, world_size=1,
    store_addr="127.0.0.1", store_port=store.port, replica_id=f"group-{os.getpid()}", hostname="127.0.0.1",
    timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=20), connect_timeout=timedelta(seconds=20),
    state_dict=lambda: {name: one.state_dict() for name, one in kept.items()},
    load_state_dict=lambda state: [one.load_state_dict(state[name]) for name, one in kept.items()],
)
if sys.argv[3] == "ddp":
    model = torchft.DistributedDataParallel(manager, net)
else:
    from torchft.ddp import PureDistributedDataParallel
    model = PureDistributedDataParallel(manager, net)
stepper = torchft.Optimizer(manager, optimizer)
while True:
    x = torch.randn(32, width)
    stepper.zero_grad()
    model(x).square().mean().backward()
    time.sleep(step_s)
    before = manager.current_step()
    stepper.step()
    if manager.current_step() > before:
        rate.step()
        note(manager.current_step(), manager.num_participants())
"""
)
NVRX = (
    COMMON
    + """
from datetime import timedelta
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

soon, later = timedelta(seconds=0.1), timedelta(seconds=60)


@inprocess.Wrapper(
    store_kwargs={"timeout": later, "port": int(os.environ["MASTER_PORT"]) + 1},
    initialize=inprocess.initialize.RetryController(max_iterations=10, min_world_size=1, min_active_world_size=1),
    soft_timeout=timedelta(seconds=10), hard_timeout=timedelta(seconds=15), heartbeat_timeout=timedelta(seconds=20),
    monitor_thread_interval=soon, monitor_process_interval=soon, last_call_wait=soon,
    barrier_timeout=later, completion_timeout=later,
)
def train(call_wrapper: inprocess.CallWrapper = None):
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    step = 0
    while True:
        x = torch.randn(32, width)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        time.sleep(step_s)
        optimizer.step()
        rate.step()
        step += 1
        call_wrapper.ping()
        note(step, dist.get_world_size())


train()
"""
)
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=int(sys.argv[1]), quorum_tick_ms=50)
print(server.address(), flush=True)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Step:
    """A step of one member."""

    ended: float
    step: int
    world: int
    rate: float
    digest: str


@dataclass
class Change:
    """Outcome of one change."""

    kind: str
    pause_s: float | None
    """Longest time in which no member ended a step; None if those that stay did not all train again in time."""
    all_s: float | None
    """Longest time in which one of those that stay ended no step."""
    equal: bool
    """True if all members had the same rate and weights after each of the steps that were looked at."""
    ended: int
    """Members that ended without being asked to."""


class Member:
    """A process that trains, with all that it starts, and the file in which it notes its steps."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        with log.with_suffix(".err").open("wb") as errors:
            self.process = subprocess.Popen(command, env=env, stdout=errors, stderr=errors, start_new_session=True)

    def steps(self) -> list[Step]:
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]

    def signal(self, number: int) -> None:
        """To the member and all that it started."""
        for pid in [*_below(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _below(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (*_below(child), child)]


class System(ABC):
    """A system under test: starts members and makes them leave."""

    name: str

    def __init__(self, directory: Path, step_s: float) -> None:
        self._directory, self._step_s, self._started = directory, step_s, 0
        directory.mkdir()

    @abstractmethod
    def start(self, members: list[Member]) -> Member:
        """Start a member that is to train with these."""

    @abstractmethod
    def leave(self, member: Member, members: list[Member]) -> None:
        """Make a member leave by plan; `members` are those that stay."""

    @abstractmethod
    def close(self) -> None:
        """End the processes that belong to no member."""

    def _log(self) -> Path:
        self._started += 1
        return self._directory / f"steps-{self._started - 1}.jsonl"


class Blocks(System):
    """Blocks of slurm-ones, each started by an `ones-run`; the companion's orders are written by hand."""

    name = "slurm-ones"

    def __init__(self, directory: Path, step_s: float) -> None:
        super().__init__(directory, step_s)
        from tests.wrapper.membership.blocks import Job  # needs torch, which torchft's environment has by itself

        self._script = directory / "train.py"
        self._script.write_text(OURS)
        self._job = Job(directory / "job", script=self._script)
        self._task: dict[int, int] = {}

    def start(self, members: list[Member]) -> Member:
        task = self._started
        env = _environment() | {
            "ONES_JOB_DIR": str(self._job.directory), "ONES_REPORT_EVERY_S": "0.2", "ONES_LAUNCHER": "local",
            "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_JOB_ID": str(4712 + task), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": "0",
        }  # fmt: skip
        log = self._log()
        command = [sys.executable, "-m", "ones_wrapper.launch", "--blocks", "--gpus-per-node=1", str(self._script)]
        member = Member([*command, str(log), str(self._step_s)], log, env)
        self._task[member.process.pid] = task
        if members:
            self._order([*members, member])
        return member

    def leave(self, member: Member, members: list[Member]) -> None:
        self._order(members)

    def close(self) -> None:
        pass

    def _order(self, members: list[Member]) -> None:
        self._job.order(*(self._task[member.process.pid] for member in members))


class Torchft(System):
    """Replica groups of torchft; a planned leave is the process's end by SIGTERM, since it has no call for that."""

    def __init__(self, directory: Path, step_s: float, python: str, model: str) -> None:
        super().__init__(directory, step_s)
        self.name, self._python, self._model = f"torchft, {model}", python, model
        self._script, lighthouse = directory / "train.py", directory / "lighthouse.py"
        self._script.write_text(TORCHFT)
        lighthouse.write_text(LIGHTHOUSE)
        command = [python, str(lighthouse), str(JOIN_TIMEOUT_MS)]
        self._lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._lighthouse.stdout is not None
        self._address = self._lighthouse.stdout.readline().strip()

    def start(self, members: list[Member]) -> Member:
        log = self._log()
        env = _environment() | {"TORCHFT_LIGHTHOUSE": self._address}
        return Member([self._python, str(self._script), str(log), str(self._step_s), self._model], log, env)

    def leave(self, member: Member, members: list[Member]) -> None:
        member.signal(signal.SIGTERM)

    def close(self) -> None:
        self._lighthouse.kill()


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | {"OMP_NUM_THREADS": "1"}


def _settled(members: list[Member], world: int, after: float) -> list[list[Step]] | None:
    """Return each member's steps of that world that ended after a time, once there are enough of them."""
    found = [[step for step in member.steps() if step.world == world and step.ended > after] for member in members]
    return found if all(len(steps) >= STEPS for steps in found) else None


def _equal(found: list[list[Step]]) -> bool:
    """Tell whether rates and weights are equal at each step that all members noted; False if there is none."""
    by_step = [{step.step: (step.rate, step.digest) for step in steps} for steps in found]
    common = set.intersection(*(set(one) for one in by_step))
    return bool(common) and all(len({one[step] for one in by_step}) == 1 for step in common)


def _pauses_s(stay: list[Member], began: float, until: float) -> tuple[float, float]:
    """Return the longest time without a step of anybody, and of one member, less the median step before the change."""
    ends = [[step.ended for step in member.steps()] for member in stay]
    before = [b - a for one in ends for a, b in pairwise(end for end in one if began - BEFORE_S <= end < began)]
    usual = statistics.median(before) if before else 0.0  # who was started again a moment ago has no step before

    def longest(times: list[float]) -> float:
        return max((b - a for a, b in pairwise(times) if b >= began and a <= until), default=0.0) - usual

    return longest(sorted(chain.from_iterable(ends))), max(map(longest, ends))


def _wait(members: list[Member], world: int, after: float) -> list[list[Step]] | None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and all(member.process.poll() is None for member in members):
        found = _settled(members, world, after)
        if found is not None:
            return found
        time.sleep(0.05)
    return None


def measured(system: System, kinds: Sequence[str]) -> list[Change]:
    """Take a system through changes of these kinds. A member that ends unasked is started again before the next one."""
    members: list[Member] = []
    changes = []
    try:
        for number, kind in enumerate(("", *kinds)):
            while len(members) < (2 if "join" in kinds else 3):
                members.append(system.start(members))
                _wait(members, len(members), time.time())
            if not number:
                continue
            time.sleep(BEFORE_S)
            began, stay = time.time(), list(members)
            if kind == "join":
                members.append(system.start(members))
            else:
                gone = members.pop(number // len(CYCLE) % 2 - 1)
                stay = list(members)
                if kind == "leave":
                    system.leave(gone, members)
                else:
                    gone.signal(signal.SIGKILL)
            found = _wait(members, len(members), began)
            until = max(steps[0].ended for steps in found) if found else 0.0
            pause, each = _pauses_s(stay, began, until) if found else (None, None)
            lost = [member for member in members if member.process.poll() is not None]
            changes.append(Change(kind, pause, each, bool(found) and _equal(found or []), len(lost)))
            print(f"{system.name}: {changes[-1]}", file=sys.stderr)
            members = [member for member in members if member not in lost]
    finally:
        for member in members:
            member.signal(signal.SIGKILL)
        system.close()
    return changes


def restarted_in_place(python: str, directory: Path, step_s: float) -> list[dict[str, Any]]:
    """Kill one of three ranks under NVRx's in-process restart, as often as there are cycles.

    It restarts the function in the ranks that are left. It has neither newcomers nor planned leaves, and carries no
    state: the function must read its state from a checkpoint of its own.
    """
    script, found = directory / "train.py", []
    directory.mkdir()
    script.write_text(NVRX)
    for number in range(CYCLES):
        members = []
        port = free_port()
        for rank in range(3):
            log = directory / f"steps-{number}-{rank}.jsonl"
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
            env = _environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            members.append(Member([python, str(script), str(log), str(step_s)], log, env))
        try:
            started = _wait(members, 3, 0.0) is not None
            time.sleep(BEFORE_S)
            began = time.time()
            members.pop().signal(signal.SIGKILL)
            deadline = time.monotonic() + LIMIT_S
            went_on: list[Member] = []
            while started and time.monotonic() < deadline and len(went_on) < len(members):
                went_on = [one for one in members if sum(step.ended > began + 1 for step in one.steps()) >= STEPS]
                time.sleep(0.05)
            pauses = [_pauses_s([member], began, time.time())[1] for member in went_on]
            first = [next(step.step for step in one.steps() if step.ended > began + 1) for one in went_on]
            found.append({"went_on": len(went_on), "pause_s": max(pauses, default=None), "first_steps": first})
            print(f"NVRx: {found[-1]}", file=sys.stderr)
        finally:
            for member in members:
                member.signal(signal.SIGKILL)
    return found


def _rows(changes: list[Change]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for kind in dict.fromkeys(change.kind for change in changes):
        mine = [change for change in changes if change.kind == kind]
        pauses = [change.pause_s for change in mine if change.pause_s is not None]
        each = [change.all_s for change in mine if change.all_s is not None]
        rows[kind] = {
            "changes": len(mine), "went_on": len(pauses), "equal": sum(change.equal for change in mine),
            "median_s": round(statistics.median(pauses), 3) if pauses else None,
            "most_s": round(max(pauses), 3) if pauses else None,
            "all_median_s": round(statistics.median(each), 3) if each else None,
            "ended_unasked": sum(one.ended for one in mine),
        }  # fmt: skip
    return rows


def main() -> None:
    """Measure each system in turn and print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchft-python", help="Python of an environment with torchft 0.2; ours only without it")
    parser.add_argument("--nvrx-python", help="the same with nvidia-resiliency-ext 0.4")
    parser.add_argument("--kills", type=int, default=0, help="only kill members, this often")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    step_s, python = options.step_ms / 1000, options.torchft_python
    result: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        for kind in ("ours", "ddp", "pure") if python else ("ours",):
            system = Blocks(top / kind, step_s) if kind == "ours" else Torchft(top / kind, step_s, python, kind)
            changes = measured(system, ("kill",) * options.kills or CYCLE * CYCLES)
            result[system.name] = {"rows": _rows(changes), "all": [asdict(change) for change in changes]}
        if options.nvrx_python:
            killed = restarted_in_place(options.nvrx_python, top / "nvrx", step_s)
            result["NVRx, one of three killed"] = {"rows": killed}
    print(json.dumps({name: one["rows"] for name, one in result.items()}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
