"""The simulated Slurm: what a decision can meet, as real ones do it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ones.simulate.slurm.scheduler import QueuedJob, RunningJob, backfill, place
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, SlurmError, UnknownJob, Unreachable
from slurm_ones.slurm.model import JobState, Shape
from tests.simulate.desk import Desk

DAY = 86400.0


# -- which job starts, and where -------------------------------------------------------------------------------------


def test_jobs_start_in_their_order_and_the_first_without_room_holds_the_others_up() -> None:
    """The main scheduling is first in, first out."""
    desk = Desk()
    first = desk.running(4, 3)
    large = desk.submit(1, 4)
    small = desk.submit(1, 1)
    desk.wait(2)
    assert desk.job(first).running
    assert desk.job(large).reason == "Resources"
    assert desk.job(small).reason == "Priority"


def test_backfill_starts_what_delays_nobody() -> None:
    """A short job overtakes; one that would still run when the first could start does not."""
    desk = Desk()
    desk.running(4, 3, time_limit_s=1000.0)
    large = desk.submit(4, 4, time_limit_s=1000.0)
    long = desk.submit(1, 1, time_limit_s=5000.0)
    short = desk.submit(1, 1, time_limit_s=500.0)
    desk.wait(40)
    assert [desk.job(id_).running for id_ in (large, long, short)] == [False, False, True]


def test_without_time_limits_nothing_overtakes_onto_reserved_nodes() -> None:
    """Slurm plans with a year, so elastic jobs without limits queue strictly."""
    desk = Desk()
    desk.running(4, 3)
    desk.submit(4, 4)
    small = desk.submit(1, 1)
    desk.wait(200)
    assert desk.job(small).pending


def test_a_job_that_no_node_could_take_holds_nobody_up() -> None:
    """`NumNodes=9-9` is accepted for a held job on four nodes; the others must not starve for it."""
    desk = Desk()
    never_starts = desk.submit(9, 4)
    other = desk.submit(1, 4)
    desk.wait(2)
    assert desk.job(other).running
    assert desk.job(never_starts).pending


def test_gpus_are_taken_where_least_is_left_over() -> None:
    """As the companion expects when it asks whether a shape finds room (`slurm.free.take`)."""
    desk = Desk()
    desk.running(1, 2)
    assert desk.free() == [2, 4, 4, 4]
    desk.running(1, 1)
    assert desk.free() == [1, 4, 4, 4]
    desk.running(1, 2)
    assert desk.free() == [1, 2, 4, 4]


def test_free_gpus_in_pieces_are_not_a_node() -> None:
    """Fragmentation: eight free GPUs, two on each node, take no job of four on one."""
    desk = Desk()
    desk.running(4, 2)
    whole = desk.submit(1, 4)
    desk.wait(2)
    assert desk.job(whole).pending
    desk.cluster.cancel(whole)
    spread = desk.submit(4, 2)
    desk.wait(2)
    assert desk.job(spread).running


def test_whole_nodes() -> None:
    """Slurm knows of no GPUs there, and a job has its nodes to itself."""
    desk = Desk(whole_nodes=True)
    job_id = desk.running(3)
    seen = desk.owner.snapshot()
    assert {name for name in seen.nodes if not seen.nodes[name].idle} == set(desk.job(job_id).node_list)
    assert seen.nodes["n1"].gpus == seen.nodes["n1"].gpus_used == 0
    assert seen.partitions["gpu"].whole_nodes
    other = desk.submit(2)
    desk.wait(5)
    assert desk.job(other).pending
    assert desk.inside(job_id).gpus == {"n1": 4, "n2": 4, "n3": 4}


# -- requeue, hold, defer --------------------------------------------------------------------------------------------


def test_a_requeued_job_completes_and_then_waits_out_its_delay() -> None:
    """Its id stays, its GPUs are free when its processes are gone, and it may start 121 s after the requeue."""
    desk = Desk()
    job_id = desk.running(2, 2, stop_s=5.0)
    desk.owner.requeue_hold(job_id)
    job = desk.job(job_id)
    assert (job.pending, job.completing, job.held, job.admin_held, job.restart) == (True, True, True, False, 1)
    assert desk.free() == [2, 2, 4, 4]
    desk.wait(6)
    assert not desk.job(job_id).completing
    assert desk.free() == [4, 4, 4, 4]
    desk.owner.release(job_id, start_now=False)
    desk.wait(110)
    assert desk.job(job_id).pending
    desk.wait(10)
    assert desk.job(job_id).running


def test_start_now_skips_the_delay() -> None:
    desk = Desk()
    job_id = desk.running(1, 1)
    desk.owner.requeue_hold(job_id)
    desk.wait(4)
    desk.owner.release(job_id)
    desk.wait(2)
    assert desk.job(job_id).running


def test_a_requeued_job_has_lost_its_place() -> None:
    """Its queue age begins anew, so a job that has waited for its GPUs gets them first."""
    desk = Desk()
    job_id = desk.running(4, 4)
    submitted = desk.job(job_id).submit_time
    waiting = desk.submit(4, 4)
    desk.wait(10)
    desk.owner.requeue_hold(job_id)
    desk.wait(4)
    desk.owner.release(job_id)
    desk.wait(2)
    assert desk.job(waiting).running
    assert desk.job(job_id).pending
    assert desk.job(job_id).submit_time > submitted


def test_a_deferred_job_starts_when_its_time_has_come_or_it_is_let_go() -> None:
    """No hold: it ends by itself."""
    desk = Desk()
    deferred, let_go = desk.submit(1, 1, hold=True), desk.submit(1, 1)
    for job_id in (deferred, let_go):
        desk.owner.defer(job_id, desk.timeline.now + 100.5)
        assert desk.job(job_id).eligible_time == 1101.0
    desk.owner.release(deferred, start_now=False)
    desk.wait(50)
    assert (desk.job(deferred).pending, desk.job(let_go).pending) == (True, True)
    assert desk.job(deferred).reason == "BeginTime"
    desk.owner.defer(let_go, desk.timeline.now)
    desk.wait(2)
    assert (desk.job(deferred).pending, desk.job(let_go).running) == (True, True)
    desk.wait(60)
    assert desk.job(deferred).running
    with pytest.raises(Refused):
        desk.owner.defer(deferred, 5000.0)


def test_a_hold_that_reaches_a_running_job_strikes_at_its_next_requeue() -> None:
    desk = Desk()
    job_id = desk.running(1, 1)
    desk.owner.hold(job_id)
    assert (desk.job(job_id).running, desk.job(job_id).held) == (True, True)
    desk.cluster.requeue(job_id, hold=False)
    desk.wait(500)
    assert (desk.job(job_id).pending, desk.job(job_id).held) == (True, True)


def test_an_admins_hold_is_not_the_owners_to_release() -> None:
    desk = Desk()
    job_id = desk.submit(1, 1)
    desk.cluster.hold(job_id, "admin")
    assert desk.job(job_id).admin_held
    with pytest.raises(NotPermitted):
        desk.owner.release(job_id)
    desk.operator.release(job_id)
    desk.wait(2)
    assert desk.job(job_id).running


def test_what_has_ended_is_not_requeued_and_soon_forgotten() -> None:
    """Between the look and the requeue a user may cancel; and MinJobAge later Slurm knows nothing of it."""
    desk = Desk()
    job_id = desk.running(1, 1)
    desk.cluster.cancel(job_id)
    desk.owner.requeue_hold(job_id)
    assert desk.job(job_id).state is JobState.CANCELLED
    desk.wait(301)
    with pytest.raises(UnknownJob):
        desk.owner.job(job_id)
    assert desk.owner.snapshot().jobs == {}


# -- updates ---------------------------------------------------------------------------------------------------------


def test_a_running_job_keeps_its_shape() -> None:
    desk = Desk()
    job_id = desk.running(2, 1)
    with pytest.raises(NotResizable, match="RUNNING"):
        desk.operator.reshape(job_id, Shape(1, 1))
    assert len(desk.job(job_id).node_list) == 2


def test_a_shape_that_slurm_refuses_leaves_the_old_one() -> None:
    desk = Desk(ClusterSettings(refused=1.0))
    job_id = desk.submit(1, 1, hold=True)
    with pytest.raises(NotResizable):
        desk.owner.reshape(job_id, Shape(2, 2))
    assert (desk.job(job_id).nodes, desk.job(job_id).gpus_per_node) == (1, 1)


def test_an_update_that_is_taken_in_part_is_undone_or_said_to_stand() -> None:
    """Slurm's updates are not atomic. Where the way back is not taken whole either, the error says so."""
    seen = set()
    desk = Desk(ClusterSettings(partial=0.5))
    for _ in range(60):
        job_id = desk.submit(1, 1, hold=True)
        try:
            desk.owner.reshape(job_id, Shape(2, 2))
        except NotResizable as error:
            stands = "could not be put back" in str(error) or "did not take" in str(error)
            shape = (desk.job(job_id).nodes, desk.job(job_id).gpus_per_node)
            assert shape == (1, 1)
            seen.add("stands" if stands else "undone")
        else:
            assert (desk.job(job_id).nodes, desk.job(job_id).gpus_per_node) == (2, 2)
            seen.add("taken")
    assert {"undone", "taken"} <= seen


