"""The contract of all clients, of a job's shape: taken and verified, or refused and as it was."""

from __future__ import annotations

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import SHOWS_SWITCHES, SWITCH_WAIT_S, NotResizable
from slurm_ones.slurm.model import Queue
from slurm_ones.testing.site import ELASTIC, OPERATOR, OWNER, Site, both, shape

TASK_COUNTS = [("--nodes=1", "--ntasks-per-node=1"), ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4")]


class ReshapeContract:
    """Each test takes a fixture `site`."""

    @both
    def test_up_and_down_across_nodes(self, site: Site, user: str) -> None:
        """1 GPU → 8 GPUs on 2 nodes → 1 node with 2, each time running at the new size."""
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
        """Shown as it was asked for, kept from start to start, and taken back; a job of one switch starts at once."""
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
        """Partition and limit in one update with the shape, and back."""
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
        """Nothing of the update stays, whatever Slurm answers."""
        job_id = site.held("--nodes=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, Shape(2, 1), queue=queue)
        assert site.owner.job(job_id) == before

    def test_several_times_while_held(self, site: Site) -> None:
        """Every shape on the way is what Slurm holds: 22.05 goes on showing the nodes of the last run."""
        job_id = site.requeued("--nodes=2", "--gres=gpu:1")
        for wanted in (Shape(4, 4), Shape(3, 1), Shape(1, 4), Shape(2, 1)):
            site.owner.reshape(job_id, wanted)
            assert shape(site.owner.job(job_id)) == wanted
            assert shape(site.owner.snapshot().jobs[job_id]) == wanted

    @both
    def test_fewer_gpus_come_with_fewer_cpus(self, site: Site, user: str) -> None:
        """Or it would hold the CPUs of all of a node: 22.05 keeps the number of the run before."""
        job_id = site.requeued("--nodes=1", "--gres=gpu:4", "--cpus-per-gpu=4")
        site.as_(user).reshape(job_id, Shape(1, 1))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (shape(job), job.cpus) == (Shape(1, 1), 4)

    def test_a_job_that_never_ran(self, site: Site) -> None:
        """A waiting job may get another shape before its first start."""
        job_id = site.held("--nodes=1-2", "--gres=gpu:1")
        site.owner.reshape(job_id, Shape(3, 2))
        job = site.owner.job(job_id)
        assert (job.nodes, job.max_nodes, job.gpus_per_node) == (3, 3, 2)

    def test_whole_nodes(self, site: Site) -> None:
        """A shape is its nodes if Slurm knows of no GPUs."""
        job_id = site.requeued("--partition=whole", "--nodes=2")
        site.owner.reshape(job_id, Shape(3, 4))
        assert site.owner.job(job_id).nodes == 3
        site.owner.reshape(job_id, Shape(1, 4))
        site.owner.release(job_id)
        job = site.wait(job_id, lambda job: job.running, "RUNNING")
        assert (job.nodes, len(job.node_list)) == (1, 1)

    def test_the_shape_it_has(self, site: Site) -> None:
        """Asking again after a crash does no harm."""
        job_id = site.held(*ELASTIC)
        site.owner.reshape(job_id, Shape(1, 1))
        assert shape(site.owner.job(job_id)) == Shape(1, 1)

    def test_a_running_job_is_refused(self, site: Site) -> None:
        """Slurm would shrink it and kill what runs on the nodes it leaves."""
        job_id = site.running("--nodes=2", "--gres=gpu:1")
        for user in (OWNER, OPERATOR):
            with pytest.raises(NotResizable, match="RUNNING"):
                site.as_(user).reshape(job_id, Shape(1, 1))
        job = site.owner.job(job_id)
        assert (job.running, shape(job), len(job.node_list)) == (True, Shape(2, 1), 2)

    @pytest.mark.parametrize("counts", TASK_COUNTS)
    @both
    def test_a_job_with_task_counts_is_refused(self, site: Site, user: str, counts: tuple[str, ...]) -> None:
        """22.05 takes the update and the job ends in BadConstraints; so it is not even tried."""
        job_id = site.held(*counts, "--gres=gpu:4", "--cpus-per-gpu=1")
        before = site.owner.job(job_id)
        with pytest.raises(NotResizable, match="task counts"):
            site.as_(user).reshape(job_id, Shape(3 - before.nodes, 2))
        assert site.owner.job(job_id) == before

    def test_task_counts_in_the_script_alone(self, site: Site) -> None:
        """`#SBATCH --ntasks=1` is seen by nobody on 22.05, where Slurm lets it follow the nodes; 26.05 keeps it."""
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
        """The form of the GPUs is sticky: `--gpus` cannot become a number per node."""
        job_id = site.held("--nodes=1", "--gpus=2")
        with pytest.raises(NotResizable, match="--gpus"):
            site.owner.reshape(job_id, Shape(2, 2))
        assert site.owner.job(job_id).nodes == 1

    @pytest.mark.parametrize("wanted", [Shape(2, 0), Shape(0, 2)])
    def test_a_shape_of_nothing_is_refused(self, site: Site, wanted: Shape) -> None:
        """22.05 would take a job's GPUs away without a word."""
        job_id = site.held(*ELASTIC)
        with pytest.raises(NotResizable):
            site.owner.reshape(job_id, wanted)
        assert shape(site.owner.job(job_id)) == Shape(1, 1)
