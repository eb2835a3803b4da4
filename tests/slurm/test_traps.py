"""What real Slurms do that bit us, each on 26.05 and 22.05: a release that behaves otherwise fails here first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from ones_db.shape import Shape
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import JobState, Task
from tests.slurm.sites import STRANGER, Site, until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
ELASTIC = ("--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1")


def update(slurm: Site, job_id: int | str, *changes: str, user: str = "alice") -> str:
    """What Slurm says of an update: nothing when it takes it."""
    return slurm.tell("scontrol", "update", f"JobId={job_id}", *changes, user=user)


def seconds(slurm: Site, job_id: int, first: str, second: str) -> float:
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
    # Two seconds on at most, counted from now: how long the requeue took is the machine's.
    eligible, now = slurm.show(job_id)["EligibleTime"], slurm.tell("date", "+%Y-%m-%dT%H:%M:%S")
    assert (datetime.fromisoformat(eligible) - datetime.fromisoformat(now)).total_seconds() <= 3


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


ARRAY = ("--array=0-3%1", *ELASTIC)


def test_squeue_shows_tasks_of_different_shapes_as_one_job(slurm: Site) -> None:
    """Of the first one's shape, with all their reasons, whatever each asks for and whoever holds it; with --array
    each is told. So the queue is read with it."""
    array_id = slurm.held(*ARRAY)
    assert update(slurm, f"{array_id}_2", "NumNodes=2-2", "Gres=gpu:2") == ""
    shown = ("squeue", "--noheader", f"--jobs={array_id}", "--Format=ArrayTaskID:|,NumNodes:|,tres-per-node")
    (together,) = slurm.tell(*shown).splitlines()
    assert together.split("|")[:2] == ["0-3", "1"]
    rows = sorted(line.split("|")[:2] for line in slurm.tell(*shown, "--array").splitlines())
    assert rows == [["0", "1"], ["1", "1"], ["2", "2"], ["3", "1"]]


def test_a_hold_of_an_array_holds_what_runs_too(slurm: Site) -> None:
    """The running task would not come back after a requeue; a list of tasks in one command spares it."""
    array_id = slurm.blocks(*ARRAY)
    assert slurm.tell("scontrol", "uhold", str(array_id)) == ""
    assert all(job.held for job in slurm.owner.tasks(array_id))
    assert slurm.owner.job(Task(array_id, 0)).running


def test_a_hold_of_some_tasks_is_refused_as_a_whole_though_done(slurm: Site) -> None:
    """One task that is not there makes the command fail, and the others are held."""
    array_id = slurm.blocks(*ARRAY)
    said = slurm.tell("scontrol", "uhold", f"{array_id}_[2,77]")
    assert "Invalid job id" in said and "No error" in said
    held = {job.array_tasks[0] for job in slurm.owner.tasks(array_id) if job.held}
    assert held == {2}


def test_a_task_that_is_changed_gets_an_id_of_its_own(slurm: Site) -> None:
    """Also by an update that is refused: a task is known by its number, not by an id."""
    array_id = slurm.held(*ARRAY)
    before = slurm.owner.job(Task(array_id, 1)).job_id
    assert update(slurm, f"{array_id}_1", "NumNodes=2-2", user=STRANGER) != ""
    after = slurm.owner.job(Task(array_id, 1)).job_id
    assert (before, after == before) == (array_id, False)


def test_a_throttle_by_task_changes_nothing(slurm: Site) -> None:
    """26.05 refuses it, 22.05 says nothing. It is the array's, and shown by each of its tasks."""
    array_id = slurm.held(*ARRAY)
    said = update(slurm, f"{array_id}_1", "ArrayTaskThrottle=2")
    assert said == "" if slurm.is_old else "not supported" in said
    assert {job.throttle for job in slurm.owner.tasks(array_id)} == {1}
    assert update(slurm, array_id, "ArrayTaskThrottle=2") == ""
    assert {job.throttle for job in slurm.owner.tasks(array_id)} == {2}


def test_who_may_change_a_throttle(slurm: Site) -> None:
    """22.05 tells a stranger that he may not, and has done it: nobody's throttle is safe there, holds are."""
    array_id = slurm.held(*ARRAY)
    assert "Invalid user id" in update(slurm, array_id, "ArrayTaskThrottle=0", user=STRANGER)
    assert {job.throttle for job in slurm.owner.tasks(array_id)} == ({0} if slurm.is_old else {1})


def test_a_signal_to_a_task_of_which_others_wait(slurm: Site) -> None:
    """It arrives, and scancel takes it for refused: it sends it again after seconds, and again, for minutes. Without
    others that wait it returns at once; SIGKILL does in any case."""
    heard = slurm.cluster.scratch / f"heard-task-{slurm.cluster.site.name}"
    text = f"#!/bin/bash\ntrap 'echo heard >> /scratch/{heard.name}' USR1\nwhile :; do sleep 0.1; done\n"
    array_id = slurm.submit(*ARRAY, text=text)
    slurm.wait(Task(array_id, 0), lambda job: job.running, "RUNNING")
    slurm.started(Task(array_id, 0))
    command = ("timeout", "3", "scancel", "--verbose", "--signal=USR1", "--batch", f"{array_id}_0")
    assert "Job is in transitional state, retrying" in slurm.tell(*command)
    until(lambda: heard.exists() and heard.read_text() == "heard\n", "the signal")
    began = slurm.now()
    slurm.owner.signal(Task(array_id, 0), "USR1", batch=True)
    assert slurm.now() - began < 20  # scancel itself would send it for minutes
    until(lambda: heard.read_text() == "heard\nheard\n", "the client's signal")
    slurm.owner.signal(array_id, "USR1", batch=True)
    until(lambda: heard.read_text() == 3 * "heard\n", "the signal to what runs of the array")
    slurm.owner.cancel_waiting(array_id)
    assert "retrying" not in slurm.tell(*command)


def test_an_array_that_ended_can_be_told_nothing(slurm: Site) -> None:
    """scancel says that it is not there, though squeue shows it."""
    array_id = slurm.blocks(*ARRAY)
    slurm.cancel(array_id)
    slurm.wait(Task(array_id, 0), lambda job: job.ended and not job.completing, "ended")
    assert "Invalid job id" in slurm.tell("scancel", "--state=PENDING", str(array_id))


def test_a_task_that_waits_and_is_requeued(slurm: Site) -> None:
    """It is refused in words of its own, so that a block that is used again is looked at first."""
    array_id = slurm.held(*ARRAY)
    assert "Job is pending execution" in slurm.tell("scontrol", "requeuehold", f"{array_id}_1")
    assert slurm.owner.job(Task(array_id, 1)).restart == 0


def test_a_block_ends_and_the_next_task_starts_unless_it_is_held(slurm: Site) -> None:
    """A throttle alone has the next task start when one has ended; held ones stay."""
    array_id = slurm.blocks(*ARRAY)
    slurm.finish(Task(array_id, 0))
    slurm.wait(Task(array_id, 1), lambda job: job.running, "RUNNING")
    slurm.owner.hold_waiting(array_id)
    slurm.finish(Task(array_id, 1))
    slurm.pass_time(2.5)
    assert {job.array_tasks[0] for job in slurm.owner.tasks(array_id) if job.pending} == {2, 3}
