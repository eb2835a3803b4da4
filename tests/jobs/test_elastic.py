"""Which jobs may be resized, and one job out of the tasks of an array: any mix of tasks makes one job."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ones_db import JobRecord
from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_wrapper.protocol import MAX_BLOCKS
from slurm_ones.jobs.elastic import NO_GUESTS, Elastic, Guests, WholeJob, arrays, elastic_job, is_guest, whole_job
from slurm_ones.jobs.observer import job_record
from slurm_ones.slurm.model import ENDED, JobState, Node, Partition, Queue, SlurmJob, Snapshot, Task
from tests.slurm.make import job_of

NODES = {f"n{i}": Node(f"n{i}", "IDLE", True, 4, 0, ("gpu", "whole"), True) for i in range(1, 7)}
PARTITIONS = {
    "gpu": Partition("gpu", True, tuple(NODES), 0.0, 0, False),
    "whole": Partition("whole", True, tuple(NODES), 0.0, 0, True),
}
BARE = {f"w{i}": Node(f"w{i}", "IDLE", True, 0, 0, ("bare",), True) for i in (1, 2)}
"""Of whose GPUs Slurm does not know."""
PARTITIONS["bare"] = Partition("bare", True, tuple(BARE), 0.0, 0, True)
COMMENT = "ones: gpus=1-16 array=blocks"


def task(number: int, *nodes: str, gpus: int = 1, **changes: Any) -> SlurmJob:
    """A task of array 100: it runs on the nodes, or waits in a hold of its owner's where none is named."""
    state = JobState.RUNNING if nodes else JobState.PENDING
    values: dict[str, Any] = {
        "job_id": 100 + number,
        "comment": COMMENT,
        "state": state,
        "held": not nodes,
        "reason": "None" if nodes else "JobHeldUser",
        "restart": 0,
        "node_list": nodes,
        "start_time": 2000.0 + number if nodes else 0.0,
        "array": True,
        "array_id": 100,
        "array_tasks": (number,),
    }
    return job_of(Shape(len(nodes) or 1, gpus), **(values | changes))


def ended(number: int, state: JobState = JobState.COMPLETED, **changes: Any) -> SlurmJob:
    times = {"start_time": 2000.0 + number, "end_time": 3000.0 + number}
    return task(number, state=state, held=False, reason="None", **(times | changes))


def seen(*jobs: SlurmJob, known: JobRecord | None = None, term: int = 0, guests: Guests = NO_GUESTS) -> Elastic:
    """The one job that these tasks make."""
    snapshot = Snapshot(5000.0, {job.job_id: job for job in jobs}, NODES, PARTITIONS)
    ((array, records),) = arrays(jobs).items()
    elastic = elastic_job(whole_job(array, records, known, term, guests), snapshot, {}, None)
    assert elastic is not None and array == 100
    return elastic


def refused(*jobs: SlurmJob, known: JobRecord | None = None) -> str:
    """The code of why they are not resized; empty where they may be."""
    refusal = seen(*jobs, known=known).refusal
    return refusal.code if refusal is not None else ""


def remembered(**changes: Any) -> JobRecord:
    values: dict[str, Any] = {"name": "train", "user": "alice", "submit_time": 1000.0, "elastic": True}
    return JobRecord(100, **(values | {"requested_shape": Shape(1, 1)} | changes))


def test_running_blocks_are_one_job() -> None:
    """Its nodes and GPUs are those of all that run, its id the array's, its restart the term."""
    one = seen(task(0, "n1"), task(1, "n2", "n3", gpus=4), task(2), task(3), term=5)
    assert (one.job.job_id, one.job.restart, one.job.running) == (100, 5, True)
    assert one.holdings == {"n1": 1, "n2": 4, "n3": 4}
    assert (one.shape, one.job.gpus) == (Shape(1, 9), 9)
    assert one.job.node_list == ("n1", "n2", "n3")
    assert (one.job.start_time, one.job.key) == (2000.0, 100)
    assert [job.key for job in one.job.blocks] == [Task(100, number) for number in range(4)]


def test_the_shape_is_exact_where_blocks_are_alike() -> None:
    """Also of two blocks on one node: GPUs of a node add up."""
    assert seen(task(0, "n1", gpus=2), task(1, "n2", gpus=2)).shape == Shape(2, 2)
    assert seen(task(0, "n1", gpus=2), task(1, "n1", gpus=2)).shape == Shape(1, 4)
    both = seen(task(0, "n1", gpus=2), task(1, "n1", "n2", gpus=2))
    assert (both.shape, both.holdings) == (Shape(1, 6), {"n1": 4, "n2": 2})
    assert seen(
        task(0, "n1", gpus=0, partitions=("whole",)), task(1, "n2", gpus=0, partitions=("whole",))
    ).shape == Shape(2, 4)


