"""What every client reads of a real cluster."""

from __future__ import annotations

import re

from slurm_ones.slurm.model import JobState, Snapshot
from tests.slurm.sites import OPERATOR, OWNER, STRANGER, Site, until


def test_version_and_config(site: Site) -> None:
    """The release decides what is asked of Slurm, and ClusterName what the database is about."""
    version = site.owner.version()
    assert version == (22, 5) if site.is_old else version >= (25, 11)
    config = site.owner.config()
    assert config["ClusterName"] == site.cluster.name
    assert config["SlurmUser"].startswith("slurm(")


def test_a_snapshot_shows_jobs_and_the_gpus_they_use(site: Site) -> None:
    """The free GPUs of each node are what a schedule is made of."""
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


def test_gpus_of_jobs_in_every_form_are_used(site: Site) -> None:
    """`--gpus` says nothing of nodes, and its GPUs are taken all the same."""
    job = site.owner.job(site.running("--gpus=3", "--nodes=1"))
    assert job.gpus_per_node == 0
    assert site.owner.snapshot().nodes[job.node_list[0]].gpus_used == 3


def test_partitions(site: Site) -> None:
    """Whole nodes are told from GRES, and the default partition is known."""
    partitions = site.owner.snapshot().partitions
    gpu, whole = partitions["gpu"], partitions["whole"]
    assert (gpu.whole_nodes, gpu.default, gpu.up, gpu.max_time_s) == (False, True, True, 86400.0)
    assert (whole.whole_nodes, whole.default, whole.max_nodes) == (True, False, 0)
    assert gpu.node_names == ("n1", "n2", "n3", "n4")
    assert whole.node_names == ("w1", "w2", "w3", "w4")


def test_a_job_on_whole_nodes_leaves_nothing_of_them_idle(site: Site) -> None:
    """Slurm knows of no GPUs there, so idleness is all there is to go by."""
    job = site.owner.job(site.running("--partition=whole", "--nodes=2"))
    nodes = site.owner.snapshot().nodes
    assert {name for name in nodes if name.startswith("w") and not nodes[name].idle} == set(job.node_list)
    assert nodes["w1"].gpus == 0
    assert (job.nodes, job.gpus_per_node, job.gpus_total, job.task_counts) == (2, 0, 0, False)


def test_nodes_in_a_reservation_are_unusable(site: Site) -> None:
    """A job that is resized onto reserved nodes would wait for ever."""
    create = ("scontrol", "create", "reservation", "ReservationName=maint", "StartTime=now", "Duration=10")
    site.cluster.run([*create, "Users=root", "Nodes=n3,n4"], user="root")
    try:
        seen = site.owner.snapshot()
    finally:
        site.cluster.run(["scontrol", "delete", "ReservationName=maint"], user="root")
    (found,) = seen.reservations
    assert (found.name, found.node_names) == ("maint", ("n3", "n4"))
    assert found.end_time - found.start_time == 600
    assert _unusable(seen) == {"n3", "n4"}
    assert _unusable(site.owner.snapshot()) == set()


def test_a_reservation_of_tomorrow_closes_nothing_today(site: Site) -> None:
    """Only an active reservation takes nodes away."""
    create = ("scontrol", "create", "reservation", "ReservationName=later", "StartTime=now+1day", "Duration=10")
    site.cluster.run([*create, "Users=root", "Nodes=n3"], user="root")
    try:
        seen = site.owner.snapshot()
    finally:
        site.cluster.run(["scontrol", "delete", "ReservationName=later"], user="root")
    assert [r.name for r in seen.reservations] == ["later"]
    assert _unusable(seen) == set()


def test_drained_and_down_nodes_are_unusable(site: Site) -> None:
    """No schedule may count on a node that takes no jobs."""
    update = ("scontrol", "update", "NodeName=n4", "Reason=test")
    site.cluster.run([*update, "State=DRAIN"], user="root")
    try:
        assert _unusable(site.owner.snapshot()) == {"n4"}
        site.cluster.run([*update, "State=DOWN"], user="root")
        assert _unusable(site.owner.snapshot()) == {"n4"}
    finally:
        site.cluster.run(["scontrol", "update", "NodeName=n4", "State=RESUME"], user="root")
    until(lambda: _unusable(site.owner.snapshot()) == set(), "n4 to be back")