def test_strangers_change_nothing() -> None:
    desk = Desk()
    job_id = desk.submit(1, 1, hold=True)
    before = desk.job(job_id)
    with pytest.raises(NotPermitted):
        desk.stranger.release(job_id)
    with pytest.raises(NotPermitted):
        desk.stranger.reshape(job_id, Shape(2, 2))
    with pytest.raises(NotPermitted):
        desk.stranger.defer(job_id, 5000.0)
    assert desk.job(job_id) == before


def test_a_call_without_an_answer_may_have_taken_effect() -> None:
    """So whoever asked must look before it asks again."""
    desk = Desk(ClusterSettings(unreachable=0.5))
    outcomes = set()
    for _ in range(50):
        job_id = desk.submit(1, 1)
        try:
            desk.owner.hold(job_id)
        except Unreachable:
            outcomes.add(desk.inside(job_id).held_by)
    assert outcomes == {"", "user"}


# -- ends, and nodes -------------------------------------------------------------------------------------------------


def test_a_job_ends_by_itself_or_at_its_limit() -> None:
    desk = Desk()
    done, late = desk.submit(1, 1, runs_s=100.0), desk.submit(1, 1, runs_s=100.0, time_limit_s=50.0)
    desk.wait(110)
    assert (desk.job(done).state, desk.job(late).state) == (JobState.COMPLETED, JobState.TIMEOUT)
    assert desk.job(late).end_time - desk.job(late).start_time == 50.0
    assert desk.free() == [4, 4, 4, 4]