def test_a_word_that_is_wrong_in_the_comment_takes_no_running_job_apart() -> None:
    wrong = "ones: gpus=many array=blocks"
    elastic = seen(task(0, "n1", comment=wrong), task(1, "n2", comment=wrong), task(2, comment=wrong))
    assert (elastic.job.running, len(elastic.job.blocks)) == (True, 3)
    assert elastic.refusal is not None and elastic.refusal.code == "bad_comment"


def test_waiting_tasks_in_one_record_are_one_job_each() -> None:
    """Slurm keeps those that nothing sets apart together."""
    one = seen(task(0, "n1"), task(0, array_tasks=(1, 2, 3), job_id=100))
    assert [job.array_tasks for job in one.job.blocks] == [(0,), (1,), (2,), (3,)]
    assert [job.key for job in one.job.blocks[1:]] == [Task(100, 1), Task(100, 2), Task(100, 3)]


def test_a_waiting_job_is_as_the_block_that_starts_first() -> None:
    first = task(0, gpus=2, held=False, reason="Resources", throttle=1)
    one = seen(first, task(1), task(2))
    assert (one.job.pending, one.job.held, one.job.key, one.shape) == (True, False, Task(100, 0), Shape(1, 2))
    # Nothing was asked of a task by itself: Slurm has one record, and all change together. Else the others, at the size
    # that was asked for at first, would wait before this one, and for room that it does not need.
    whole = seen(task(0, array_tasks=(0, 1, 2), job_id=100, held=False, reason="Priority", throttle=1))
    assert (whole.job.pending, whole.job.key, len(whole.job.blocks)) == (True, 100, 3)
    held = seen(task(0), task(1))
    assert (held.job.pending, held.job.held, held.job.key) == (True, True, Task(100, 0))


def test_a_block_that_slurm_requeued_keeps_the_job_waiting() -> None:
    again = task(0, restart=1, held=False, reason="BeginTime", flags=frozenset({"REQUEUED"}))
    one = seen(again, task(1), ended(2), term=1)
    assert (one.job.pending, one.job.ended, one.job.key) == (True, False, Task(100, 0))


@pytest.mark.parametrize("state", sorted(ENDED))
def test_the_job_ends_with_its_last_block(state: JobState) -> None:
    """As that one ended. Blocks in a hold do not keep it alive: nobody starts them any more."""
    one = seen(ended(0, JobState.COMPLETED), ended(3, state, exit_code=7), task(1), task(2))
    assert (one.job.ended, one.job.first.state, one.job.first.exit_code) == (True, state, 7)
    assert (one.job.start_time, one.job.end_time, one.holdings) == (2000.0, 3003.0, {})


def test_a_block_that_may_start_keeps_the_job_alive() -> None:
    """Without a companion Slurm starts the next task, which takes the job over."""
    one = seen(ended(0, JobState.FAILED), task(1, held=False, reason="JobArrayTaskLimit", throttle=1))
    assert (one.job.pending, one.job.ended) == (True, False)


def test_an_ended_job_stays_so_once_slurm_forgets_its_blocks() -> None:
    """MinJobAge later held tasks alone are left: they are not a new job."""
    known = remembered(state="FAILED", end_time=3003.0, restart=2)
    one = seen(task(1), task(2), known=known, term=2)
    assert (one.job.ended, one.job.first.state, one.job.end_time) == (True, JobState.FAILED, 3003.0)


def test_an_array_without_a_throttle_is_refused_until_it_was_prepared() -> None:
    """All its blocks start at once. A companion that prepared one lifts the throttle itself: known by held tasks, or
    from the database."""
    running = (task(0, "n1"), task(1, "n2"))
    assert refused(*running) == "blocks_unthrottled"
    assert refused(task(0, "n1"), task(1, held=False, reason="Resources")) == "blocks_unthrottled"
    assert refused(*(replace(job, throttle=2) for job in running)) == ""
    assert refused(*running, task(2)) == ""
    assert refused(*running, known=remembered()) == ""
    assert refused(*running, known=remembered(refusal=Reason("blocks_unthrottled"))) == "blocks_unthrottled"
    assert refused(task(0, "n1")) == ""


