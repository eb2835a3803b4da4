"""Reshaping believes only what Slurm holds afterwards, against a Slurm that is a dictionary."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.slurm.client import NotPermitted, NotResizable, SlurmError, UnknownJob, Unreachable, reshape
from slurm_ones.slurm.fields import LICENCES
from slurm_ones.slurm.model import JobKey, JobState, Queue, SlurmJob, Task
from tests.slurm.make import job_of

SHAPES = st.builds(Shape, st.integers(1, 8), st.integers(1, 8))


class FakeSlurm:
    """One job, whose updates can be taken in part, refused, or taken and then spoilt."""

    def __init__(self, job: SlurmJob, *, takes: tuple[str, ...] = ("nodes", "gpus"), times: int = 10**9) -> None:
        self.job, self.kinds = job, {job.kind}
        self.takes = takes
        self.faulty_updates = times
        self.refusals: list[SlurmError | None] = []
        self.updates: list[Shape] = []
        self.tasks: list[SlurmJob] = []
        """Of its array, where it is one."""
        self.spoil: dict[str, Any] = {}

    def read(self, job_id: JobKey) -> SlurmJob:
        return self.job

    def update(self, job: SlurmJob, shape: Shape, queue: Queue) -> None:
        assert job.kind in self.kinds, "the type that it was submitted with, or that is asked for"
        self.updates.append(shape)
        refusal = self.refusals.pop(0) if self.refusals else None
        takes = self.takes if len(self.updates) <= self.faulty_updates else ("nodes", "gpus")
        changes: dict[str, Any] = {}
        if "nodes" in takes:
            changes |= {"nodes": shape.nodes, "max_nodes": shape.nodes, "tasks": shape.nodes}
        if "gpus" in takes and self.job.gpus_per_node:
            changes |= {"gpus_per_node": shape.gpus_per_node, "kind": job.kind}
        if "queue" in takes or takes == ("nodes", "gpus"):
            moved = {**queue._asdict(), "partitions": (queue.partition,) if queue.partition else ()}
            moved["licenses"] = LICENCES.text(queue.licenses.removeprefix(NO_LICENSES))
            kept = {"partition"} | ({"licenses"} if not queue.licenses else set())
            changes |= {key: value for key, value in moved.items() if (value or key == "licenses") and key not in kept}
            changes |= {"time_limit_s": 0.0} if queue.time_limit_s == math.inf else {}
        self.job = replace(self.job, **changes)
        if len(self.updates) <= self.faulty_updates:
            self.job = replace(self.job, **self.spoil)
        if refusal is not None:
            raise refusal

    def reshape(self, shape: Shape, kind: str | None = None, queue: Queue = Queue()) -> None:
        self.kinds = {self.job.kind} | ({kind} if kind is not None else set())
        reshape(self.read, lambda array: self.tasks, self.update, self.job.job_id, shape, kind, queue)


@given(SHAPES, SHAPES)
def test_a_whole_update_is_believed(old: Shape, new: Shape) -> None:
    """One update, or none when the job has the shape already."""
    slurm = FakeSlurm(job_of(old))
    slurm.reshape(new)
    assert slurm.job.has_shape(new)
    assert slurm.updates == ([] if old == new else [new])


@given(SHAPES, SHAPES, st.sampled_from(["nodes", "gpus", ""]), st.booleans())
def test_a_part_of_an_update_is_undone(old: Shape, new: Shape, part: str, refused: bool) -> None:
    """Whatever part Slurm took, and whether it said so or not: the new shape is in force whole, or the old one is."""
    slurm = FakeSlurm(job_of(old), takes=(part,), times=1)
    slurm.refusals = [NotResizable("Invalid generic resource") if refused else None]
    try:
        slurm.reshape(new)
    except NotResizable:
        assert slurm.job.has_shape(old)
    else:
        assert slurm.job.has_shape(new)


@pytest.mark.parametrize("lost", ["", "v100"])
def test_a_job_keeps_the_type_of_its_gpus(lost: str) -> None:
    """Slurm holds it after an update, or the job has its old shape and type again."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 2)), kind="a100"), times=1)
    slurm.spoil = {"kind": lost}
    with pytest.raises(NotResizable, match=f"GPUs of {f'type {lost}' if lost else 'any type'}; it has 1x2 again"):
        slurm.reshape(Shape(2, 2))
    # The way back is refused the type as well.
    slurm = FakeSlurm(slurm.job, times=2)
    slurm.spoil = {"kind": lost}
    with pytest.raises(NotResizable, match="did not take 1x2 back"):
        slurm.reshape(Shape(2, 2))


