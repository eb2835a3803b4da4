"""The kinds of faults, each by its name: what breaks, or what a person does, at a moment that hurts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from slurm_ones.slurm.model import Job, JobState
from tests.endtoend.light import EXIT_IN_DRAIN
from tests.endtoend.stage import ELASTIC, FULL, SMALL, Stage

Strike = Callable[[Stage, int], None]
"""It is given the job in whose resize the companion stands, or any elastic one."""
KINDS: dict[str, Strike] = {}
WHERE: dict[str, Callable[[Stage], bool]] = {}
"""Kinds that need something of their stage."""
DRAINABLE = ("n2", "n3", "n4")
"""Nodes on which no job runs that must not be touched."""


def kind(name: str, where: Callable[[Stage], bool] = lambda stage: True) -> Callable[[Strike], Strike]:
    def known(strike: Strike) -> Strike:
        KINDS[name], WHERE[name] = strike, where
        return strike

    return known


# -- the companion ---------------------------------------------------------------------------------------------------


@kind("companion killed")
def _(stage: Stage, job_id: int) -> None:
    stage.random.choice(stage.companions).kill()


@kind("companion killed and away")
def _(stage: Stage, job_id: int) -> None:
    for companion in stage.companions:
        companion.kill(absent_s=stage.random.uniform(2, 6))


@kind("companion paused")
def _(stage: Stage, job_id: int) -> None:
    companion = stage.random.choice(stage.companions)
    companion.signal(signal.SIGSTOP)
    stage.open_gate()
    time.sleep(stage.random.uniform(0.5, 5))
    companion.signal(signal.SIGCONT)


@kind("companion stopped")
def _(stage: Stage, job_id: int) -> None:
    stage.random.choice(stage.companions).signal(signal.SIGTERM)


@kind("stop file")
def _(stage: Stage, job_id: int) -> None:
    path = stage.folder / "stop"
    path.touch()
    stage.heals.append(path.unlink)
    stage.open_gate()
    time.sleep(stage.random.uniform(0.2, 2))


# -- Slurm -----------------------------------------------------------------------------------------------------------


@kind("slurmctld killed")
def _(stage: Stage, job_id: int) -> None:
    stage.cluster.kill_slurmctld()
    stage.open_gate()
    time.sleep(stage.random.choice([0, 0.5, 2, 6]))
    stage.cluster.start_slurmctld()


@kind("slurmctld paused")
def _(stage: Stage, job_id: int) -> None:
    stage.cluster.signal_slurmctld("STOP")
    stage.open_gate()
    time.sleep(stage.random.choice([0.5, 2, 7, 12]))
    stage.cluster.signal_slurmctld("CONT")


@kind("slurmd killed")
def _(stage: Stage, job_id: int) -> None:
    node = _node_of(stage, job_id)
    stage.cluster.kill_slurmds(node)
    stage.open_gate()
    time.sleep(stage.random.choice([0, 1, 3]))
    stage.cluster.start_slurmds(node)


@kind("slurmd paused")
def _(stage: Stage, job_id: int) -> None:
    node = _node_of(stage, job_id)
    stage.cluster.signal_slurmds("STOP", node)
    stage.open_gate()
    time.sleep(stage.random.uniform(0.5, 4))
    stage.cluster.signal_slurmds("CONT", node)


@kind("slurmdbd killed", lambda stage: stage.cluster.accounting)
def _(stage: Stage, job_id: int) -> None:
    stage.cluster.box.run(["pkill", "-KILL", "-x", "slurmdbd"], check=False)
    stage.open_gate()
    time.sleep(stage.random.uniform(0, 2))
    stage.cluster.run(["slurmdbd"], user="slurm", check=False)


@kind("everything killed")
def _(stage: Stage, job_id: int) -> None:
    """But the jobs' own processes."""
    away = stage.random.uniform(1, 3)
    for companion in stage.companions:
        companion.kill(absent_s=away)
    stage.cluster.kill_slurmctld()
    stage.cluster.kill_slurmds(*stage.cluster.nodes)
    if stage.server is not None:
        stage.server.stop(signal.SIGQUIT)
    time.sleep(away)
    if stage.server is not None:
        stage.server.start()
        stage.show_server()
    stage.cluster.start_slurmctld()
    stage.cluster.start_slurmds(*stage.cluster.nodes)