def test_blocks_that_the_job_itself_moved_are_its_guests() -> None:
    """A companion that comes later takes such a job over: by its comment, in the queue that this names and no other."""
    comment = f"{COMMENT} guests=partition:whole"
    base, guest = task(0, "n1", comment=comment), task(1, "n2", comment=comment, partitions=("whole",))
    spare = task(2, comment=comment, held=False, reason="BeginTime")
    one = seen(base, guest, spare)
    assert (one.refusal, one.partition, one.shape.gpus) == (None, "gpu", 2)
    assert str(job_record(one, "").requested_shape) == "1x1"
    assert refused(base, replace(guest, partitions=("bare",)), spare, task(3, comment=comment)) == "blocks_differ"
    by_qos = f"{COMMENT} guests=qos:low"
    lent = [replace(job, comment=by_qos, partitions=("gpu",)) for job in (base, replace(guest, qos="low"))]
    assert [is_guest(job, {}) for job in lent] == [False, True]
    # Other words, and a comment that is not understood, name no queue.
    for word in ("guests=on", "guests=off", "guests=partition:", "guests=partition:whole please"):
        assert not is_guest(replace(guest, comment=f"{COMMENT} {word}"), {})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"work_dir": "/elsewhere"}, "blocks_differ"),
        ({"uid": 2002}, "blocks_differ"),
        ({"account": "other"}, "blocks_differ"),
        ({"partitions": ("whole",)}, "blocks_differ"),
        ({"comment": "ones: gpus=1-2 array=blocks"}, "blocks_differ"),
        ({"comment": ""}, "blocks_differ"),
        ({"reason": "Dependency"}, "blocks_depend"),
        ({"reason": "DependencyNeverSatisfied"}, "blocks_depend"),
        ({"task_counts": True}, "task_counts"),
        ({"requeue": False}, "not_requeueable"),
        ({"deadline": 9e9}, ""),
        ({"gpus_per_node": 0}, "gpus_per_job"),
        ({"kind": "a100,v100"}, "several_gpu_types"),
        ({"partitions": ("gpu", "whole")}, ""),
    ],
)
def test_what_cannot_be_blocks_is_refused_by_name(changes: dict[str, Any], code: str) -> None:
    for number in (0, 1):
        waiting = [task(1), task(2)]
        waiting[number] = replace(waiting[number], **changes)
        assert refused(task(0, "n1"), *waiting) == code


def test_a_job_with_a_deadline_of_slurms_is_not_stopped() -> None:
    """Slurm cancels what waits and would end too late; blocks may join and leave as the others train."""
    late = {"deadline": 9e9}
    for changes in (late, {**late, "state": JobState.PENDING}):
        plain = job_of(Shape(1, 1), comment="ones: gpus=1-4", **changes)
        one = elastic_job(WholeJob.of(plain), Snapshot(0.0, {plain.job_id: plain}, NODES, PARTITIONS), {}, None)
        assert one is not None and one.refusal is not None and one.refusal.code == "slurm_deadline"
    assert refused(task(0, "n1", **late), task(1, **late)) == ""
    assert refused(*(task(number, held=False, throttle=1, **late) for number in (0, 1))) == "slurm_deadline"


def test_a_dependency_of_the_whole_array_is_no_hindrance() -> None:
    assert refused(*(task(number, reason="Dependency", held=False, throttle=1) for number in range(3))) == ""


def test_tasks_that_ended_and_differ_are_never_used_again() -> None:
    """Their owner changed the comment since, say; the others are a job as before."""
    one = seen(task(0, "n1"), ended(1, comment="mine"), ended(2), task(3))
    assert one.refusal is None
    assert [job.array_tasks for job in one.job.blocks] == [(0,), (2,), (3,)]


def test_more_tasks_than_a_job_may_have() -> None:
    one = seen(task(0, "n1"), task(1, array_tasks=tuple(range(1, 100_000)), throttle=1))
    assert one.refusal is not None
    assert (one.refusal.code, len(one.job.blocks)) == ("blocks_many", MAX_BLOCKS)


def test_tasks_of_a_sweeps_array_are_jobs_of_their_own() -> None:
    """Each is resized alone; but not the one that has the array's number, which names all of them to Slurm, none that
    waits in one record with others, and none whose place another that waits would take.
    """
    sweep = [replace(task(number, "n1"), comment="ones: gpus=1-4", throttle=0) for number in (1, 2, 3)]
    assert arrays(sweep) == {}
    last = replace(sweep[0], job_id=sweep[0].array_id, array_tasks=(0,))
    wait = replace(last, state=JobState.PENDING, node_list=(), array_tasks=(4, 5))
    throttled = replace(wait, throttle=2)
    for others, codes in (
        ([], [None, None, None]),
        ([last], [None, None, None, "task_named_as_array"]),
        ([wait], [None, None, None, "task_waits"]),
        ([throttled], 3 * ["task_throttled"] + ["task_waits"]),
    ):
        jobs = [*sweep, *others]
        snapshot = Snapshot(0.0, {job.job_id: job for job in jobs}, NODES, PARTITIONS)
        found = [elastic_job(WholeJob.of(job), snapshot, {}, None) for job in jobs]
        assert [one and one.refusal and one.refusal.code for one in found] == codes