def test_a_requeued_run_has_a_limit_of_its_own() -> None:
    desk = Desk()
    job_id = desk.running(1, 1, time_limit_s=100.0)
    desk.wait(80)
    desk.cluster.requeue(job_id, hold=False)
    desk.wait(160)
    assert desk.job(job_id).running


def test_jobs_of_a_node_that_fails_are_requeued_or_end() -> None:
    """By what their owners said of requeues; and the node takes nothing until it is repaired."""
    desk = Desk(nodes=1)
    again, never = desk.running(1, 2), desk.running(1, 2, requeue=False)
    desk.cluster.fail("n1")
    assert desk.job(never).state is JobState.NODE_FAIL
    assert not desk.owner.snapshot().nodes["n1"].usable
    desk.wait(500)
    assert (desk.job(again).pending, desk.job(again).restart) == (True, 1)
    desk.cluster.resume("n1")
    desk.wait(2)
    assert desk.job(again).running


def test_nodes_fail_as_often_as_they_are_said_to() -> None:
    """Four nodes that fail each tenth day and are down for half an hour."""
    desk = Desk(ClusterSettings(node_mtbf_s=10 * DAY))
    job_id = desk.running(4, 4)
    desk.wait(400 * DAY)
    assert desk.job(job_id).restart == pytest.approx(160, rel=0.25)


