"""CPU nodes: a real Slurm starts the ranks of a real MPI."""

from __future__ import annotations

import pytest

from ones_wrapper.protocol import Bye, Hello
from slurm_ones.slurm.model import JobState
from tests.cluster import paths
from tests.endtoend.harness import Harness

TEMPLATE = paths.REPOSITORY / "sbatch_templates/mpi.sbatch"
SCRIPT = paths.REPOSITORY / "wrapper/examples/mpi_cpu.py"


@pytest.mark.nightly
@pytest.mark.cluster
def test_mpi_ranks_by_srun_and_by_mpirun(harness: Harness) -> None:
    """Protects the way of CPU nodes: PMI-2 of srun, and Hydra inside an allocation, on one node and on two."""
    ways = ({"ONES_LAUNCHER": "srun", "ONES_MPI": "pmi2"}, {"ONES_LAUNCHER": "mpirun"})
    jobs = {}
    for nodes, way in enumerate(ways, start=1):
        options = ("--partition=whole", f"--nodes={nodes}", "--time=5")
        job_id = harness.submit(
            str(SCRIPT), "--epochs=1", template=TEMPLATE, options=options, ONES_GPUS_PER_NODE="2", **way
        )
        jobs[job_id] = nodes
    for job_id, nodes in jobs.items():
        job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
        assert (job.state, job.exit_code) == (JobState.COMPLETED, 0), harness.log(job_id)
        reports = harness.reports(job_id, 0)
        (hello,) = [report for report in reports if isinstance(report, Hello)]
        assert (hello.nodes, hello.gpus_per_node, hello.world) == (nodes, 2, 2 * nodes)
        assert [report.reason for report in reports if isinstance(report, Bye)] == ["finished"]
