"""Tests that every client must pass for the tasks of a job array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, SlurmClient, UnknownJob
from slurm_ones.slurm.model import JobState, SlurmJob, Task
from slurm_ones.testing.site import CHANGING, ELASTIC, STRANGER, UNTIL_FINISHED, Call, Site, both, shape

BLOCKS = ("--array=0-5%1", *ELASTIC)
APART = "1,2,4,7,11,16,22,29,37,46,56,67,79,92,106,121,137,154,172,191,211,232,254,277,301,326,352,379,407,436"
"""Task numbers at unequal distances, so that Slurm cannot write them as a range."""

TASK_CHANGING: Mapping[str, Call] = {**CHANGING, "defer": lambda client, task: client.defer(task, 2e9)}


def waiting(site: Site, array_id: int) -> dict[int, SlurmJob]:
    """Return an array's pending tasks by task number."""
    return {job.array_tasks[0]: job for job in site.owner.tasks(array_id) if job.pending}


def essence(site: Site, array_id: int) -> list[SlurmJob]:
    """Return an array's tasks for comparison, without the fields that change even if Slurm refuses a change."""
    return [replace(job, job_id=0, reason="", priority=0) for job in site.owner.tasks(array_id)]


def no_throttle(client: SlurmClient) -> Callable[[int], object]:
    return lambda array_id: client.throttle(array_id, 0)


def gone(job: SlurmJob) -> bool:
    return job.ended and not job.completing


