"""The simulated Slurm: what a decision can meet, as real ones do it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.policy.ledger import Resources
from slurm_ones.simulate.slurm.nodes import Nodes, PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.scheduler import QueuedJob, RunningJob, SchedulingPass, place
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.model import JobState
from tests.simulate.harness import Harness

# -- which job starts, and where -------------------------------------------------------------------------------------


RUNS = ""
"""In place of the reason why a job waits."""


@pytest.mark.parametrize(
    ("runs", "queue", "seconds", "fates"),
    [
        pytest.param((4, 3), [(1, 4), (1, 1)], 2, ["Resources", "Priority"], id="first in, first out"),
        pytest.param(
            (4, 3, 1000), [(4, 4, 1000), (1, 1, 5000), (1, 1, 500)], 40, ["Resources", "Priority", RUNS],
            id="backfill starts who has ended when the first could start, and nobody else",
        ),
        pytest.param(
            (4, 3), [(4, 4), (1, 1)], 200, ["Resources", "Priority"],
            id="Slurm plans a job without a limit with a year: it overtakes nobody",
        ),
        pytest.param(
            None, [(9, 4), (1, 4)], 2, ["None", RUNS],
            id="a job that no node could take holds nobody up, for NumNodes=9-9 is accepted of a held job",
        ),
        pytest.param((4, 2), [(1, 4)], 2, ["Resources"], id="eight GPUs in pieces are no node of four"),
        pytest.param((4, 2), [(4, 2)], 2, [RUNS], id="and are enough for who takes pieces"),
    ],
)  # fmt: skip
def test_which_job_starts(
    runs: tuple[int, ...] | None, queue: list[tuple[int, ...]], seconds: float, fates: list[str]
) -> None:
    """Nodes, GPUs of each, and the time limit in seconds, of a job that runs and of those that wait."""
    harness = Harness()
    for nodes, gpus, *limit in (runs,) if runs else ():
        harness.running(nodes, gpus, time_limit_s=float(sum(limit)))
    ids = [harness.submit(nodes, gpus, time_limit_s=float(sum(limit))) for nodes, gpus, *limit in queue]
    harness.wait(seconds)
    assert ["" if (job := harness.job(id_)).running else job.reason for id_ in ids] == fates


def test_gpus_are_taken_where_least_is_left_over() -> None:
    """As the companion expects when it asks whether a shape finds room (`slurm.free.take`)."""
    harness = Harness()
    harness.running(1, 2)
    assert harness.free() == [2, 4, 4, 4]
    harness.running(1, 1)
    assert harness.free() == [1, 4, 4, 4]
    harness.running(1, 2)
    assert harness.free() == [1, 2, 4, 4]


# -- requeue, hold, defer --------------------------------------------------------------------------------------------


def test_a_requeued_job_completes_and_then_waits_out_its_delay() -> None:
    """Its id stays, its GPUs are free when its processes are gone, and it may start 121 s after the requeue."""
    harness = Harness()
    job_id = harness.running(2, 2, stop_s=5.0)
    harness.owner.requeue_hold(job_id)
    job = harness.job(job_id)
    assert (job.pending, job.completing, job.held, job.admin_held, job.restart) == (True, True, True, False, 1)
    assert harness.free() == [2, 2, 4, 4]
    harness.wait(6)
    assert not harness.job(job_id).completing
    assert harness.free() == [4, 4, 4, 4]
    harness.owner.release(job_id, start_now=False)
    harness.wait(110)
    assert harness.job(job_id).pending
    harness.wait(10)
    assert harness.job(job_id).running


def test_a_requeued_job_has_lost_its_place() -> None:
    """Its queue age begins anew, so a job that has waited for its GPUs gets them first."""
    harness = Harness()
    job_id = harness.running(4, 4)
    submitted = harness.job(job_id).submit_time
    waiting = harness.submit(4, 4)
    harness.wait(10)
    harness.owner.requeue_hold(job_id)
    harness.wait(4)
    harness.owner.release(job_id)
    harness.wait(2)
    assert harness.job(waiting).running
    assert harness.job(job_id).pending
    assert harness.job(job_id).submit_time > submitted
    harness.owner.requeue_hold(job_id)
    assert harness.job(job_id).requeue_held


# -- updates ---------------------------------------------------------------------------------------------------------


# -- ends, and nodes -------------------------------------------------------------------------------------------------


def test_a_job_ends_by_itself_or_at_its_limit() -> None:
    harness = Harness()
    done, late = harness.submit(1, 1, runs_s=100.0), harness.submit(1, 1, runs_s=100.0, time_limit_s=50.0)
    harness.wait(110)
    assert (harness.job(done).state, harness.job(late).state) == (JobState.COMPLETED, JobState.TIMEOUT)
    assert harness.job(late).end_time - harness.job(late).start_time == 50.0
    assert harness.free() == [4, 4, 4, 4]


def test_a_requeued_run_has_a_limit_of_its_own() -> None:
    harness = Harness()
    job_id = harness.running(1, 1, time_limit_s=100.0)
    harness.wait(80)
    harness.cluster.requeue(job_id, hold=False)
    harness.wait(160)
    assert harness.job(job_id).running


def test_jobs_of_a_node_that_fails_are_requeued_or_end() -> None:
    """By what their owners said of requeues; and the node takes nothing until it is repaired."""
    harness = Harness(nodes=1)
    again, never = harness.running(1, 2), harness.running(1, 2, requeue=False)
    harness.cluster.fail("n1")
    assert harness.job(never).state is JobState.NODE_FAIL
    assert not harness.owner.snapshot().nodes["n1"].usable
    harness.wait(500)
    assert (harness.job(again).pending, harness.job(again).restart) == (True, 1)
    harness.cluster.resume("n1")
    harness.wait(2)
    assert harness.job(again).running


def test_a_drained_node_keeps_what_runs_and_takes_nothing() -> None:
    harness = Harness(nodes=1)
    job_id = harness.running(1, 2)
    harness.cluster.drain("n1")
    other = harness.submit(1, 1)
    harness.wait(100)
    assert (harness.job(job_id).running, harness.job(other).pending) == (True, True)
    harness.cluster.resume("n1")
    harness.wait(2)
    assert harness.job(other).running


# -- properties ------------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))
deeds = st.lists(
    st.tuples(
        st.sampled_from(["submit", "requeue", "release", "cancel", "hold", "defer", "reshape", "fail", "resume"]),
        st.integers(0, 9),
        shapes,
        st.integers(0, 200),
    ),
    max_size=40,
)


@given(deeds)
def test_no_gpu_is_ever_given_to_two_jobs(deeds: list[tuple[str, int, tuple[int, int], int]]) -> None:
    """Whatever people do and nodes suffer: what nodes hold is what jobs hold, and nothing is held by the ended."""
    harness = Harness()
    for deed, which, (nodes, gpus), seconds in deeds:
        ids = list(harness.owner.snapshot().jobs)
        job_id = ids[which % len(ids)] if ids else 0
        if deed == "submit" or not ids:
            harness.submit(nodes, gpus, runs_s=150.0, time_limit_s=120.0 * (which % 2))
        elif deed in ("fail", "resume"):
            getattr(harness.cluster, deed)(f"n{nodes}")
        else:
            call = {
                "requeue": lambda: harness.owner.requeue_hold(job_id),  # noqa: B023
                "release": lambda: harness.owner.release(job_id),  # noqa: B023
                "cancel": lambda: harness.cluster.cancel(job_id),  # noqa: B023
                "hold": lambda: harness.owner.hold(job_id),  # noqa: B023
                "defer": lambda: harness.owner.defer(job_id, harness.timeline.now + 50),  # noqa: B023
                "reshape": lambda: harness.owner.reshape(job_id, Shape(nodes, gpus)),  # noqa: B023
            }[deed]
            with suppress(SlurmError):
                call()
        harness.wait(seconds)
        seen = harness.owner.snapshot()
        for name, node in seen.nodes.items():
            held = sum(job.gpus.get(name, 0) for job in harness.cluster.jobs.values())
            assert held == node.gpus_used <= 4
        for job in harness.cluster.jobs.values():
            assert not job.gpus or job.running or job.ending
            assert not job.running or len(job.gpus) == job.nodes


@given(
    st.lists(st.tuples(shapes, st.integers(1, 50)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 50)), max_size=6),
)
def test_backfill_never_delays_the_first_job_that_waits(
    queue: list[tuple[tuple[int, int], int]], running: list[tuple[int, int, int]]
) -> None:
    """It starts no later than it would, had nobody overtaken it, as far as time limits say."""
    nodes = Nodes([PartitionSpec("gpu", ("n0", "n1", "n2", "n3"), 4)])
    held = []
    for job_id, (node, gpus, ends) in enumerate(running, 100):
        if nodes.ledger()[f"n{node}"] >= gpus:
            amount = {f"n{node}": Resources(gpus)}
            nodes.take(job_id, amount)
            held.append(RunningJob(float(ends), amount, job_id, "gpu"))
    wishes = [QueuedJob(i, "gpu", n, n, Resources(gpus), float(limit)) for i, ((n, gpus), limit) in enumerate(queue)]
    made = SchedulingPass(nodes, SlurmConf(), held, 0.0)
    made.backfill(wishes)
    chosen = {job.job_id: where for job, where in made.chosen}
    waiting = [wish for wish in wishes if wish.job_id not in chosen]
    if not waiting:
        return
    before = [wish for wish in wishes if wish.job_id < waiting[0].job_id]
    overtaking = [wish for wish in wishes if wish.job_id > waiting[0].job_id and wish.job_id in chosen]
    assert _starts(waiting[0], nodes, held, [*before, *overtaking], chosen) <= _starts(
        waiting[0], nodes, held, before, chosen
    )


def _starts(
    wish: QueuedJob, nodes: Nodes, held: list[RunningJob], others: list[QueuedJob], where: dict[int, tuple[str, ...]]
) -> float:
    """When it finds room beside the others."""
    left, ends = nodes.ledger(), list(held)
    for other in others:
        if other.job_id in where:
            left.spend(where[other.job_id], other.need)
            ends.append(RunningJob(other.limit_s, dict.fromkeys(where[other.job_id], other.need)))
    time = 0.0
    for holding in sorted(ends, key=lambda h: h.ends):
        if place(wish, left) is not None:
            return time
        left.give(holding.held)
        time = holding.ends
    return time