def test_the_word_alone_makes_no_blocks() -> None:
    """Of a job that is no array, and of one whose tasks Slurm does not tell."""
    plain = job_of(Shape(1, 1), comment=COMMENT)
    for job, code in ((plain, "blocks_no_array"), (replace(plain, array=True), "job_array")):
        assert arrays([job]) == {}
        elastic = elastic_job(WholeJob.of(job), Snapshot(0.0, {job.job_id: job}, NODES, PARTITIONS), {}, None)
        assert elastic is not None and elastic.refusal is not None
        assert elastic.refusal.code == code


WRONG = ("ones: gpus=many array=blocks", "ones: array=blocks")
NO_BLOCKS = ("", "mine", "ones: gpus=1-4", *WRONG)
COMMENTS = (*[COMMENT] * 4, *NO_BLOCKS)
FLAGS = (frozenset[str](), frozenset({"COMPLETING"}), frozenset({"REQUEUED"}), frozenset({"CONFIGURING"}))


def anything(random_: random.Random) -> list[SlurmJob]:
    """Records of one array in any mix of states, some of them twice, some of several tasks."""
    records = []
    comments = random_.choice((COMMENTS, COMMENTS[:4], NO_BLOCKS))
    for number in range(random_.randint(1, 7)):
        state = random_.choice(list(JobState))
        nodes = random_.sample(sorted(NODES), random_.randint(0, 3)) if state is not JobState.PENDING else []
        several = tuple(random_.sample(range(9), random_.randint(1, 4)))
        records.append(
            task(
                number,
                *nodes,
                gpus=random_.choice((0, 1, 2, 4)),
                state=state,
                flags=random_.choice(FLAGS),
                held=random_.random() < 0.5,
                restart=random_.choice((0, 0, 1, 3)),
                start_time=random_.choice((0.0, 2000.0, 2500.0)),
                end_time=random_.choice((0.0, 3000.0, 3500.0)),
                reason=random_.choice(("None", "Dependency", "JobHeldUser")),
                partitions=random_.choice((("gpu",), ("gpu",), ("whole",), ("gpu", "whole"), ("gone",))),
                comment=random_.choice(comments),
                throttle=random_.choice((0, 1)),
                array_tasks=several if state is JobState.PENDING else (random_.randint(0, 8),),
            )
        )
    return records


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_tasks(seed: int) -> None:
    """It never fails, never counts a GPU twice, and touches no array that did not opt in."""
    random_ = random.Random(seed)
    for _ in range(50):
        records = anything(random_)
        random_.shuffle(records)
        known = random_.choice((None, remembered(state="FAILED", end_time=random_.choice((None, 3000.0)))))
        snapshot = Snapshot(5000.0, {job.job_id: job for job in records}, NODES, PARTITIONS)
        found = {array: whole_job(array, jobs, known, 3) for array, jobs in arrays(records).items()}
        live = [job for job in records if not job.ended] or records
        if not any(job.comment == COMMENT for job in live):
            # One whose comment is wrong in another word is one job, which is left alone.
            for one in found.values():
                elastic = elastic_job(one, snapshot, {}, None)
                assert elastic is None or elastic.refusal is not None
            continue
        for array, one in found.items():
            numbers = [job.array_tasks for job in one.blocks]
            assert numbers == sorted(set(numbers)) and all(len(number) == 1 for number in numbers)
            elastic = elastic_job(one, snapshot, {}, None)
            assert array == 100 and one.job_id == 100 and one.restart == 3
            if elastic is None:
                # The record that opted in was that of a task's earlier start.
                assert all(job.comment != COMMENT for job in one.blocks)
                continue
            assert elastic.job is one
            if elastic.refusal is None:
                assert all(job.comment == COMMENT for job in one.blocks)
            running = [job for job in one.blocks if job.running]
            assert one.running == bool(running)
            held = sum(len(job.node_list) * elastic.shape_of(job).gpus_per_node for job in running)
            assert sum(elastic.holdings.values()) == held
            if running and all(job.nodes == len(job.node_list) for job in running):
                assert elastic.shape.gpus == held
            startable = any(job.pending and not job.held for job in one.blocks)
            assert not (one.ended and (running or startable))


