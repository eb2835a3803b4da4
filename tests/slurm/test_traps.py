"""What real Slurms do that bit us, each on 26.05 and 22.05: a release that behaves otherwise fails here first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import JobState, Shape
from tests.slurm.sites import STRANGER, Site, until

pytestmark = pytest.mark.cluster
ELASTIC = ("--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1")


def update(slurm: Site, job_id: int, *changes: str, user: str = "alice") -> str:
    """What Slurm says of an update: nothing when it takes it."""
    return slurm.tell("scontrol", "update", f"JobId={job_id}", *changes, user=user)


def seconds(slurm: Site, job_id: int, first: str, second: str) -> float:
    """From one time of the job to another."""
    shown = slurm.show(job_id)
    return (datetime.fromisoformat(shown[second]) - datetime.fromisoformat(shown[first])).total_seconds()


def test_sticky_gpu_form_of_a_job_with_gpus(slurm: Site) -> None:
    """A job submitted with --gpus takes no GPUs per node."""
    job_id = slurm.held("--nodes=1", "--gpus=2")
    assert "Invalid generic resource" in update(slurm, job_id, "NumNodes=2-2", "Gres=gpu:2")
    shown = slurm.show(job_id)
    assert shown["NumNodes"] == "1-1"
    assert "TresPerNode" not in shown


def test_sticky_gpu_form_of_a_job_with_gres(slurm: Site) -> None:
    """A job submitted with --gres takes GPUs per job beside those per node, which helps nobody."""
    job_id = slurm.held(*ELASTIC)
    assert update(slurm, job_id, "TresPerJob=gpu:2") == ""
    shown = slurm.show(job_id)
    assert shown["TresPerJob"] == "gpu:2"
    assert shown["TresPerNode"].endswith("gpu:1")


def test_the_pair_of_node_counts(slurm: Site) -> None:
    """22.05 refuses NumNodes=2 on a job of -N1, whose maximum is 1 too; 26.05 moves both. N-N works on both."""
    job_id = slurm.held(*ELASTIC)
    said = update(slurm, job_id, "NumNodes=2")
    assert "Node count specification invalid" in said if slurm.is_old else said == ""
    assert slurm.show(job_id)["NumNodes"] == ("1-1" if slurm.is_old else "2-2")
    assert update(slurm, job_id, "NumNodes=3-3") == ""
    assert slurm.show(job_id)["NumNodes"] == "3-3"


def test_more_nodes_than_there_are(slurm: Site) -> None:
    """NumNodes=9-9 is taken though 4 exist, and then the job waits for ever: bounds are the search's to keep."""
    job_id = slurm.held(*ELASTIC)
    slurm.owner.reshape(job_id, Shape(9, 1))
    assert slurm.show(job_id)["NumNodes"] == "9-9"
    slurm.owner.release(job_id)
    job = slurm.wait(job_id, lambda job: job.reason not in ("None", "JobHeldUser", "BeginTime"), "a reason")
    assert (job.state, job.reason) == (JobState.PENDING, "PartitionNodeLimit")


def test_more_gpus_than_a_node_has(slurm: Site) -> None:
    """Gres=gpu:9 is taken though a node has 4."""
    job_id = slurm.held(*ELASTIC)
    slurm.owner.reshape(job_id, Shape(1, 9))
    assert slurm.owner.job(job_id).gpus_per_node == 9


def test_tasks_per_node_is_not_the_owners_to_change(slurm: Site) -> None:
    """It is refused, and 26.05 has changed the number of tasks all the same: updates are not atomic."""
    job_id = slurm.held("--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1")
    assert "Update of this parameter is not supported" in update(slurm, job_id, "NtasksPerNode=2")
    assert "Access/permission denied" in update(slurm, job_id, "TasksPerNode=2")
    assert slurm.show(job_id)["NumTasks"] == ("1" if slurm.is_old else "2")


