"""What fault runs know besides the companion: who waits for guests too long, whose hold it is, what can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ones_wrapper.protocol import Batch, Checkpoint, Spec, reports_name
from slurm_ones.act.arrays import SURE_S
from slurm_ones.simulate.slurm.nodes import Qos, SlurmConf
from slurm_ones.slurm.model import Task
from tests.faults.faulty_world import FaultyWorld
from tests.faults.files import FaultyFiles
from tests.faults.harm import HarmWatch
from tests.faults.hosts import HostLeadership
from tests.faults.injector import FaultInjector
from tests.faults.kinds import FaultKind
from tests.faults.plan import FaultPlan
from tests.faults.run import FaultRun
from tests.simulate.harness import Harness

GUEST = Qos("guest", 0, mode="cancel", grace_s=30.0)


def found_in(harness: Harness, seconds: int) -> list[str]:
    """What the watch says while time passes."""
    watch = HarmWatch(harness.cluster)
    found = []
    for _ in range(seconds // 5):
        harness.wait(5)
        found += watch.look()
    return found


@pytest.mark.parametrize(
    ("lists", "asked", "harmed"),
    [
        ((), {"nodes": 1, "gpus": 1}, True),
        (("guest",), {"nodes": 1, "gpus": 1}, False),
        # It would not fit beside the others either; it asks for what the cluster has not; it is a guest itself.
        ((), {"nodes": 4, "gpus": 4}, False),
        ((), {"nodes": 5, "gpus": 1}, False),
        ((), {"nodes": 1, "gpus": 1, "qos": "guest"}, False),
        ((), {"nodes": 1, "gpus": 1, "hold": True}, False),
    ],
)
def test_harm_is_seen(lists: tuple[str, ...], asked: dict[str, object], harmed: bool) -> None:
    """`lists` are those whom an ordinary job preempts, and no more than grace time is waited for."""
    harness = Harness(conf=SlurmConf(qos=(Qos("normal", 10, lists), GUEST)))
    harness.running(1, 4)
    harness.running(3, 4, qos="guest", stop_s=20.0)
    harness.submit(**asked)  # type: ignore[arg-type]
    assert bool(found_in(harness, 300)) == harmed


def test_a_run_ends_no_sooner_than_a_job_counts_as_over(tmp_path: Path) -> None:
    """A companion that was away for the job's end may need this long from its first look, if its clock is behind."""
    fault_run = FaultRun(replace(FaultPlan.with_guests(1), jobs=(), companions=1), tmp_path, None)
    fault_run.quiet = True
    tick = mock.Mock(begun=(), **{"observation.elastic": {}, "observation.snapshot.time": 0.0})
    stopped = []
    for seconds in (0.0, SURE_S, 1.0):
        fault_run.world.pass_time(seconds)
        fault_run._ticked(tick)
        stopped.append(fault_run.hosts[0].stopped)
    assert stopped == [False, False, True]


def test_a_run_ends_with_its_last_tick(tmp_path: Path) -> None:
    """If it went on for a companion that sleeps or is paused, none would clear up after a job that ends meanwhile."""
    plan = replace(FaultPlan.with_guests(1), jobs=(), events=(), rates={}, interference=0.0, ticks=1, companions=2)
    fault_run = FaultRun(plan, tmp_path, None)
    with mock.patch.object(HostLeadership, "wait_s", 300.0), mock.patch.object(fault_run, "_check_end") as check_end:
        fault_run.run()
    assert check_end.called
    assert fault_run.world.timeline.now == fault_run.world.observed_at


@pytest.mark.parametrize("holder", ["user", "exit"])
def test_an_owner_lets_go_whoever_holds(tmp_path: Path, holder: str) -> None:
    """Slurm takes the owner's hold over as a block ends with an exit code: letting all go ends that hold as well."""
    plan = FaultPlan.with_guests(1)
    world = FaultyWorld(plan, tmp_path, FaultInjector(plan.seed, {}))
    world.pass_time(max(job.time for job in plan.jobs) + 60.0)
    record = next(one for one in world.cluster.records.known.values() if one.array_tasks and one.pending)
    task = Task(record.main_id, record.array_tasks[0])
    world.block_faults.held.add(task)
    record.held_by = holder
    world.held.add(task.array)
    world.cluster.jobs[task.array].held_by = holder
    assert world.apply(FaultKind.RELEASED, task.array)
    assert not record.held_by and task not in world.block_faults.held


def test_a_line_that_is_cut_short_tells_nobody(tmp_path: Path) -> None:
    """A job that trains on may have said so, unread: its checkpoint is then all that a companion can know."""
    files = FaultyFiles(tmp_path, 1, FaultInjector(1, {}), frozenset(), lambda: 0.0)
    files.open(0, Spec(32, 32, 32, dataset=100, epochs=1))
    drained = Checkpoint("step-000000001", 0, 1, 1, 1, 0.0, order=7)
    for report in (drained, Batch(1, 32, 1.0)):
        files.report(0.0, report)
        files.flush()
        assert files.readable(0) == report
    path = files.directory / reports_name(0)
    path.write_bytes(path.read_bytes()[:-5])
    assert files.readable(0) == drained and files.readable(1) is None
