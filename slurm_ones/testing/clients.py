"""Tests that every Slurm client must pass (`slurm_ones.slurm.client.SlurmClient`): reads, changes, reshapes and
refusals.

    from slurm_ones.testing import client_contract

    TestMine = client_contract(MySite)

`MySite` is a subclass of `slurm_ones.testing.site.Site`, a cluster for tests. Drained nodes, reservations and all else
that only an admin can set up are not tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, NotPermitted, NotResizable, Refused, UnknownJob
from slurm_ones.slurm.model import JobState, Queue
from slurm_ones.testing.site import CHANGING, ELASTIC, OPERATOR, OWNER, STRANGER, Call, Site, both, shape
from slurm_ones.testing.tasks import TaskContract

TASK_COUNTS = [("--nodes=1", "--ntasks-per-node=1"), ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4")]


class ReshapeContract:
    """Tests of `reshape`, which changes a pending job's nodes and GPUs per node. Each test uses the fixture `site`."""

    @both
    def test_up_and_down_across_nodes(self, site: Site, user: str) -> None:
        """A job of 1 GPU is reshaped to 8 GPUs on 2 nodes, then to 2 GPUs on 1 node, and runs at each shape."""
        client = site.as_(user)
        job_id = site.requeued(*ELASTIC)
        for wanted, requeue in ((Shape(2, 4), True), (Shape(1, 2), False)):
            client.reshape(job_id, wanted)
            assert shape(site.owner.job(job_id)) == wanted
            client.release(job_id)
            job = site.wait(job_id, lambda job: job.running, "RUNNING")
            assert shape(job) == wanted
            assert len(job.node_list) == wanted.nodes
            assert not job.task_counts
            if requeue:
                client.requeue_hold(job_id)
                site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        assert site.owner.job(job_id).restart == 2

    def test_few_switches_are_a_wish(self, site: Site) -> None:
        """A preference for few leaf switches is shown in `details` and can be changed. It does not prevent the job's
        start."""
        job_id = site.held(*ELASTIC)
        for most in (2, 0, 1):
            site.owner.few_switches(job_id, most)
            shown = site.owner.details([job_id])[job_id]
            if site.owner.version() >= SHOWS_SWITCHES:
                assert shown.switches == most and shown.switch_wait_s in (
                    (SWITCH_WAIT_S,) if most else (0.0, SWITCH_WAIT_S)
                )
        site.owner.release(job_id)
        site.wait(job_id, lambda job: job.running, "RUNNING")

    @both
    def test_it_waits_in_another_queue(self, site: Site, user: str) -> None:
        """One call of `reshape` changes shape, partition and time limit. A second call moves the job back to its
        partition."""
        job_id = site.held("--nodes=1", "--time=30")
        client = site.as_(user)
        client.reshape(job_id, Shape(2, 1), queue=Queue("whole", time_limit_s=600.0))
        job = client.job(job_id)
        assert (job.nodes, job.partitions, job.time_limit_s, job.held) == (2, ("whole",), 600.0, True)
        client.reshape(job_id, Shape(1, 1), queue=Queue("gpu"))
        job = client.job(job_id)
        assert (job.nodes, job.partitions, job.time_limit_s) == (1, ("gpu",), 600.0)

    @pytest.mark.parametrize("queue", [Queue("nowhere"), Queue("whole", qos="nothing")])
    def test_a_queue_that_is_not_there_is_refused(self, site: Site, queue: Queue) -> None:
        """A reshape into an unknown partition or QOS is refused and changes nothing."""
        job_id = site.held("--nodes=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, Shape(2, 1), queue=queue)
        assert site.owner.job(job_id) == before

    def test_several_times_while_held(self, site: Site) -> None:
        """A held job can be reshaped several times, and each new shape is read back. (22.05 still shows the last run's
        nodes.)"""
        job_id = site.requeued("--nodes=2", "--gres=gpu:1")
        for wanted in (Shape(4, 4), Shape(3, 1), Shape(1, 4), Shape(2, 1)):
            site.owner.reshape(job_id, wanted)
            assert shape(site.owner.job(job_id)) == wanted
            assert shape(site.owner.snapshot().jobs[job_id]) == wanted

    @both
    def test_fewer_gpus_come_with_fewer_cpus(self, site: Site, user: str) -> None:
        """A job with fewer GPUs gets fewer CPUs. By itself, Slurm 22.05 would keep the number of CPUs of the last
        run."""
        job_id = site.requeued("--nodes=1", "--gres=gpu:4", "--cpus-per-gpu=4")
        site.as_(user).reshape(job_id, Shape(1, 1))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (shape(job), job.cpus) == (Shape(1, 1), 4)

    def test_more_gpus_come_with_more_cpus(self, site: Site) -> None:
        """A job with `--cpus-per-gpu` gets these CPUs for each GPU. By itself, 22.05 would give a node the CPUs of one
        GPU."""
        job_id = site.requeued("--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=2")
        site.owner.reshape(job_id, Shape(2, 4))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (shape(job), job.cpus) == (Shape(2, 4), 16)

    def test_a_job_that_never_ran(self, site: Site) -> None:
        """A pending job can be reshaped before its first start."""
        job_id = site.held("--nodes=1-2", "--gres=gpu:1")
        site.owner.reshape(job_id, Shape(3, 2))
        job = site.owner.job(job_id)
        assert (job.nodes, job.max_nodes, job.gpus_per_node) == (3, 3, 2)

    def test_whole_nodes(self, site: Site) -> None:
        """The shape of a job on whole nodes is its number of nodes, because Slurm counts no GPUs there."""
        job_id = site.requeued("--partition=whole", "--nodes=2")
        site.owner.reshape(job_id, Shape(3, 4))
        assert site.owner.job(job_id).nodes == 3
        site.owner.reshape(job_id, Shape(1, 4))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (job.nodes, len(job.node_list)) == (1, 1)

    def test_the_shape_it_has(self, site: Site) -> None:
        """A reshape to the present shape changes nothing, so a companion can repeat it after a crash."""
        job_id = site.held(*ELASTIC)
        site.owner.reshape(job_id, Shape(1, 1))
        assert shape(site.owner.job(job_id)) == Shape(1, 1)

    def test_a_running_job_is_refused(self, site: Site) -> None:
        """A reshape of a running job is refused. Slurm would shrink the job, and kill its processes on nodes that it
        loses."""
        job_id = site.running("--nodes=2", "--gres=gpu:1")
        for user in (OWNER, OPERATOR):
            with pytest.raises(NotResizable, match="RUNNING"):
                site.as_(user).reshape(job_id, Shape(1, 1))
        job = site.owner.job(job_id)
        assert (job.running, shape(job), len(job.node_list)) == (True, Shape(2, 1), 2)

    @pytest.mark.parametrize("counts", TASK_COUNTS)
    @both
    def test_a_job_with_task_counts_is_refused(self, site: Site, user: str, counts: tuple[str, ...]) -> None:
        """A reshape of a job with `--ntasks-per-node` is refused. Slurm 22.05 would accept it, and then never start the
        job."""
        job_id = site.held(*counts, "--gres=gpu:4", "--cpus-per-gpu=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable, match="task counts"):
            site.as_(user).reshape(job_id, Shape(3 - before.nodes, 2))
        assert site.owner.job(job_id) == before

    def test_task_counts_in_the_script_alone(self, site: Site) -> None:
        """A job whose script has `#SBATCH --ntasks=1` keeps one task in Slurm 26.05, so its reshape is refused. Slurm
        22.05 does not show this option, and adapts the number of tasks to the nodes."""
        text = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1\n#SBATCH --gres=gpu:1\nsleep 300\n"
        job_id = site.held(text=text)
        if site.is_old:
            site.owner.reshape(job_id, Shape(2, 1))
            assert (shape(site.owner.job(job_id)), site.owner.job(job_id).tasks) == (Shape(2, 1), 2)
            return
        with pytest.raises(NotResizable, match="task counts"):
            site.owner.reshape(job_id, Shape(2, 1))
        assert shape(site.owner.job(job_id)) == Shape(1, 1)

    def test_a_job_that_asks_for_gpus_per_job_is_refused(self, site: Site) -> None:
        """A reshape of a job that was submitted with `--gpus` is refused."""
        job_id = site.held("--nodes=1", "--gpus=2")
        with pytest.raises(NotResizable, match="--gpus"):
            site.owner.reshape(job_id, Shape(2, 2))
        assert site.owner.job(job_id).nodes == 1

    @pytest.mark.parametrize("wanted", [Shape(2, 0), Shape(0, 2)])
    def test_a_shape_of_nothing_is_refused(self, site: Site, wanted: Shape) -> None:
        """A shape without nodes or GPUs is refused. Slurm 22.05 would remove the job's GPUs and report no error."""
        job_id = site.held(*ELASTIC)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, wanted)
        assert shape(site.owner.job(job_id)) == Shape(1, 1)


ENDS = {
    "exit 0": (JobState.COMPLETED, 0),
    "exit 7": (JobState.FAILED, 7),
    "kill -KILL $$": (JobState.FAILED, 137),
}


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH {}\nsleep 300\n"


JOB_CHANGING: Mapping[str, Call] = {
    **CHANGING,
    "signal all": lambda client, job: client.signal(job, "KILL", batch=True),
}


def client_contract(make: Callable[[], Site] | None = None) -> type:
    """Return a pytest class with the tests of every client. `make` makes the site of its fixture `site`.

    Without `make`, the caller's tests must define the fixture `site`.
    """
    if make is None:
        return type("ClientTests", (ClientContract,), {})
    made_by = make

    class ClientTests(ClientContract):
        @pytest.fixture(scope="class")
        @classmethod
        def whole_site(cls) -> Iterator[Site]:
            made = made_by()
            yield made
            made.close()

        @pytest.fixture
        def site(self, whole_site: Site) -> Iterator[Site]:
            """Site for one test. Its jobs are cancelled after the test."""
            yield whole_site
            whole_site.clear()

    return ClientTests


class ReadingContract:
    """Tests of a client's reading methods."""

    def test_a_snapshot_shows_jobs_and_the_gpus_they_use(self, site: Site) -> None:
        """A snapshot has the nodes and GPUs of each job, and the used GPUs of each node."""
        two = site.running("--nodes=2", "--gres=gpu:3", "--cpus-per-gpu=1")
        held = site.held("--nodes=1-2", "--gres=gpu:1")
        seen = site.owner.snapshot()
        job = seen.jobs[two]
        assert (job.nodes, job.gpus_per_node) == (2, 3)
        assert job.running
        assert len(job.node_list) == 2
        for name in job.node_list:
            assert (seen.nodes[name].gpus, seen.nodes[name].gpus_used, seen.nodes[name].idle) == (4, 3, False)
        free = set(seen.partitions["gpu"].node_names) - set(job.node_list)
        assert all(seen.nodes[name].gpus_used == 0 and seen.nodes[name].idle for name in free)
        waiting = seen.jobs[held]
        assert (waiting.pending, waiting.held, waiting.admin_held) == (True, True, False)
        assert (waiting.nodes, waiting.max_nodes, waiting.node_list, waiting.start_time) == (1, 2, (), 0.0)

    def test_gpus_of_jobs_in_every_form_are_used(self, site: Site) -> None:
        """GPUs requested by `--gpus` count as used too, although such a job has no number of GPUs per node."""
        job = site.owner.job(site.running("--gpus=3", "--nodes=1"))
        assert job.gpus_per_node == 0
        assert site.owner.snapshot().nodes[job.node_list[0]].gpus_used == 3

    def test_partitions(self, site: Site) -> None:
        """`whole_nodes` is True for a partition whose nodes have no GRES. `default` is True for the default
        partition."""
        partitions = site.owner.snapshot().partitions
        gpu, whole = partitions["gpu"], partitions["whole"]
        assert (gpu.whole_nodes, gpu.default, gpu.up, gpu.max_time_s) == (False, True, True, 86400.0)
        assert (whole.whole_nodes, whole.default, whole.max_nodes) == (True, False, 0)
        assert gpu.node_names == ("n1", "n2", "n3", "n4")
        assert whole.node_names == ("w1", "w2", "w3", "w4")

    def test_a_job_on_whole_nodes_leaves_nothing_of_them_idle(self, site: Site) -> None:
        """Nodes that a job holds whole are not idle. Slurm counts no GPUs on them, so only `idle` shows if they are
        free."""
        job = site.owner.job(site.running("--partition=whole", "--nodes=2"))
        nodes = site.owner.snapshot().nodes
        assert {name for name in nodes if name.startswith("w") and not nodes[name].idle} == set(job.node_list)
        assert nodes["w1"].gpus == 0
        assert (job.nodes, job.gpus_per_node, job.gpus_total, job.task_counts) == (2, 0, 0, False)

    def test_everybody_sees_the_same_job(self, site: Site) -> None:
        """`job` and `snapshot` show the same to the job's owner, to an operator and to another user."""
        job_id = site.held("--nodes=2", "--gres=gpu:2", "--time=90", "--job-name=grüße", "--comment=ones: gpus=1-8")
        job = site.owner.job(job_id)
        for user in (OWNER, STRANGER, OPERATOR):
            assert site.as_(user).job(job_id) == job, user
            assert site.as_(user).snapshot().jobs[job_id] == job, user
        assert (job.user, job.uid, job.name, job.comment) == (OWNER, 2001, "grüße", "ones: gpus=1-8")
        assert (job.partition, job.time_limit_s, job.work_dir) == ("gpu", 5400.0, "/scratch")
        assert (job.batch, job.requeue, job.array, job.restart) == (True, True, False, 0)

    def test_what_users_write_cannot_pass_for_a_field(self, site: Site) -> None:
        """A job name or comment that looks like Slurm's output is not parsed as output."""
        name = "x NodeName=n1 State=DOWN\nReservationName=r"
        job_id = site.held("--nodes=1", f"--job-name={name}", "--comment=JobId=1 Restarts=9\x1b[31m")
        seen = site.owner.snapshot()
        job = seen.jobs[job_id]
        assert job.comment == "JobId=1 Restarts=9\x1b[31m"
        assert job.restart == 0
        assert seen.reservations == ()
        assert all(node.usable for node in seen.nodes.values())

    def test_how_a_job_ended(self, site: Site) -> None:
        """A job's exit code is that of its script, in every release of Slurm."""
        ids = {site.submit("--nodes=1", text=f"#!/bin/bash\n{text}\n"): text for text in ENDS}
        for job_id, text in ids.items():
            job = site.wait(job_id, lambda job: job.ended, "ended")
            assert (job.state, job.exit_code) == ENDS[text], text
            assert job.end_time >= job.start_time > 0

    def test_task_counts_are_shown(self, site: Site) -> None:
        """`--ntasks` and `--ntasks-per-node` are detected. A job with them cannot be resized, and must not be
        drained."""
        for options in (["--ntasks=4"], ["--ntasks-per-node=1"], ["--nodes=2", "--ntasks-per-node=2"]):
            assert site.owner.job(site.held(*options)).task_counts, options

    def test_task_counts_in_the_script_are_shown(self, site: Site) -> None:
        """`#SBATCH --ntasks` in a script is detected too."""
        text = SCRIPT.format("--ntasks=4")
        assert site.owner.job(site.held(text=text)).task_counts
        assert not site.owner.job(site.held("--nodes=2", "--gres=gpu:1")).task_counts

    def test_details_are_those_of_each_job(self, site: Site) -> None:
        """`details` of several jobs agrees with `job` of each. Unknown jobs are left out."""
        ids = {site.held("--nodes=1", "--gres=gpu:1"), site.held("--nodes=2", "--gres=gpu:2")}
        found = site.owner.details([*ids, 999_999])
        assert found.keys() == ids
        for job_id in ids:
            assert (found[job_id].nodes, found[job_id].task_counts) == (site.owner.job(job_id).nodes, False)
        assert site.owner.details([]) == site.owner.details([999_999]) == {}

    def test_it_is_shown_when_slurm_considered_a_job(self, site: Site) -> None:
        """`details` of a job that started shows when Slurm last considered it, which is not before its start."""
        job_id = site.held("--nodes=1", "--gres=gpu:1")
        before = site.owner.details([job_id])[job_id].considered
        site.owner.release(job_id)
        started = site.wait(job_id, lambda job: job.running, "RUNNING").start_time
        assert before <= int(started) <= site.owner.details([job_id])[job_id].considered


class ChangingContract:
    """Tests of a client's changes: submit, requeue with a hold, hold, release, defer."""

    def test_submit_takes_options_and_a_directory(self, site: Site) -> None:
        """A submitted job has sbatch's options and runs in the given directory."""
        options = ["--hold", "--comment=ones: gpus=1-4", "--time=5"]
        script = site.script("#!/bin/bash\ntrue\n")
        job = site.owner.job(site.adopt(site.owner.submit(script, options, directory=Path("/tmp"))))
        assert (job.work_dir, job.comment, job.time_limit_s, job.user) == ("/tmp", "ones: gpus=1-4", 300.0, OWNER)

    def test_submit_says_what_sbatch_had_against_it(self, site: Site) -> None:
        """The error `Refused` has sbatch's own message."""
        with pytest.raises(Refused, match="nowhere"):
            site.owner.submit(site.script("#!/bin/bash\n"), ["--partition=nowhere"])

    @both
    def test_a_requeued_job_is_held_for_its_owner(self, site: Site, user: str) -> None:
        """A requeued job keeps its id, counts one restart and is held. Its owner can release it, even if an operator
        requeued it."""
        job_id = site.running("--nodes=1", "--gres=gpu:1")
        first = site.owner.job(job_id)
        site.as_(user).requeue_hold(job_id)
        job = site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        assert (job.job_id, job.restart, job.held, job.admin_held) == (job_id, first.restart + 1, True, False)
        assert (job.nodes, job.gpus_per_node, job.node_list) == (1, 1, ())
        assert job.requeue_held and site.owner.snapshot().jobs[job_id].requeue_held
        site.as_(user).requeue_hold(job_id)
        assert site.owner.job(job_id).restart == 1
        site.owner.release(job_id)
        again = site.wait(job_id, lambda job: job.running, "RUNNING again")
        assert (again.restart, again.requeue_held) == (1, False)
        assert again.start_time >= first.start_time

    def test_a_requeued_job_is_seen_until_its_processes_are_gone(self, site: Site) -> None:
        """A requeued job is shown as completing until the last run's processes have ended."""
        stubborn = "#!/bin/bash\ntrap 'sleep 3; exit' TERM\nwhile :; do sleep 0.1; done\n"
        job_id = site.running("--nodes=1", "--gres=gpu:4", text=stubborn)
        restart = 0
        while restart < 3:
            restart += 1
            site.started(job_id)
            site.owner.requeue_hold(job_id)
            seen = (site.owner.job(job_id), site.owner.snapshot().jobs[job_id])
            if all(job.completing for job in seen):
                break
            # A look that came late may have seen what comes after it.
            site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
            site.owner.release(job_id)
            site.wait(job_id, lambda job: job.running, "RUNNING again")
        for job in seen:
            assert (job.completing, job.pending, job.held) == (True, True, True)
            assert (job.running, job.ended, job.restart) == (False, False, restart)

    def test_requeueing_a_job_that_has_ended_leaves_it_ended(self, site: Site) -> None:
        """A job that was cancelled just before the requeue stays cancelled."""
        job_id = site.running("--nodes=1")
        site.cancel(job_id)
        site.wait(job_id, lambda job: job.ended, "ended")
        site.owner.requeue_hold(job_id)
        assert site.owner.job(job_id).state is JobState.CANCELLED

    @both
    def test_a_held_job_can_be_released_by_its_owner(self, site: Site, user: str) -> None:
        """A job's owner can release a hold by an operator, because clients always use a user hold."""
        job_id = site.submit("--nodes=1", "--begin=now+1hour")
        site.as_(user).hold(job_id)
        job = site.owner.job(job_id)
        assert (job.held, job.admin_held, job.requeue_held) == (True, False, False)
        assert not site.owner.snapshot().jobs[job_id].requeue_held
        site.owner.release(job_id, start_now=False)
        assert not site.owner.job(job_id).held

    @both
    def test_start_now_skips_the_delay(self, site: Site, user: str) -> None:
        """A released job waits for its begin time. With `start_now` it starts at once."""
        job_id = site.held("--nodes=1", "--begin=now+1hour")
        site.as_(user).release(job_id, start_now=False)
        job = site.owner.job(job_id)
        assert (job.pending, job.held) == (True, False)
        site.owner.hold(job_id)
        site.as_(user).release(job_id, start_now=True)
        site.wait(job_id, lambda job: job.running, "RUNNING")

    def test_a_snapshot_is_of_this_moment(self, site: Site) -> None:
        """A snapshot is not cached: it shows a change that was made just before."""
        job_id = site.held("--nodes=1")
        before = site.now()
        site.owner.release(job_id)
        seen = site.owner.snapshot()
        assert not seen.jobs[job_id].held
        assert before - 1 <= seen.time <= site.now() + 1

    @both
    def test_a_deferred_job_waits_for_its_time_though_there_is_room(self, site: Site, user: str) -> None:
        """A deferred job is not held, and shows its earliest start in whole seconds. It starts then, or at once if that
        is past."""
        job_id = site.held("--nodes=1", "--gres=gpu:1")
        assert site.owner.job(job_id).eligible_time == 0
        later = site.now() + 1000.5
        site.as_(user).defer(job_id, later)
        site.as_(user).release(job_id, start_now=False)
        soon = site.now() + 4.0
        for job in (site.owner.job(job_id), site.owner.snapshot().jobs[job_id]):
            assert (job.pending, job.held, job.eligible_time) == (True, False, math.ceil(later))
        site.as_(user).defer(job_id, soon)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert soon - 1 <= job.start_time

        waiting = site.submit("--nodes=1", "--gres=gpu:1", "--begin=now+1hour")
        site.pass_time(2.5)  # two rounds of the scheduler
        assert site.owner.job(waiting).pending
        site.as_(user).defer(waiting, site.now() - 100.0)
        site.wait(waiting, lambda job: job.running, "RUNNING")

    def test_a_deferral_outlives_a_hold_and_a_reshape(self, site: Site) -> None:
        """A job stays deferred through a hold, a reshape and a release."""
        job_id = site.requeued("--nodes=1", "--gres=gpu:1")
        later = math.ceil(site.now() + 1000)
        site.owner.defer(job_id, later)
        site.owner.release(job_id, start_now=False)
        site.owner.hold(job_id)
        site.owner.reshape(job_id, Shape(2, 2))
        assert site.owner.job(job_id).eligible_time == later
        site.owner.release(job_id, start_now=False)
        job = site.owner.job(job_id)
        assert (job.eligible_time, job.held, job.pending) == (later, False, True)
        site.owner.defer(job_id, 0.0)
        site.wait(job_id, lambda job: job.running, "RUNNING")

    def test_only_the_pending_jobs_of_ones_own_can_be_deferred(self, site: Site) -> None:
        """A running job, an ended job, and another user's job cannot be deferred."""
        job_id = site.running("--nodes=1")
        with pytest.raises(Refused, match="no longer pending"):
            site.owner.defer(job_id, site.now() + 100)
        site.cancel(job_id)
        site.wait(job_id, lambda job: job.ended, "ended")
        with pytest.raises(Refused):
            site.owner.defer(job_id, site.now() + 100)
        with pytest.raises(NotPermitted):
            site.as_(STRANGER).defer(site.held("--nodes=1"), site.now() + 100)


class RefusalContract:
    """Tests of errors: another user's jobs, unknown jobs, and requests that Slurm refuses."""

    def test_a_stranger_changes_nothing_of_a_waiting_job(self, site: Site) -> None:
        """Bob's companion cannot change Alice's waiting job."""
        job_id = site.held("--nodes=1", "--gres=gpu:1")
        before = site.owner.job(job_id)
        for name, call in JOB_CHANGING.items():
            with pytest.raises(NotPermitted):
                call(site.as_(STRANGER), job_id)
            assert site.owner.job(job_id) == before, name

    def test_a_stranger_changes_nothing_of_a_running_job(self, site: Site) -> None:
        """Bob's companion cannot change Alice's running job. A reshape is refused as it would be for Alice."""
        job_id = site.running("--nodes=1", "--gres=gpu:1")
        before = site.owner.job(job_id)
        for name, call in JOB_CHANGING.items():
            with pytest.raises(NotResizable if name == "reshape" else NotPermitted):
                call(site.as_(STRANGER), job_id)
        assert site.owner.job(job_id) == before

    def test_a_job_that_never_was(self, site: Site) -> None:
        """Every call raises `UnknownJob` for a job that does not exist."""
        for call in JOB_CHANGING.values():
            with pytest.raises(UnknownJob):
                call(site.owner, 999_999)
        with pytest.raises(UnknownJob):
            site.owner.job(999_999)

    def test_a_wrong_signal_is_a_plain_error(self, site: Site) -> None:
        """An unknown signal raises `Refused` with Slurm's message."""
        with pytest.raises(Refused, match="FOO") as wrong:
            site.owner.signal(site.held("--nodes=1"), "FOO")
        assert type(wrong.value) is Refused


class ClientContract(ReadingContract, ChangingContract, RefusalContract, ReshapeContract, TaskContract):
    """All tests of clients. Each takes a fixture `site`."""