def test_the_type_changes_where_that_is_asked_for() -> None:
    """To another, to any, with and without another shape; taken in part, the job has its own again."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 2)), kind="v100"))
    for kind, gpus in (("a100", 4), ("", 4), ("a100", 4), ("a100", 2)):
        slurm.reshape(Shape(1, gpus), kind)
        assert (slurm.job.kind, slurm.job.gpus_per_node) == (kind, gpus)
    assert len(slurm.updates) == 4
    slurm = FakeSlurm(replace(job_of(Shape(1, 2)), kind="v100"), takes=("nodes",), times=1)
    with pytest.raises(NotResizable, match="GPUs of type v100"):
        slurm.reshape(Shape(1, 2), "a100")
    assert (slurm.job.kind, slurm.job.gpus_per_node) == ("v100", 2)
    for kind in ("a100,v100", "gpu a"):
        with pytest.raises(NotResizable, match="no type of GPU"):
            slurm.reshape(Shape(1, 2), kind)
    whole = FakeSlurm(job_of(Shape(1, 0)))
    with pytest.raises(NotResizable, match="whole nodes"):
        whole.reshape(Shape(2, 0), "a100")
    assert whole.updates == []


GUEST = Queue("scavenge", "guest", "guests", 600.0, NO_LICENSES)


def test_a_job_waits_in_another_queue_by_the_same_update() -> None:
    """Only what changes is sent, and the limit with it: Slurm resets that with the QOS."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 1)), qos="normal", account="lab", licenses=(("matlab", 2),)))
    slurm.reshape(Shape(2, 2), queue=GUEST)
    assert (Queue.of(slurm.job), slurm.updates) == (GUEST, [Shape(2, 2)])
    slurm.reshape(Shape(2, 2), queue=GUEST)
    assert slurm.updates == [Shape(2, 2)]
    assert Queue(qos="normal", time_limit_s=659.0).other_than(slurm.job) == Queue(qos="normal", time_limit_s=600.0)
    assert Queue(qos="normal").other_than(slurm.job) == Queue(qos="normal", time_limit_s=600.0)
    assert Queue(time_limit_s=300.0).other_than(slurm.job) == Queue(time_limit_s=300.0)


@pytest.mark.parametrize("takes", [("nodes", "gpus"), ("queue",)], ids=["and back", "undone"])
def test_a_job_without_a_time_limit_has_none_again(takes: tuple[str, ...]) -> None:
    """A guest's limit, which ends before a reservation, must not kill the base block that its task becomes."""
    own = replace(job_of(Shape(1, 1)), qos="normal", time_limit_s=0.0)
    slurm = FakeSlurm(own, takes=takes, times=1)
    with suppress(NotResizable):
        slurm.reshape(Shape(2, 2), queue=GUEST)
        assert slurm.job.time_limit_s == 600.0
        slurm.reshape(Shape(2, 2), queue=Queue.of(own))
    assert (slurm.job.time_limit_s, slurm.job.qos) == (0.0, "normal")


def test_a_base_block_takes_one_of_several_licences_again() -> None:
    """As a guest it needs none; back home it must not wait for all of which its user asked for any."""
    own = replace(job_of(Shape(1, 1)), qos="normal", licenses=LICENCES.text("matlab:1|octave:2"))
    slurm = FakeSlurm(own)
    slurm.reshape(Shape(1, 1), queue=GUEST)
    assert slurm.job.licenses == ()
    slurm.reshape(Shape(1, 1), queue=Queue.of(own))
    assert Queue.of(slurm.job).licenses == "matlab:1|octave:2" and dict(own.licenses)["octave"] == 2


@pytest.mark.parametrize("takes", [("nodes", "gpus", ""), ("queue",), ()])
@pytest.mark.parametrize("refused", [False, True])
def test_a_queue_that_is_taken_in_part_is_undone(takes: tuple[str, ...], refused: bool) -> None:
    """The shape without the queue would be a base block where a guest was meant, and the other way round."""
    before = replace(job_of(Shape(1, 1)), qos="normal", account="lab", licenses=(("matlab", 2),))
    slurm = FakeSlurm(before, takes=takes, times=1)
    slurm.refusals = [NotResizable("Invalid qos specification") if refused else None]
    with pytest.raises(NotResizable, match="Invalid qos" if refused else "has 1x1 again"):
        slurm.reshape(Shape(2, 2), queue=GUEST)
    assert (slurm.job.has_shape(Shape(1, 1)), Queue.of(slurm.job)) == (True, Queue.of(before))