class TaskContract:
    """Tests of array tasks. Each test uses the fixture `site`."""

    def test_each_task_is_a_job_of_its_own(self, site: Site) -> None:
        """`tasks` returns each task as a job, although Slurm keeps all pending tasks in one record."""
        array_id = site.blocks(*BLOCKS)
        tasks = site.owner.tasks(array_id)
        assert [job.key for job in tasks] == [Task(array_id, task) for task in range(6)]
        assert {job.throttle for job in tasks} == {1}
        assert [job.running for job in tasks] == [True] + 5 * [False]
        assert [job.pending for job in tasks] == [False] + 5 * [True]
        assert not any(job.held for job in tasks) and {shape(job) for job in tasks} == {Shape(1, 1)}
        for job in tasks:
            found = site.owner.job(job.key)
            assert (found.key, found.state, found.array, found.restart) == (job.key, job.state, True, 0)
            assert (found.array_id, found.array_tasks, found.throttle) == (array_id, job.array_tasks, 1)

    @both
    def test_a_snapshot_has_each_task_once(self, site: Site, user: str) -> None:
        """A snapshot has each task once: the running task, the tasks that wait in one record, and the task that was
        reshaped."""
        array_id = site.blocks(*BLOCKS)
        site.as_(user).hold_waiting(array_id)
        site.as_(user).reshape(Task(array_id, 3), Shape(2, 2))
        jobs = [job for job in site.as_(user).snapshot().jobs.values() if job.array_id == array_id]
        assert sorted(task for job in jobs for task in job.array_tasks) == list(range(6))
        of_task = {task: job for job in jobs for task in job.array_tasks}
        assert of_task[0].running and of_task[0].key == Task(array_id, 0) and len(of_task[0].node_list) == 1
        assert shape(of_task[3]) == Shape(2, 2) and of_task[3].key == Task(array_id, 3)
        for task in (1, 2, 4, 5):
            assert (shape(of_task[task]), of_task[task].held, of_task[task].pending) == (Shape(1, 1), True, True)
        assert all(job.array for job in jobs)

    def test_no_task_of_a_long_list_is_left_out(self, site: Site) -> None:
        """A long list of task numbers is read completely. By default Slurm cuts it after 64 characters."""
        array_id = site.held(f"--array={APART}%1", "--nodes=1")
        wanted = [int(task) for task in APART.split(",")]
        assert [job.array_tasks for job in site.owner.tasks(array_id)] == [(task,) for task in wanted]
        assert list(site.owner.snapshot().jobs[array_id].array_tasks) == wanted

    def test_a_job_that_is_no_array_has_no_tasks(self, site: Site) -> None:
        """A plain job has no tasks, and no task number names it."""
        job_id = site.held("--nodes=1")
        assert site.owner.tasks(job_id) == ()
        job = site.owner.job(job_id)
        assert (job.key, job.array_id, job.array_tasks, job.array) == (job_id, 0, (), False)
        with pytest.raises(UnknownJob):
            site.owner.job(Task(job_id, 0))

    @both
    def test_the_waiting_tasks_are_held_and_what_runs_is_not(self, site: Site, user: str) -> None:
        """`hold_waiting` holds the pending tasks only. Slurm's own hold of the array would hold the running task too.
        Repeating the call changes nothing."""
        array_id = site.blocks(*BLOCKS)
        for _ in range(2):
            site.as_(user).hold_waiting(array_id)
            runs, *others = site.owner.tasks(array_id)
            assert (runs.running, runs.held) == (True, False)
            assert all((job.held, job.admin_held, job.pending) == (True, False, True) for job in others)
            assert len(others) == 5

    def test_of_what_waits_the_named_tasks_alone_are_held(self, site: Site) -> None:
        """`hold_waiting` with task numbers holds those tasks if they are pending, and no other task."""
        array_id = site.blocks(*BLOCKS)
        site.owner.hold_waiting(array_id, (0, 2, 3))
        assert [job.held for job in site.owner.tasks(array_id)] == [False, False, True, True, False, False]

    @both
    def test_blocks_come_and_go_beside_what_runs(self, site: Site, user: str) -> None:
        """While task 0 runs, another task is held, reshaped, released and completes. It then runs again at a third
        shape."""
        client = site.as_(user)
        array_id = site.blocks(*BLOCKS)
        block = Task(array_id, 3)
        client.hold_waiting(array_id)
        client.throttle(array_id, 0)
        assert {job.throttle for job in site.owner.tasks(array_id)} == {0}
        client.reshape(block, Shape(2, 2))
        assert shape(client.job(block)) == Shape(2, 2)
        assert all(shape(job) == Shape(1, 1) for task, job in waiting(site, array_id).items() if task != 3)
        client.release(block)
        job = site.wait(block, lambda job: job.running, "RUNNING")
        assert (job.key, shape(job), len(job.node_list), job.restart) == (block, Shape(2, 2), 2, 0)
        assert site.owner.job(Task(array_id, 0)).running
        assert waiting(site, array_id).keys() == {1, 2, 4, 5}
        assert all(job.held for job in waiting(site, array_id).values())

        assert site.finish(block).state is JobState.COMPLETED
        client.reuse(block)
        job = site.wait(block, lambda job: job.pending and not job.completing, "PENDING again")
        assert (job.key, job.held, job.admin_held, job.restart) == (block, True, False, 1)
        for _ in range(2):  # asking again does no harm
            client.reuse(block)
            client.reshape(block, Shape(1, 3))
        client.release(block)
        job = site.wait(block, lambda job: job.running, "RUNNING again")
        assert (job.key, shape(job), len(job.node_list), job.restart) == (block, Shape(1, 3), 1, 1)
        first = site.owner.job(Task(array_id, 0))
        assert first.running and first.restart == 0

    def test_whole_nodes(self, site: Site) -> None:
        """The shape of a task on whole nodes is its number of nodes, because Slurm does not count GPUs there."""
        array_id = site.blocks("--array=0-2%1", "--nodes=1", "--partition=whole")
        block = Task(array_id, 1)
        site.owner.hold_waiting(array_id)
        site.owner.throttle(array_id, 0)
        for wanted, restart in ((2, 0), (3, 1)):
            site.owner.reshape(block, Shape(wanted, 4))
            site.owner.release(block)
            job = site.wait(block, lambda job: job.running, "RUNNING")
            assert (job.nodes, len(job.node_list), job.restart) == (wanted, wanted, restart)
            if not restart:
                site.finish(block)
                site.owner.reuse(block)
                site.wait(block, lambda job: job.pending and not job.completing, "PENDING again")

    def test_a_throttle_keeps_the_others_waiting_until_it_is_raised(self, site: Site) -> None:
        """A throttle given at submission (`%1`) keeps other tasks pending without a hold, until it is raised."""
        array_id = site.blocks(*BLOCKS)
        site.pass_time(2.5)  # two rounds of the scheduler
        assert waiting(site, array_id).keys() == {1, 2, 3, 4, 5}
        site.owner.throttle(array_id, 2)
        site.wait(Task(array_id, 1), lambda job: job.running, "RUNNING")
        assert waiting(site, array_id).keys() == {2, 3, 4, 5}

    @both
    def test_a_throttle_changes_after_a_task_has_ended(self, site: Site, user: str) -> None:
        """A throttle can be changed after a task has ended, although Slurm then reports an error for that task."""
        array_id = site.blocks(*BLOCKS)
        site.owner.hold_waiting(array_id)
        site.finish(Task(array_id, 0))
        for most in (3, 0):
            site.as_(user).throttle(array_id, most)
            assert {job.throttle for job in waiting(site, array_id).values()} == {most}

    def test_a_block_that_runs_is_requeued_alone(self, site: Site) -> None:
        """A requeue of the running task leaves the other tasks held, so none of them starts in its place."""
        array_id = site.blocks(*BLOCKS)
        block = Task(array_id, 0)
        site.owner.hold_waiting(array_id)
        site.owner.requeue_hold(block)
        job = site.wait(block, lambda job: job.pending and not job.completing, "PENDING")
        assert (job.key, job.held, job.restart, job.requeue_held) == (block, True, 1, True)
        assert waiting(site, array_id).keys() == set(range(6))
        site.owner.release(block)
        assert site.wait(block, lambda job: job.running, "RUNNING again").restart == 1

    def test_a_task_is_deferred_alone(self, site: Site) -> None:
        """`defer` changes the earliest start of one task, and of no other."""
        array_id = site.held(*BLOCKS)
        later = float(int(site.now()) + 1000)
        site.owner.defer(Task(array_id, 2), later)
        times = {job.array_tasks[0]: job.eligible_time for job in site.owner.tasks(array_id)}
        assert times.pop(2) == later and set(times.values()) == {0.0}

    def test_only_what_ended_by_itself_is_used_again(self, site: Site) -> None:
        """`reuse` refuses a running task, which it would kill, and a cancelled task. It does not change a waiting
        task."""
        array_id = site.blocks(*BLOCKS)
        with pytest.raises(Refused):
            site.owner.reuse(Task(array_id, 0))
        assert site.owner.job(Task(array_id, 0)).running
        before = site.owner.job(Task(array_id, 1))
        site.owner.reuse(Task(array_id, 1))
        assert site.owner.job(Task(array_id, 1)) == before
        site.owner.hold_waiting(array_id)
        site.cancel(array_id)
        site.wait(Task(array_id, 0), gone, "cancelled")
        with pytest.raises(Refused):
            site.owner.reuse(Task(array_id, 0))
        assert site.owner.job(Task(array_id, 0)).state is JobState.CANCELLED

    @both
    def test_what_waits_is_cancelled_and_what_runs_goes_on(self, site: Site, user: str) -> None:
        """`cancel_waiting` cancels all pending tasks, also those that were held, reshaped or reused. Running tasks
        continue. Repeating the call changes nothing, even after the array's end."""
        client = site.as_(user)
        array_id = site.blocks(*BLOCKS)
        client.hold_waiting(array_id)
        client.throttle(array_id, 0)
        client.reshape(Task(array_id, 3), Shape(4, 4))
        for task in (1, 2):
            client.release(Task(array_id, task))
            site.wait(Task(array_id, task), lambda job: job.running, "RUNNING")
        site.finish(Task(array_id, 2))
        client.reuse(Task(array_id, 2))
        client.release(Task(array_id, 3), start_now=False)
        for _ in range(2):
            client.cancel_waiting(array_id)
            assert waiting(site, array_id) == {}
            assert [job.array_tasks[0] for job in site.owner.tasks(array_id) if job.running] == [0, 1]
        site.cancel(array_id)
        for task in (0, 1):
            site.wait(Task(array_id, task), gone, "cancelled")
        client.cancel_waiting(array_id)

    def test_tasks_that_wait_together_are_reshaped_at_once(self, site: Site) -> None:
        """A reshape by the array's id changes all pending tasks in their one record, so they keep sharing it."""
        array_id = site.held(*BLOCKS)
        site.owner.reshape(array_id, Shape(2, 2))
        assert {shape(job) for job in site.owner.tasks(array_id)} == {Shape(2, 2)}
        assert len(site.owner.job(array_id).array_tasks) == len(site.owner.tasks(array_id)) > 1
        site.owner.reshape(array_id, Shape(1, 1))
        assert {shape(job) for job in site.owner.tasks(array_id)} == {Shape(1, 1)}
        site.owner.release(array_id, start_now=False)
        assert not any(job.held for job in site.owner.tasks(array_id))

    def test_tasks_of_which_one_runs_are_not_reshaped_at_once(self, site: Site) -> None:
        """A reshape by the array's id is refused while a task runs, because it would change the running task too."""
        array_id = site.blocks("--array=0-3%1", *ELASTIC)
        site.wait(Task(array_id, 0), lambda job: job.running, "RUNNING")
        with pytest.raises(NotResizable):
            site.owner.reshape(array_id, Shape(2, 2))
        assert {shape(job) for job in site.owner.tasks(array_id)} == {Shape(1, 1)}

    def test_a_stranger_changes_nothing_of_an_array(self, site: Site) -> None:
        """Another user can change neither the array nor a task of it, whether the task waits, runs or has ended."""
        array_id = site.blocks("--array=0-3%2", *ELASTIC)
        site.wait(Task(array_id, 1), lambda job: job.running, "RUNNING")
        stranger = site.as_(STRANGER)
        before = essence(site, array_id)
        for call in TASK_CHANGING.values():
            with pytest.raises(NotPermitted):
                call(stranger, Task(array_id, 2))
        # 22.05 tells a stranger that he may not change a throttle, and has done it: tasks that nobody holds start.
        changes = [stranger.hold_waiting, stranger.cancel_waiting]
        for change in changes if site.is_old else [*changes, no_throttle(stranger)]:
            with pytest.raises(NotPermitted):
                change(array_id)
        with pytest.raises(NotPermitted):
            stranger.signal(Task(array_id, 1), "KILL")
        assert essence(site, array_id) == before
        site.owner.hold_waiting(array_id)
        site.finish(Task(array_id, 1))
        with pytest.raises(NotPermitted):
            stranger.reuse(Task(array_id, 1))
        assert site.owner.job(Task(array_id, 1)).state is JobState.COMPLETED

    @pytest.mark.parametrize("known", [True, False])
    def test_a_task_that_never_was(self, site: Site, known: bool) -> None:
        """Every call raises `UnknownJob` for an unknown task, even if its array exists."""
        task = Task(site.held("--array=0-2%1", "--nodes=1", text=UNTIL_FINISHED) if known else 999_999, 77)
        for call in TASK_CHANGING.values():
            with pytest.raises(UnknownJob):
                call(site.owner, task)
        with pytest.raises(UnknownJob):
            site.owner.reuse(task)
        with pytest.raises(UnknownJob):
            site.owner.job(task)

    def test_an_array_that_never_was(self, site: Site) -> None:
        """Calls for an unknown array raise `UnknownJob`, except `cancel_waiting`: nothing waits, so it does nothing."""
        calls: list[Callable[[int], object]] = [site.owner.tasks, site.owner.hold_waiting, no_throttle(site.owner)]
        for call in calls:
            with pytest.raises(UnknownJob):
                call(999_999)
        site.owner.cancel_waiting(999_999)