def _unusable(seen: Snapshot) -> set[str]:
    return {node.name for node in seen.nodes.values() if not node.usable}


def test_everybody_sees_the_same_job(site: Site) -> None:
    """`job` and `snapshot` agree for owner, operator and stranger."""
    job_id = site.held("--nodes=2", "--gres=gpu:2", "--time=90", "--job-name=grüße", "--comment=ones: gpus=1-8")
    job = site.owner.job(job_id)
    for user in (OWNER, STRANGER, OPERATOR):
        assert site.as_(user).job(job_id) == job, user
        assert site.as_(user).snapshot().jobs[job_id] == job, user
    assert (job.user, job.uid, job.name, job.comment) == (OWNER, 2001, "grüße", "ones: gpus=1-8")
    assert (job.partition, job.time_limit_s, job.work_dir) == ("gpu", 5400.0, "/scratch")
    assert (job.batch, job.requeue, job.array, job.restart) == (True, True, False, 0)


def test_what_users_write_cannot_pass_for_a_field(site: Site) -> None:
    """A name or comment in the form of Slurm's own output changes nothing of what is read."""
    name = "x NodeName=n1 State=DOWN\nReservationName=r"
    job_id = site.held("--nodes=1", f"--job-name={name}", "--comment=JobId=1 Restarts=9\x1b[31m")
    seen = site.owner.snapshot()
    job = seen.jobs[job_id]
    assert job.comment == "JobId=1 Restarts=9\x1b[31m"
    assert job.restart == 0
    assert seen.reservations == ()
    assert _unusable(seen) == set()


ENDS = {
    "exit 0": (JobState.COMPLETED, 0),
    "exit 7": (JobState.FAILED, 7),
    "kill -KILL $$": (JobState.FAILED, 137),
}


def test_how_a_job_ended(site: Site) -> None:
    """The exit code is the script's own, in every release's way to write it."""
    ids = {site.submit("--nodes=1", text=f"#!/bin/bash\n{text}\n"): text for text in ENDS}
    for job_id, text in ids.items():
        job = site.wait(job_id, lambda job: job.ended, "ended")
        assert (job.state, job.exit_code) == ENDS[text], text
        assert job.end_time >= job.start_time > 0


def test_arrays_interactive_and_unrequeueable_jobs_are_told(site: Site) -> None:
    """They are refused with words, so they must be recognised."""
    array = site.owner.job(site.held("--array=1-2"))
    assert array.array
    assert not site.owner.job(site.held("--no-requeue")).requeue
    said = site.tell("salloc", "--no-shell", "--nodes=1")
    granted = re.search(r"allocation (\d+)", said)
    assert granted is not None, said
    assert not site.owner.job(site.adopt(int(granted[1]))).batch


def test_task_counts_are_told(site: Site) -> None:
    """Such a job is not resized, so it must be recognised before it is drained."""
    for options in (["--ntasks=4"], ["--ntasks-per-node=1"], ["--nodes=2", "--ntasks-per-node=2"]):
        assert site.owner.job(site.held(*options)).task_counts, options


def test_task_counts_in_the_script_are_told(site: Site) -> None:
    """They need not stand on the command line."""
    text = SCRIPT.format("--ntasks=4")
    assert site.owner.job(site.held(text=text)).task_counts
    assert not site.owner.job(site.held("--nodes=2", "--gres=gpu:1")).task_counts


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH {}\nsleep 300\n"


def test_details_are_those_of_each_job(site: Site) -> None:
    """Several jobs in one call, as each is told alone; one that Slurm does not know is left out."""
    ids = {site.held("--nodes=1", "--gres=gpu:1"), site.held("--nodes=2", "--gres=gpu:2")}
    found = site.owner.details([*ids, 999_999])
    assert found.keys() == ids
    for job_id in ids:
        assert (found[job_id].nodes, found[job_id].task_counts) == (site.owner.job(job_id).nodes, False)
    assert site.owner.details([]) == site.owner.details([999_999]) == {}
