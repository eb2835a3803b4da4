"""Contract of all clients for reshaping a job: the shape is applied and verified, or refused without effect."""

from __future__ import annotations

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, NotResizable
from slurm_ones.slurm.model import Queue
from slurm_ones.testing.site import ELASTIC, OPERATOR, OWNER, Site, both, shape

TASK_COUNTS = [("--nodes=1", "--ntasks-per-node=1"), ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4")]


class ReshapeContract:
    """Contract of reshapes. Each test takes a fixture `site`."""

    @both
    def test_up_and_down_across_nodes(self, site: Site, user: str) -> None:
        """A job goes from 1 GPU to 8 GPUs on 2 nodes to 2 GPUs on 1 node, and runs at each size."""
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
        """A preference for few switches is shown, kept and withdrawn; a job that prefers one switch starts at once."""
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
        """Partition and time limit change in one update with the shape; the partition can be changed back."""
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
        """A reshape into an unknown queue has no effect, whatever Slurm answers."""
        job_id = site.held("--nodes=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, Shape(2, 1), queue=queue)
        assert site.owner.job(job_id) == before

    def test_several_times_while_held(self, site: Site) -> None:
        """Each reshape of a held job is what Slurm holds, although 22.05 still shows the last run's nodes."""
        job_id = site.requeued("--nodes=2", "--gres=gpu:1")
        for wanted in (Shape(4, 4), Shape(3, 1), Shape(1, 4), Shape(2, 1)):
            site.owner.reshape(job_id, wanted)
            assert shape(site.owner.job(job_id)) == wanted
            assert shape(site.owner.snapshot().jobs[job_id]) == wanted

    @both
    def test_fewer_gpus_come_with_fewer_cpus(self, site: Site, user: str) -> None:
        """CPUs shrink with the GPUs; on 22.05 the job would keep its last run's number of CPUs."""
        job_id = site.requeued("--nodes=1", "--gres=gpu:4", "--cpus-per-gpu=4")
        site.as_(user).reshape(job_id, Shape(1, 1))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (shape(job), job.cpus) == (Shape(1, 1), 4)

    def test_more_gpus_come_with_more_cpus(self, site: Site) -> None:
        """Each GPU has the CPUs that were asked for; on 22.05 all GPUs of a node would share those of one."""
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
        """The shape of a whole-node job is its number of nodes, since Slurm knows no GPUs there."""
        job_id = site.requeued("--partition=whole", "--nodes=2")
        site.owner.reshape(job_id, Shape(3, 4))
        assert site.owner.job(job_id).nodes == 3
        site.owner.reshape(job_id, Shape(1, 4))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (job.nodes, len(job.node_list)) == (1, 1)

    def test_the_shape_it_has(self, site: Site) -> None:
        """A reshape to the present shape has no effect, so it can be repeated after a crash."""
        job_id = site.held(*ELASTIC)
        site.owner.reshape(job_id, Shape(1, 1))
        assert shape(site.owner.job(job_id)) == Shape(1, 1)

    def test_a_running_job_is_refused(self, site: Site) -> None:
        """A running job cannot be reshaped: Slurm would shrink it and kill its processes on the released nodes."""
        job_id = site.running("--nodes=2", "--gres=gpu:1")
        for user in (OWNER, OPERATOR):
            with pytest.raises(NotResizable, match="RUNNING"):
                site.as_(user).reshape(job_id, Shape(1, 1))
        job = site.owner.job(job_id)
        assert (job.running, shape(job), len(job.node_list)) == (True, Shape(2, 1), 2)

    @pytest.mark.parametrize("counts", TASK_COUNTS)
    @both
    def test_a_job_with_task_counts_is_refused(self, site: Site, user: str, counts: tuple[str, ...]) -> None:
        """A job with task counts cannot be reshaped: 22.05 accepts the update, and the job ends in BadConstraints."""
        job_id = site.held(*counts, "--gres=gpu:4", "--cpus-per-gpu=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable, match="task counts"):
            site.as_(user).reshape(job_id, Shape(3 - before.nodes, 2))
        assert site.owner.job(job_id) == before

    def test_task_counts_in_the_script_alone(self, site: Site) -> None:
        """`#SBATCH --ntasks=1` in a script is invisible on 22.05, which adapts it to the nodes; 26.05 keeps it and
        refuses."""
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
        """A job with `--gpus` cannot be reshaped to a number of GPUs per node."""
        job_id = site.held("--nodes=1", "--gpus=2")
        with pytest.raises(NotResizable, match="--gpus"):
            site.owner.reshape(job_id, Shape(2, 2))
        assert site.owner.job(job_id).nodes == 1

    @pytest.mark.parametrize("wanted", [Shape(2, 0), Shape(0, 2)])
    def test_a_shape_of_nothing_is_refused(self, site: Site, wanted: Shape) -> None:
        """A shape without nodes or GPUs is refused; 22.05 would silently remove the job's GPUs."""
        job_id = site.held(*ELASTIC)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, wanted)
        assert shape(site.owner.job(job_id)) == Shape(1, 1)