def test_ntasks_per_node_follows_a_larger_shape(slurm: Site) -> None:
    """Slurm takes the nodes and GPUs of such a job and starts it; its task count per node stays what it was."""
    job_id = slurm.held("--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1")
    assert update(slurm, job_id, "NumNodes=2-2", "Gres=gpu:4") == ""
    slurm.owner.release(job_id)
    job = slurm.wait(job_id, lambda job: job.running, "RUNNING")
    assert (job.nodes, job.gpus_per_node, job.tasks) == (2, 4, 2)


def test_ntasks_with_fewer_nodes(slurm: Site) -> None:
    """8 tasks, 4 a node, on half the nodes: BadConstraints for ever on 22.05; 26.05 makes it 4 tasks."""
    job_id = slurm.held("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gres=gpu:4", "--cpus-per-gpu=1")
    assert update(slurm, job_id, "NumNodes=1-1", "Gres=gpu:2") == ""
    slurm.owner.release(job_id)
    if slurm.is_old:
        job = slurm.wait(job_id, lambda job: job.reason == "BadConstraints", "BadConstraints")
        assert (job.pending, job.held) == (True, True)
    else:
        job = slurm.wait(job_id, lambda job: job.running, "RUNNING")
        assert job.tasks == 4


def test_a_bad_gres_stops_the_whole_update(slurm: Site) -> None:
    """The GPUs are checked before the nodes change."""
    job_id = slurm.held(*ELASTIC)
    assert "Invalid generic resource" in update(slurm, job_id, "NumNodes=2-2", "Gres=fpga:1")
    assert slurm.show(job_id)["NumNodes"] == "1-1"


def test_a_running_job_may_shrink_and_not_grow(slurm: Site) -> None:
    """So a resize goes through a requeue, and the client never updates a job that runs."""
    job_id = slurm.running("--nodes=2", "--gres=gpu:1")
    assert "not supported" in update(slurm, job_id, "NumNodes=3")
    assert slurm.owner.job(job_id).nodes == 2
    assert update(slurm, job_id, "NumNodes=1").startswith(("", "To reset"))
    assert slurm.owner.job(job_id).nodes == 1


def test_a_hold_on_a_running_job(slurm: Site) -> None:
    """It sets the priority to 0 and lets the job run: held does not mean waiting."""
    job_id = slurm.running(*ELASTIC)
    slurm.owner.hold(job_id)
    job = slurm.owner.job(job_id)
    assert (job.held, job.running, job.admin_held) == (True, True, False)
    slurm.owner.release(job_id, start_now=False)
    assert not slurm.owner.job(job_id).held


def test_a_requeue_resets_the_queue_age(slurm: Site) -> None:
    """The submit time becomes the time of the requeue, so the JCT is counted from the one first seen."""
    job_id = slurm.running(*ELASTIC)
    first = slurm.owner.job(job_id).submit_time
    until(lambda: _now(slurm) > first, "the next second")
    slurm.owner.requeue_hold(job_id)
    slurm.wait(job_id, lambda job: job.submit_time > first, "a later submit time")


def _now(slurm: Site) -> float:
    return float(slurm.tell("date", "+%s"))


def test_a_requeued_job_waits_for_its_credentials(slurm: Site) -> None:
    """cred_expire + 1 s on 22.05; 26.05 has requeue_delay, which is 0 here. StartTime=now skips it."""
    job_id = slurm.requeued(*ELASTIC)
    delay = seconds(slurm, job_id, "SubmitTime", "EligibleTime")
    assert 5 <= delay <= 7 if slurm.is_old else delay <= 1
    slurm.owner.release(job_id)
    assert seconds(slurm, job_id, "SubmitTime", "EligibleTime") <= 4


def test_a_run_right_after_the_last_one_is_not_refused(slurm: Site) -> None:
    """22.05 fails a run that starts in the second in which the last one was killed: "Job credential revoked"."""
    job_id = slurm.running(*ELASTIC)
    for restart in (1, 2):
        slurm.owner.requeue_hold(job_id)
        slurm.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        slurm.owner.release(job_id)
        job = slurm.wait(job_id, lambda job: job.running or job.ended, "RUNNING again")
        assert (job.state, job.restart) == (JobState.RUNNING, restart)