def test_a_drained_node_keeps_what_runs_and_takes_nothing() -> None:
    desk = Desk(nodes=1)
    job_id = desk.running(1, 2)
    desk.cluster.drain("n1")
    other = desk.submit(1, 1)
    desk.wait(100)
    assert (desk.job(job_id).running, desk.job(other).pending) == (True, True)
    desk.cluster.resume("n1")
    desk.wait(2)
    assert desk.job(other).running


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


@settings(max_examples=60, deadline=None)
@given(deeds)
def test_no_gpu_is_ever_given_to_two_jobs(deeds: list[tuple[str, int, tuple[int, int], int]]) -> None:
    """Whatever people do and nodes suffer: what nodes hold is what jobs hold, and nothing is held by the ended."""
    desk = Desk()
    for deed, which, (nodes, gpus), seconds in deeds:
        ids = list(desk.owner.snapshot().jobs)
        job_id = ids[which % len(ids)] if ids else 0
        if deed == "submit" or not ids:
            desk.submit(nodes, gpus, runs_s=150.0, time_limit_s=120.0 * (which % 2))
        elif deed in ("fail", "resume"):
            getattr(desk.cluster, deed)(f"n{nodes}")
        else:
            call = {
                "requeue": lambda: desk.owner.requeue_hold(job_id),  # noqa: B023
                "release": lambda: desk.owner.release(job_id),  # noqa: B023
                "cancel": lambda: desk.cluster.cancel(job_id),  # noqa: B023
                "hold": lambda: desk.owner.hold(job_id),  # noqa: B023
                "defer": lambda: desk.owner.defer(job_id, desk.timeline.now + 50),  # noqa: B023
                "reshape": lambda: desk.owner.reshape(job_id, Shape(nodes, gpus)),  # noqa: B023
            }[deed]
            with suppress(SlurmError):
                call()
        desk.wait(seconds)
        seen = desk.owner.snapshot()
        for name, node in seen.nodes.items():
            held = sum(job.gpus.get(name, 0) for job in desk.cluster.jobs.values())
            assert held == node.gpus_used <= 4
        for job in desk.cluster.jobs.values():
            assert not job.gpus or job.running or job.ending
            assert not job.running or len(job.gpus) == job.nodes


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.integers(1, 50)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 50)), max_size=6),
)
def test_backfill_never_delays_the_first_job_that_waits(
    queue: list[tuple[tuple[int, int], int]], running: list[tuple[int, int, int]]
) -> None:
    """It starts no later than it would, had nobody overtaken it, as far as time limits say."""
    whole = {f"n{i}": 4 for i in range(4)}
    free = dict(whole)
    held = []
    for node, gpus, ends in running:
        if free[f"n{node}"] >= gpus:
            free[f"n{node}"] -= gpus
            held.append(RunningJob(float(ends), {f"n{node}": gpus}))
    wishes = [QueuedJob(i, nodes, nodes, gpus, float(limit)) for i, ((nodes, gpus), limit) in enumerate(queue)]
    chosen = dict(backfill(wishes, free, whole, held, 0.0))
    waiting = [wish for wish in wishes if wish.job_id not in chosen]
    if not waiting:
        return
    before = [wish for wish in wishes if wish.job_id < waiting[0].job_id]
    overtaking = [wish for wish in wishes if wish.job_id > waiting[0].job_id and wish.job_id in chosen]
    assert _starts(waiting[0], free, held, [*before, *overtaking], chosen) <= _starts(
        waiting[0], free, held, before, chosen
    )


def _starts(
    wish: QueuedJob,
    free: dict[str, int],
    held: list[RunningJob],
    others: list[QueuedJob],
    where: dict[int, tuple[str, ...]],
) -> float:
    """When it finds room beside the others."""
    left, ends = dict(free), list(held)
    for other in others:
        for name in where[other.job_id]:
            left[name] -= other.gpus
        ends.append(RunningJob(other.limit_s, dict.fromkeys(where[other.job_id], other.gpus)))
    time = 0.0
    for holding in sorted(ends, key=lambda h: h.ends):
        if place(wish, left) is not None:
            return time
        for name, gpus in holding.gpus.items():
            left[name] += gpus
        time = holding.ends
    return time