def test_a_queue_that_slurm_changes_is_named() -> None:
    """Say what it holds in place of what was asked for."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 1)), qos="normal"), times=1)
    slurm.spoil = {"qos": "normal"}
    with pytest.raises(
        NotResizable, match="holds partition gpu, QOS normal, account -, 3600 s, licenses none; it has 1x1 again"
    ):
        slurm.reshape(Shape(1, 1), queue=Queue(qos="guest"))


@pytest.mark.parametrize("error", [NotPermitted("denied"), UnknownJob("gone"), Unreachable("silent")])
def test_a_refusal_that_changed_nothing_is_passed_on(error: SlurmError) -> None:
    """A stranger's attempt ends as NotPermitted, not as a failed rollback. Of a lost job or controller nothing is
    undone blindly: the caller looks again when Slurm answers."""
    slurm = FakeSlurm(job_of(Shape(1, 1)), takes=())
    slurm.refusals = [error]
    with pytest.raises(type(error)):
        slurm.reshape(Shape(2, 2))
    assert slurm.updates == [Shape(2, 2)]


@pytest.mark.parametrize(
    ("takes", "refusals", "spoil", "words"),
    [
        (("nodes",), [None, NotPermitted("denied")], {}, "1x2 could not be put back: denied"),
        # Both updates are taken in part, neither is refused.
        (("nodes", "gpus"), [], {"nodes": 7, "max_nodes": 7}, "did not take 1x2 back"),
    ],
)
def test_a_rollback_that_fails(
    takes: tuple[str, ...], refusals: list[SlurmError | None], spoil: dict[str, Any], words: str
) -> None:
    """Then people must look: the message names the shape that could not be put back."""
    slurm = FakeSlurm(job_of(Shape(1, 2)), takes=takes)
    slurm.refusals, slurm.spoil = list(refusals), spoil
    with pytest.raises(NotResizable, match=words):
        slurm.reshape(Shape(3, 4))


@pytest.mark.parametrize("spoil", [{"reason": "BadConstraints"}, {"tasks": 1}, {"max_nodes": 4}, {"gpus_per_node": 0}])
def test_a_job_that_can_never_start_is_undone(spoil: dict[str, Any]) -> None:
    """Slurm took the update and left a job that waits for ever, or without its GPUs."""
    slurm = FakeSlurm(job_of(Shape(1, 1)), times=1)
    slurm.spoil = spoil
    with pytest.raises(NotResizable, match="has 1x1 again"):
        slurm.reshape(Shape(3, 2))
    assert slurm.updates == [Shape(3, 2), Shape(1, 1)] or spoil == {"gpus_per_node": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": JobState.RUNNING}, "RUNNING"),
        ({"state": JobState.COMPLETED}, "COMPLETED"),
        ({"task_counts": True}, "task counts"),
        ({"gpus_per_node": 0, "gpus_total": 2}, "--gpus"),
        *(({"kind": kinds}, "several types") for kinds in ("a100,v100", ",a100", "a b")),
    ],
)
def test_what_is_not_even_tried(change: dict[str, Any], words: str) -> None:
    """Updates that Slurm may take and that end badly are never sent."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 1)), **change))
    with pytest.raises(NotResizable, match=words):
        slurm.reshape(Shape(2, 2))
    assert slurm.updates == []


def test_whole_nodes_are_their_nodes() -> None:
    """Where Slurm knows of no GPUs, any number per node is right."""
    slurm = FakeSlurm(job_of(Shape(2, 0)))
    slurm.reshape(Shape(3, 4))
    assert (slurm.job.nodes, slurm.job.gpus_per_node) == (3, 0)


def test_several_tasks_of_an_array_change_together_as_long_as_all_wait() -> None:
    """Protects what runs: an update of the array's id would change that too."""
    slurm = FakeSlurm(replace(job_of(Shape(1, 1)), array_id=7, array_tasks=(1, 2)))
    slurm.tasks = [slurm.job, replace(slurm.job, array_tasks=(0,), state=JobState.RUNNING)]
    with pytest.raises(NotResizable, match="not all of its tasks wait"):
        slurm.reshape(Shape(2, 2))
    assert slurm.updates == []
    slurm.tasks = slurm.tasks[:1]
    slurm.reshape(Shape(2, 2))
    assert slurm.updates == [Shape(2, 2)]
    slurm = FakeSlurm(replace(job_of(Shape(1, 1)), array_id=7, array_tasks=(2,)))
    slurm.reshape(Shape(2, 2))
    assert slurm.job.key == Task(7, 2) and slurm.updates == [Shape(2, 2)]


def test_what_slurm_said_of_the_shape_before_is_not_held_against_the_new_one() -> None:
    """A job that waits unheld shows its last reason until Slurm looks again."""
    slurm = FakeSlurm(replace(job_of(Shape(4, 4)), reason="BadConstraints"))
    slurm.reshape(Shape(2, 4))
    assert slurm.updates == [Shape(2, 4)]
