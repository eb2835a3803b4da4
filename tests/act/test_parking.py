"""Taking a running job to zero GPUs: the road there, what may stand in its way, and how the job gets going again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ones_wrapper.protocol import ORDERS, decode_order, directory_name
from slurm_ones.act.transitions import Stage, State
from slurm_ones.slurm.client import NotPermitted
from slurm_ones.slurm.model import JobState
from tests.act.world import LEASE_S, OLD, OLD_BATCH, World

Make = Callable[..., World]


def parked(make_world: Make, **options: object) -> World:
    """A world whose job has just been parked."""
    world = make_world(parks=True, **options)
    world.begin()
    for _ in range(100):
        if world.resize.ended is not None:
            return world
        world.tick()
    raise AssertionError(world.states)


def test_a_running_job_is_parked(make_world: Make) -> None:
    """Deferred and only then released: it waits, held by nobody, though all GPUs are free."""
    world = parked(make_world)
    assert world.calls == ["requeue_hold", "defer", "release"] and world.resize.pause_s is None
    order = decode_order((world.job.directory / directory_name(world.job_id) / ORDERS).read_bytes())
    assert order.drain and order.batch is None
    world.slurm.pass_time(300)
    assert (world.job.state, world.job.held_by, world.job.shape) == (JobState.PENDING, "", OLD)
    assert world.deferrals.ours(world.slurm.job(world.job_id))


def test_a_lease_ends_by_itself_when_the_companion_dies(make_world: Make) -> None:
    """Nobody needs to do anything: Slurm starts the job when the lease is over, at its shape and batch."""
    world = parked(make_world)
    parked_at = world.clock()
    for _ in range(200):
        world.slurm.pass_time(10)
    assert world.job.state is JobState.RUNNING
    assert world.job.start_time == pytest.approx(parked_at + LEASE_S, abs=12)
    assert world.job.run is not None and world.job.run.batch == OLD_BATCH


def test_a_parked_job_starts_again_at_another_shape(make_world: Make) -> None:
    """The resize of the waiting job ends its deferral with its release; it is no restart of its own."""
    world = parked(make_world)
    world.parks = False
    running, world.job.runs = world.job.runs, []  # so that `begin` takes it for a waiting job
    world.begin()
    world.job.runs = running
    resize = world.finish()
    assert resize.state == State.DONE and world.job.state is JobState.RUNNING
    assert world.calls[3:] == ["hold", "reshape", "release", "defer"]
    assert world.store.deferrals().get(world.job_id) is None
    assert world.store.histories([world.job_id])[world.job_id].resizes == 1


def test_a_release_that_is_refused_ends_the_deferral_too(make_world: Make) -> None:
    """The job was deferred already: it must not wait for the lease to end."""
    world = make_world(parks=True, settings={"start_now": False, "max_wait_s": 300})
    world.slurm.release_refused = lambda shape: "not now"
    world.begin()
    world.until(Stage(State.RELEASING, True))
    world.slurm.release_refused = lambda shape: ""
    resize = world.finish()
    world.check()
    assert (resize.state, str(resize.outcome)) == ("rolled_back", "it runs at its old shape")
    steps = {step.stage: step.time for step in world.store.resize_steps(resize.id)}
    assert steps["starting_back"] - steps["parking"] < 60


@pytest.mark.parametrize("way", ["resize off", "stop file"])
def test_a_job_that_opts_out_while_it_is_parked_starts_again(make_world: Make, way: str) -> None:
    """Between its requeue and its deferral."""
    world = make_world(parks=True)

    def opt_out() -> None:
        world.stopped = way == "stop file"
        world.slurm.cluster.set_comment(world.job_id, "ones: gpus=1-16" + " resize=off" * (not world.stopped))

    world.at("after journal parking", opt_out)
    resize = world.change()
    world.check()
    assert "defer" not in world.calls and resize.state == State.ROLLED_BACK
    assert world.job.state is JobState.RUNNING


def test_a_job_that_its_owner_releases_first_is_not_parked(make_world: Make) -> None:
    """The owner has the last word, and the resize ends with the job at its old shape."""
    world = make_world(parks=True)

    world.at("after journal parking", lambda: world.slurm.owner_releases(world.job_id))
    resize = world.change()
    world.check()
    assert "defer" not in world.calls and resize.state == State.ROLLED_BACK
    assert "released before it could be parked" in str(world.store.resize_steps(resize.id)[3].detail)


def test_errors_of_the_lease_do_not_reach_the_machine(make_world: Make) -> None:
    """A job that starts just before its deferral is ended is at the shape that was wanted all the same."""
    world = parked(make_world)
    error = NotPermitted("Access/permission denied")

    def refuse(job_id: int, until: float) -> None:
        raise error

    world.slurm.defer = refuse  # type: ignore[method-assign]
    world.deferrals.release(world.slurm.job(world.job_id))
    assert world.store.deferrals().get(world.job_id) is None