def test_tasks_that_were_cancelled_while_they_waited_say_nothing_of_the_end() -> None:
    """The job's end cancels them, and Slurm gives them a start and an end that come later."""
    trained = ended(0, node_list=("n1",))
    waited = [ended(number, JobState.CANCELLED, start_time=3010.0, end_time=3010.0) for number in (1, 2)]
    assert seen(trained, *waited).job.first.state is JobState.COMPLETED


def test_the_record_of_cancelled_tasks_does_not_pass_for_the_first_one() -> None:
    """Slurm shows what waited behind the throttle as one cancelled record, which may bear the number 0."""
    trained = ended(0, job_id=101, node_list=("n1",))
    waited = ended(0, JobState.CANCELLED, start_time=3010.0, end_time=3010.0)
    assert seen(trained, waited).job.first.state is JobState.COMPLETED


# Plain jobs


def elastic(job: SlurmJob, *, whole_node_gpus: dict[str, int] | None = None, own_uid: int | None = None) -> Elastic:
    """A plain job that opted in."""
    snapshot = Snapshot(0.0, {job.job_id: job}, NODES | BARE, PARTITIONS)
    found = elastic_job(WholeJob.of(job), snapshot, whole_node_gpus or {}, own_uid)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "changes", "gpus", "expected"),
    [
        (Shape(2, 4), {}, {}, (Shape(2, 4), (1, 16), False)),
        (Shape(1, 4), {"comment": "ones: nodes=1-2"}, {}, (Shape(1, 4), (4, 8), False)),
        (
            Shape(2, 0),
            {"partitions": ("bare",), "comment": "ones: nodes=1-2"},
            {"bare": 4},
            (Shape(2, 4), (4, 8), True),
        ),
        # Of several partitions the first counts until Slurm has chosen one.
        (Shape(1, 1), {"partitions": ("gpu", "bare")}, {}, (Shape(1, 1), (1, 16), False)),
    ],
)
def test_a_job_that_may_be_resized(
    shape: Shape, changes: dict[str, Any], gpus: dict[str, int], expected: tuple[Shape, tuple[int, int], bool]
) -> None:
    """What its owner allows in GPUs, whole nodes counted by the partition's or the settings' GPUs."""
    found = elastic(job_of(shape, **changes), whole_node_gpus=gpus)
    assert found.refusal is None
    assert (found.shape, found.gpu_range, found.whole_nodes) == expected


def test_a_job_that_did_not_opt_in_is_not_seen() -> None:
    job = job_of(Shape(1, 1), comment="mine")
    assert elastic_job(WholeJob.of(job), Snapshot(0.0, {job.job_id: job}, NODES, PARTITIONS), {}, None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"comment": "ones: gpus=many"}, ("its comment is not understood", "'gpus=many'", "such as 1-16")),
        ({"array": True}, ("heterogeneous jobs", "submit it as a separate job")),
        ({"batch": False}, ("interactive", "submit it with sbatch")),
        ({"requeue": False}, ("--requeue", "scontrol update JobId=… Requeue=1")),
        ({"task_counts": True}, ("task counts", "leave out --ntasks")),
        ({"gpus_per_node": 0, "gpus_total": 2}, ("per job, not per node", "--nodes and --gres=gpu:N")),
        ({"kind": "a100,v100"}, ("GPUs of several types", "--gres=gpu:TYPE:N")),
        ({"partitions": ("bare",), "gpus_per_node": 0}, ("no GPUs in partition bare", "whole_node_gpus.bare")),
        ({"comment": "ones: gpus=1-4 resize=off"}, ("resize=off", "measured")),
        ({"partitions": ("gone",)}, ("no GPUs in partition gone", "whole_node_gpus.gone")),
    ],
)
def test_a_refusal_says_why_and_what_to_do(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    found = elastic(replace(job_of(Shape(1, 1)), **changes))
    for word in words:
        assert word in str(found.refusal)


def test_another_users_job_is_left_alone_in_user_mode() -> None:
    assert "belongs to alice" in str(elastic(job_of(Shape(1, 1)), own_uid=2002).refusal)
    assert [elastic(job_of(Shape(1, 1)), own_uid=uid).refusal for uid in (2001, None)] == [None, None]


def test_what_a_job_asked_for_if_guests_run_when_it_is_first_seen() -> None:
    base, guest, own = task(0, "n1", gpus=2), task(1, "n2", gpus=4, qos="guest"), task(2, "n2", gpus=2)
    guests = {"gpu": Queue(qos="guest")}
    for jobs, asked in (((base,), "1x2"), ((base, guest), "1x2"), ((base, own), "2x2"), ((guest,), "1x4")):
        assert str(job_record(seen(*jobs, guests=guests), "").requested_shape) == asked