@kind("node down")
def _(stage: Stage, job_id: int) -> None:
    node = _node_of(stage, job_id)
    node = node if node in DRAINABLE else stage.random.choice(DRAINABLE)
    before = stage.jobs()
    stage.scontrol("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test", user="root")
    for job in (*before.values(), *stage.jobs().values()):
        if node in job.node_list and (story := stage.stories.get(job.job_id)):
            # Once more where Slurm gives it the same node again before that has let go of its last run.
            story.others += 2
            if not job.requeue:
                story.ends |= {JobState.NODE_FAIL}
    _later(stage, lambda: stage.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root"))


@kind("node drained")
def _(stage: Stage, job_id: int) -> None:
    node = _node_of(stage, job_id)
    node = node if node in DRAINABLE else stage.random.choice(DRAINABLE)
    stage.scontrol("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test", user="root")
    _later(stage, lambda: stage.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root"))


@kind("rigid jobs take the free GPUs")
def _(stage: Stage, job_id: int) -> None:
    jobs = stage.jobs().values()
    taken = sum(job.nodes * job.gpus_per_node for job in jobs if job.state is JobState.RUNNING)
    crowd = stage.crowd(16 - taken)
    _later(stage, lambda: stage.scontrol("scancel", str(crowd), user="bob"))


# -- the job itself --------------------------------------------------------------------------------------------------


@kind("ranks killed")
def _(stage: Stage, job_id: int) -> None:
    for pid in stage.pids(job_id)[-1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@kind("ranks paused")
def _(stage: Stage, job_id: int) -> None:
    pids = stage.pids(job_id)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            stage.open_gate()
            time.sleep(stage.random.uniform(0.5, 4))


@kind("exit in its drain")
def _(stage: Stage, job_id: int) -> None:
    stage.stories[job_id].ends |= {JobState.COMPLETED}
    with suppress(OSError):
        (stage.directory(job_id) / EXIT_IN_DRAIN).touch()


# -- databases and disks ---------------------------------------------------------------------------------------------


def _restart(stage: Stage, how: signal.Signals) -> None:
    assert stage.server is not None
    stage.server.stop(how)
    stage.open_gate()
    time.sleep(stage.random.choice([0, 1, 3]))
    stage.server.start()
    stage.show_server()


@kind("PostgreSQL restarted fast", lambda stage: stage.server is not None)
def _(stage: Stage, job_id: int) -> None:
    _restart(stage, signal.SIGINT)


@kind("PostgreSQL crashed", lambda stage: stage.server is not None)
def _(stage: Stage, job_id: int) -> None:
    _restart(stage, signal.SIGQUIT)


def _fill(stage: Stage, place: str) -> None:
    ballast = f"{place}/ballast"
    # The last bytes by small pieces.
    for size in ("64k", "1k"):
        command = ["dd", "if=/dev/zero", f"of={ballast}", f"bs={size}", "oflag=append", "conv=notrunc"]
        stage.cluster.box.run(command, check=False)
    stage.open_gate()
    time.sleep(stage.random.uniform(1, 5))
    stage.cluster.box.run(["rm", "-f", ballast])


@kind("companion's disk full", lambda stage: stage.server is None or not stage.own)
def _(stage: Stage, job_id: int) -> None:
    _fill(stage, SMALL)


@kind("job's disk full")
def _(stage: Stage, job_id: int) -> None:
    _fill(stage, FULL)


# -- people ----------------------------------------------------------------------------------------------------------


@kind("owner cancels")
def _(stage: Stage, job_id: int) -> None:
    stage.stories[job_id].ends |= {JobState.CANCELLED}
    stage.scontrol("scancel", str(job_id))


@kind("owner holds")
def _(stage: Stage, job_id: int) -> None:
    _hold(stage, job_id, "uhold", "alice")


@kind("operator holds")
def _(stage: Stage, job_id: int) -> None:
    _hold(stage, job_id, "hold", "root")


def _hold(stage: Stage, job_id: int, how: str, user: str) -> None:
    story, before = stage.stories[job_id], stage.desk.job(job_id)
    if not stage.scontrol("scontrol", how, str(job_id), user=user):
        return
    story.hold = "owner" if user == "alice" else "operator"
    # A hold that falls into one of the companion's own is the same to Slurm. An operator's is not; but an operator's
    # companion, which looks before it releases, may be between the two.
    running = before.running and not before.held and not _about_to_be_held(stage, job_id)
    story.hold_sure = running or (user == "root" and stage.own)

    def release() -> None:
        stage.scontrol("scontrol", "release", str(job_id), user=user)
        story.hold, story.hold_sure = "", False

    _later(stage, release)


@kind("owner releases")
def _(stage: Stage, job_id: int) -> None:
    stage.scontrol("scontrol", "release", str(job_id))


@kind("owner requeues")
def _(stage: Stage, job_id: int) -> None:
    if stage.scontrol("scontrol", "requeue", str(job_id)):
        stage.stories[job_id].others += 1


@kind("owner changes NumNodes")
def _(stage: Stage, job_id: int) -> None:
    stage.scontrol("scontrol", "update", f"JobId={job_id}", f"NumNodes={stage.random.choice(['1-1', '2-2', '1-3'])}")


@kind("owner changes Gres")
def _(stage: Stage, job_id: int) -> None:
    stage.scontrol("scontrol", "update", f"JobId={job_id}", f"Gres=gpu:{stage.random.randint(1, 4)}")


def _comment(stage: Stage, job_id: int, text: str) -> None:
    story = stage.stories[job_id]
    if not stage.scontrol("scontrol", "update", f"JobId={job_id}", f"Comment={text}"):
        return
    story.opted_out = True
    job = stage.desk.job(job_id)
    if stage.at_gate and job.running and not _about_to_be_held(stage, job_id):
        # The companion looks again before it acts.
        story.peace, story.others_then = job, story.others

    def back() -> None:
        story.opted_out, story.peace = False, None
        stage.scontrol("scontrol", "update", f"JobId={job_id}", f"Comment={ELASTIC}")

    _later(stage, back)


@kind("owner opts out")
def _(stage: Stage, job_id: int) -> None:
    _comment(stage, job_id, "mine")


@kind("owner says resize=off")
def _(stage: Stage, job_id: int) -> None:
    _comment(stage, job_id, f"{ELASTIC} resize=off")


@kind("owner writes a bad comment")
def _(stage: Stage, job_id: int) -> None:
    _comment(stage, job_id, "ones: gpus=many")


@kind("owner sets StartTime")
def _(stage: Stage, job_id: int) -> None:
    story = stage.stories[job_id]
    if not stage.scontrol("scontrol", "update", f"JobId={job_id}", "StartTime=now+1hour"):
        return
    story.begin = True

    def now() -> None:
        stage.scontrol("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        story.begin = False

    _later(stage, now)


@kind("owner lowers TimeLimit")
def _(stage: Stage, job_id: int) -> None:
    if stage.scontrol("scontrol", "update", f"JobId={job_id}", "TimeLimit=1"):
        stage.stories[job_id].ends |= {JobState.TIMEOUT}


@kind("owner changes Partition")
def _(stage: Stage, job_id: int) -> None:
    story = stage.stories[job_id]
    if not stage.scontrol("scontrol", "update", f"JobId={job_id}", "Partition=whole"):
        return
    story.odd = True

    def back() -> None:
        stage.scontrol("scontrol", "update", f"JobId={job_id}", "Partition=gpu")
        # Slurm itself holds what can never start.
        stage.scontrol("scontrol", "release", str(job_id))
        story.odd = False

    _later(stage, back)


@kind("owner forbids requeues")
def _(stage: Stage, job_id: int) -> None:
    if stage.scontrol("scontrol", "update", f"JobId={job_id}", "Requeue=0"):
        stage.stories[job_id].ends |= {JobState.NODE_FAIL}
        _later(stage, lambda: stage.scontrol("scontrol", "update", f"JobId={job_id}", "Requeue=1"))


# -- parts -----------------------------------------------------------------------------------------------------------


def _later(stage: Stage, amend: Callable[[], object]) -> None:
    """Undone by whoever did it, one or two faults on."""
    stage.amends.append((stage.random.randint(1, 2), lambda: (amend(), None)[1]))


def _node_of(stage: Stage, job_id: int) -> str:
    """A node of the job's, or any of the GPU partition's."""
    with suppress(subprocess.TimeoutExpired):
        job: Job = stage.desk.job(job_id)
        if job.node_list:
            return stage.random.choice(job.node_list)
    return stage.random.choice(stage.cluster.nodes[:4])


def _about_to_be_held(stage: Stage, job_id: int) -> bool:
    """Whether the companion may put a hold of its own on the running job before it looks at it again."""
    with stage.store() as store:
        states = {resize.state for resize in store.open_resizes() if resize.job_id == job_id}
    return bool(states - {"draining", "requeuing", "starting"} if stage.at_gate else states)