def test_logs_are_truncated_unless_appended(slurm: Site) -> None:
    """Which is why the templates say --open-mode=append."""
    script = slurm.script("#!/bin/bash\necho run ${SLURM_RESTART_COUNT-unset}\nexec sleep 300\n")
    logs, ids = {}, {}
    for mode in ("truncate", "append"):
        logs[mode] = slurm.cluster.scratch / f"{mode}-{slurm.cluster.site.name}.out"
        options = [f"--output={logs[mode].name}", *(["--open-mode=append"] if mode == "append" else [])]
        ids[mode] = slurm.adopt(slurm.owner.submit(script, options, directory=Path("/scratch")))

    def written() -> dict[str, list[str]]:
        # Slurm adds a line of its own when it requeues.
        text = {mode: log.read_text() for mode, log in logs.items() if log.exists()}
        return {mode: [line for line in lines.splitlines() if line.startswith("run")] for mode, lines in text.items()}

    until(lambda: written() == {mode: ["run unset"] for mode in logs}, "the first runs' lines")
    for job_id in ids.values():
        slurm.owner.requeue_hold(job_id)
    for job_id in ids.values():
        slurm.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        slurm.owner.release(job_id)
    until(lambda: written() == {"truncate": ["run 1"], "append": ["run unset", "run 1"]}, "the second runs' lines")


def test_the_environment_is_frozen_at_submission(slurm: Site) -> None:
    """After a resize the allocation's variables are new and the task counts stale: launching is the wrapper's."""
    log = slurm.cluster.scratch / f"environment-{slurm.cluster.site.name}.out"
    names = "${SLURM_JOB_NUM_NODES} ${SLURM_NTASKS_PER_NODE} ${SLURM_GPUS_ON_NODE} ${SLURM_RESTART_COUNT-0}"
    text = f"#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=1 --gres=gpu:4\necho {names}\nexec sleep 300\n"
    options = ["--hold", f"--output={log.name}"]
    job_id = slurm.adopt(slurm.owner.submit(slurm.script(text), options, directory=Path("/scratch")))
    assert update(slurm, job_id, "NumNodes=2-2", "Gres=gpu:2") == ""
    slurm.owner.release(job_id)
    until(lambda: log.exists() and log.read_text() != "", "the job's line")
    assert log.read_text() == "2 1 2 0\n"


def test_a_completed_job_can_be_requeued(slurm: Site) -> None:
    """The way out of a lost race, for a while (MinJobAge); `requeuehold Incomplete` leaves such a job alone."""
    job_id = slurm.submit("--nodes=1", text="#!/bin/bash\ntrue\n")
    slurm.wait(job_id, lambda job: job.ended, "ended")
    slurm.tell("scontrol", "requeuehold", "Incomplete", str(job_id))
    assert slurm.owner.job(job_id).state is JobState.COMPLETED
    slurm.tell("scontrol", "requeuehold", str(job_id))
    job = slurm.owner.job(job_id)
    assert (job.state, job.held, job.restart) == (JobState.PENDING, True, 1)


def test_a_job_without_requeue_is_not_requeued(slurm: Site) -> None:
    """--no-requeue is refused and the job runs on; its owner may change that at any time."""
    job_id = slurm.running("--no-requeue", *ELASTIC)
    with pytest.raises(Refused, match="requeue"):
        slurm.owner.requeue_hold(job_id)
    assert slurm.owner.job(job_id).running
    assert update(slurm, job_id, "Requeue=1") == ""
    assert slurm.owner.job(job_id).requeue


def test_who_may_write_comments(slurm: Site) -> None:
    """The comment is its owner's to change while the job runs; the admin comment is not."""
    job_id = slurm.running(*ELASTIC)
    assert update(slurm, job_id, "Comment=ones: resize=off") == ""
    assert slurm.owner.job(job_id).comment == "ones: resize=off"
    assert "permission denied" in update(slurm, job_id, "AdminComment=x")
    assert update(slurm, job_id, "Comment=mine", user=STRANGER) != ""
    assert slurm.owner.job(job_id).comment == "ones: resize=off"
