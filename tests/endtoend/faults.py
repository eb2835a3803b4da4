"""The faults on a real Slurm, each by the name of its kind: what breaks, or what a person does, during a resize."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from slurm_ones.slurm.model import JobState, SlurmJob
from tests.endtoend.fault_site import ELASTIC, ELASTIC_BLOCKS, FULL, SMALL, FaultSite
from tests.endtoend.light import EXIT_IN_DRAIN
from tests.faults.kinds import FaultKind

Inject = Callable[[FaultSite, int], None]
"""Called with the job in whose resize the companion stands, or with any elastic one."""
KINDS: dict[str, Inject] = {}
POSSIBLE: dict[str, Callable[[FaultSite], bool]] = {}
"""Kinds that need something of their site."""
DRAINABLE = ("n2", "n3", "n4")
"""Nodes on which no job runs that must not be touched."""
SAVED_S = 6.0
"""Slurm writes its jobs down within 5 s of a change."""


def kind(
    what: FaultKind | str, possible: Callable[[FaultSite], bool] = lambda site: True
) -> Callable[[Inject], Inject]:
    """Register a kind: one that simulated runs have too, or a name of its own."""
    name = what.value if isinstance(what, FaultKind) else what

    def known(inject: Inject) -> Inject:
        KINDS[name], POSSIBLE[name] = inject, possible
        return inject

    return known


# -- the companion ---------------------------------------------------------------------------------------------------


@kind(FaultKind.CRASH)
def _(site: FaultSite, job_id: int) -> None:
    site.random.choice(site.companions).kill()


@kind("companion killed and away")
def _(site: FaultSite, job_id: int) -> None:
    for companion in site.companions:
        companion.kill(absent_s=site.random.uniform(2, 6))


@kind("companion paused")
def _(site: FaultSite, job_id: int) -> None:
    companion = site.random.choice(site.companions)
    companion.signal(signal.SIGSTOP)
    site.open_gate()
    time.sleep(site.random.uniform(0.5, 5))
    companion.signal(signal.SIGCONT)


@kind("companion stopped")
def _(site: FaultSite, job_id: int) -> None:
    site.random.choice(site.companions).signal(signal.SIGTERM)


@kind(FaultKind.STOP_FILE)
def _(site: FaultSite, job_id: int) -> None:
    path = site.folder / "stop"
    path.touch()
    site.repairs.append(path.unlink)
    site.open_gate()
    time.sleep(site.random.uniform(0.2, 2))


# -- Slurm -----------------------------------------------------------------------------------------------------------


@kind("slurmctld killed")
def _(site: FaultSite, job_id: int) -> None:
    _let_slurm_save(site)
    site.cluster.kill_slurmctld()
    site.open_gate()
    time.sleep(site.random.choice([0, 0.5, 2, 6]))
    site.cluster.start_slurmctld()


@kind("slurmctld paused")
def _(site: FaultSite, job_id: int) -> None:
    site.cluster.signal_slurmctld("STOP")
    site.open_gate()
    time.sleep(site.random.choice([0.5, 2, 7, 12]))
    site.cluster.signal_slurmctld("CONT")


@kind("slurmd killed")
def _(site: FaultSite, job_id: int) -> None:
    node = _node_of(site, job_id)
    site.cluster.kill_slurmds(node)
    site.open_gate()
    time.sleep(site.random.choice([0, 1, 3]))
    site.cluster.start_slurmds(node)


@kind("slurmd paused")
def _(site: FaultSite, job_id: int) -> None:
    node = _node_of(site, job_id)
    site.cluster.signal_slurmds("STOP", node)
    site.open_gate()
    time.sleep(site.random.uniform(0.5, 4))
    site.cluster.signal_slurmds("CONT", node)


@kind("slurmdbd killed", lambda site: site.cluster.accounting)
def _(site: FaultSite, job_id: int) -> None:
    site.cluster.box.run(["pkill", "-KILL", "-x", "slurmdbd"], check=False)
    site.open_gate()
    time.sleep(site.random.uniform(0, 2))
    site.cluster.run(["/usr/sbin/slurmdbd"], user="slurm")


@kind("everything killed")
def _(site: FaultSite, job_id: int) -> None:
    away = site.random.uniform(1, 3)
    for companion in site.companions:
        companion.kill(absent_s=away)
    _let_slurm_save(site)
    site.cluster.kill_slurmctld()
    site.cluster.kill_slurmds(*site.cluster.nodes)
    if site.server is not None:
        site.server.stop(signal.SIGQUIT)
    time.sleep(away)
    if site.server is not None:
        site.server.start()
        site.show_server()
    site.cluster.start_slurmctld()
    site.cluster.start_slurmds(*site.cluster.nodes)


@kind(FaultKind.NODE_FAILED)
def _(site: FaultSite, job_id: int) -> None:
    node = _node_of(site, job_id)
    node = node if node in DRAINABLE else site.random.choice(DRAINABLE)
    before = site.jobs()
    site.scontrol("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test", user="root")
    for job in (*before.values(), *site.jobs().values()):
        if node in job.node_list and (expected := site.expected.get(job.job_id)):
            # Once more where Slurm gives it the same node again before that has let go of its last run.
            expected.others += 2
            if not job.requeue:
                expected.ends |= {JobState.NODE_FAIL}
    later(site, lambda: site.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root"))


@kind(FaultKind.NODE_DRAINED)
def _(site: FaultSite, job_id: int) -> None:
    node = _node_of(site, job_id)
    node = node if node in DRAINABLE else site.random.choice(DRAINABLE)
    site.scontrol("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test", user="root")
    later(site, lambda: site.scontrol("scontrol", "update", f"NodeName={node}", "State=RESUME", user="root"))


@kind(FaultKind.RIGID)
def _(site: FaultSite, job_id: int) -> None:
    jobs = site.jobs().values()
    taken = sum(job.nodes * job.gpus_per_node for job in jobs if job.state is JobState.RUNNING)
    crowd = site.crowd(16 - taken)
    later(site, lambda: site.scontrol("scancel", str(crowd), user="bob"))


# -- the job itself --------------------------------------------------------------------------------------------------


@kind("ranks killed")
def _(site: FaultSite, job_id: int) -> None:
    for pid in site.pids(job_id)[-1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@kind("ranks paused")
def _(site: FaultSite, job_id: int) -> None:
    pids = site.pids(job_id)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            site.open_gate()
            time.sleep(site.random.uniform(0.5, 4))


@kind("exit in its drain")
def _(site: FaultSite, job_id: int) -> None:
    site.expected[job_id].ends |= {JobState.COMPLETED}
    with suppress(OSError):
        (site.directory(job_id) / EXIT_IN_DRAIN).touch()


# -- databases and disks ---------------------------------------------------------------------------------------------


def _restart(site: FaultSite, how: signal.Signals) -> None:
    assert site.server is not None
    site.server.stop(how)
    site.open_gate()
    time.sleep(site.random.choice([0, 1, 3]))
    site.server.start()
    site.show_server()


@kind("PostgreSQL restarted fast", lambda site: site.server is not None)
def _(site: FaultSite, job_id: int) -> None:
    _restart(site, signal.SIGINT)


@kind("PostgreSQL crashed", lambda site: site.server is not None)
def _(site: FaultSite, job_id: int) -> None:
    _restart(site, signal.SIGQUIT)


def _fill(site: FaultSite, place: str) -> None:
    ballast = f"{place}/ballast"
    # The last bytes by small pieces.
    for size in ("64k", "1k"):
        command = ["dd", "if=/dev/zero", f"of={ballast}", f"bs={size}", "oflag=append", "conv=notrunc"]
        site.cluster.box.run(command, check=False)
    site.open_gate()
    time.sleep(site.random.uniform(1, 5))
    site.cluster.box.run(["rm", "-f", ballast])


@kind("companion's disk full", lambda site: site.server is None or not site.own)
def _(site: FaultSite, job_id: int) -> None:
    _fill(site, SMALL)


@kind("job's disk full")
def _(site: FaultSite, job_id: int) -> None:
    _fill(site, FULL)


# -- people ----------------------------------------------------------------------------------------------------------


@kind(FaultKind.CANCELLED)
def _(site: FaultSite, job_id: int) -> None:
    site.expected[job_id].ends |= {JobState.CANCELLED}
    site.scontrol("scancel", str(job_id))


@kind(FaultKind.HELD)
def _(site: FaultSite, job_id: int) -> None:
    _hold(site, job_id, "uhold", "alice")


@kind(FaultKind.ADMIN_HOLD)
def _(site: FaultSite, job_id: int) -> None:
    _hold(site, job_id, "hold", "root")


def _hold(site: FaultSite, job_id: int, how: str, user: str) -> None:
    expected, before = site.expected[job_id], site.harness.job(job_id)
    if not _took(site, job_id, "scontrol", how, str(job_id), user=user):
        return
    expected.hold = "owner" if user == "alice" else "operator"
    # A hold that falls into one of the companion's own is the same to Slurm. An operator's is not; but an operator's
    # companion, which looks before it releases, may be between the two.
    running = before.running and not before.held and not _about_to_be_held(site, job_id)
    # Of an array those tasks are held that wait, most of them by the companion before.
    expected.hold_sure = not expected.blocks and (running or (user == "root" and site.own))

    def release() -> bool:
        if not _took(site, job_id, "scontrol", "release", str(job_id), user=user):
            return False
        expected.hold, expected.hold_sure = "", False
        return True

    later(site, release)


@kind(FaultKind.RELEASED)
def _(site: FaultSite, job_id: int) -> None:
    site.scontrol("scontrol", "release", str(job_id))


@kind(FaultKind.REQUEUED)
def _(site: FaultSite, job_id: int) -> None:
    if site.scontrol("scontrol", "requeue", str(job_id)):
        site.expected[job_id].others += 1


@kind("owner changes NumNodes")
def _(site: FaultSite, job_id: int) -> None:
    site.scontrol("scontrol", "update", f"JobId={job_id}", f"NumNodes={site.random.choice(['1-1', '2-2', '1-3'])}")


@kind("owner changes Gres")
def _(site: FaultSite, job_id: int) -> None:
    site.scontrol("scontrol", "update", f"JobId={job_id}", f"Gres=gpu:{site.random.randint(1, 4)}")


def _comment(site: FaultSite, job_id: int, text: str) -> None:
    expected = site.expected[job_id]
    comment = ELASTIC_BLOCKS if expected.blocks else ELASTIC
    if not _took(site, job_id, "scontrol", "update", f"JobId={job_id}", f"Comment={text}"):
        return
    expected.opted_out = True
    job = site.harness.job(job_id)
    if site.at_gate and job.running and not _about_to_be_held(site, job_id):
        # The companion looks again before it acts.
        expected.at_opt_out, expected.others_at_opt_out = job, expected.others

    def back() -> bool:
        if not _took(site, job_id, "scontrol", "update", f"JobId={job_id}", f"Comment={comment}"):
            return False
        expected.opted_out, expected.at_opt_out = False, None
        return True

    later(site, back)


@kind(FaultKind.OPTED_OUT)
def _(site: FaultSite, job_id: int) -> None:
    _comment(site, job_id, "mine")


@kind(FaultKind.RESIZE_OFF)
def _(site: FaultSite, job_id: int) -> None:
    _comment(site, job_id, f"{ELASTIC_BLOCKS if site.expected[job_id].blocks else ELASTIC} resize=off")


@kind(FaultKind.BAD_COMMENT)
def _(site: FaultSite, job_id: int) -> None:
    # A job of blocks stays one.
    _comment(site, job_id, f"ones: gpus=many{' array=blocks' if site.expected[job_id].blocks else ''}")


@kind(FaultKind.BEGIN)
def _(site: FaultSite, job_id: int) -> None:
    expected = site.expected[job_id]
    if not _took(site, job_id, "scontrol", "update", f"JobId={job_id}", "StartTime=now+1hour"):
        return
    expected.begin = True

    def now() -> bool:
        if not _took(site, job_id, "scontrol", "update", f"JobId={job_id}", "StartTime=now"):
            return False
        expected.begin = False
        return True

    later(site, now)


@kind("owner lowers TimeLimit")
def _(site: FaultSite, job_id: int) -> None:
    if site.scontrol("scontrol", "update", f"JobId={job_id}", "TimeLimit=1"):
        site.expected[job_id].ends |= {JobState.TIMEOUT}


@kind("owner changes Partition")
def _(site: FaultSite, job_id: int) -> None:
    expected = site.expected[job_id]
    if not _took(site, job_id, "scontrol", "update", f"JobId={job_id}", "Partition=whole"):
        return
    expected.impossible_request = True

    def back() -> bool:
        back = _took(site, job_id, "scontrol", "update", f"JobId={job_id}", "Partition=gpu")
        # Slurm itself holds what can never start.
        site.scontrol("scontrol", "release", str(job_id))
        expected.impossible_request = False
        return back

    later(site, back)


@kind("owner forbids requeues")
def _(site: FaultSite, job_id: int) -> None:
    if site.scontrol("scontrol", "update", f"JobId={job_id}", "Requeue=0"):
        site.expected[job_id].ends |= {JobState.NODE_FAIL}
        later(site, lambda: site.scontrol("scontrol", "update", f"JobId={job_id}", "Requeue=1"))


# -- blocks ----------------------------------------------------------------------------------------------------------


def in_blocks(site: FaultSite, job_id: int) -> int:
    """This job, if it is one of blocks; else another one that is."""
    elastic = {id_: expected for id_, expected in site.elastic().items() if expected.blocks}
    return job_id if job_id in elastic or not elastic else site.random.choice(sorted(elastic))


def blocks_of(site: FaultSite, job_id: int) -> tuple[list[int], list[int]]:
    """Tasks that train together, the leader first, and those that run and do not yet."""
    told = site.harness.memberships(job_id)
    together = list(told[-1].blocks) if told else []
    running = [task for task, seen in site.harness.tasks(job_id).items() if seen.state == "RUNNING"]
    return together, [task for task in running if task not in together]


def strike(site: FaultSite, job_id: int, tasks: list[int], number: signal.Signals) -> None:
    for task in tasks[:1]:
        for pid in site.pids(job_id, task)[-1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@kind("newcomer killed")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    together, new = blocks_of(site, job_id)
    strike(site, job_id, new or together[1:], signal.SIGKILL)


@kind("leader killed")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    strike(site, job_id, blocks_of(site, job_id)[0], signal.SIGKILL)


@kind("leader paused")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    together, _new = blocks_of(site, job_id)
    strike(site, job_id, together, signal.SIGSTOP)
    site.open_gate()
    time.sleep(site.random.uniform(0.5, 4))
    strike(site, job_id, together, signal.SIGCONT)


@kind("owner cancels a block")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    together, new = blocks_of(site, job_id)
    if len(together) == 1 and not new:
        site.expected[job_id].ends |= {JobState.CANCELLED}
    for task in site.random.sample(together + new, 1):
        # The last one that trains would end the job.
        site.expected[job_id].ends |= {JobState.CANCELLED} if together == [task] else set()
        site.scontrol("scancel", f"{job_id}_{task}")


@kind("owner holds a block")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    tasks = sorted(site.harness.tasks(job_id))
    for task in site.random.sample(tasks, min(len(tasks), 1)):
        site.expected[job_id].kept.add(task)
        site.scontrol("scontrol", "hold", f"{job_id}_{task}")


@kind("owner releases all blocks")
def _(site: FaultSite, job_id: int) -> None:
    """They start, are not wanted, and end."""
    job_id = in_blocks(site, job_id)
    site.scontrol("scontrol", "release", str(job_id))


@kind("owner reshapes a block")
def _(site: FaultSite, job_id: int) -> None:
    job_id = in_blocks(site, job_id)
    tasks = sorted(site.harness.tasks(job_id))
    for task in site.random.sample(tasks, min(len(tasks), 1)):
        site.scontrol("scontrol", "update", f"JobId={job_id}_{task}", f"Gres=gpu:{site.random.randint(1, 4)}")


# -- parts -----------------------------------------------------------------------------------------------------------


def later(site: FaultSite, undo: Callable[[], bool]) -> None:
    """Undone by whoever did it, one or two faults on; again after each later fault, while Slurm does not take it."""
    site.undo_later.append((site.random.randint(1, 2), undo))


def _took(site: FaultSite, job_id: int, *arguments: str, user: str = "alice") -> bool:
    """Whether Slurm took what a person typed. Of an array it takes what it can, and says that tasks have ended."""
    return site.scontrol(*arguments, user=user) or site.expected[job_id].blocks


def _let_slurm_save(site: FaultSite) -> None:
    """Wait until Slurm has written down what people did last: a killed slurmctld forgets what it took just before."""
    newest = max([site.acted_at, *(job.submit_time for job in site.jobs().values())])
    time.sleep(min(max(newest + SAVED_S - time.time(), 0.0), SAVED_S))


def _node_of(site: FaultSite, job_id: int) -> str:
    """A node of the job's, or any of the GPU partition's."""
    with suppress(subprocess.TimeoutExpired):
        job: SlurmJob = site.harness.job(job_id)
        if job.node_list:
            return site.random.choice(job.node_list)
    return site.random.choice(site.cluster.nodes[:4])


def _about_to_be_held(site: FaultSite, job_id: int) -> bool:
    """Whether the companion may put a hold of its own on the running job before it looks at it again."""
    with site.store() as store:
        states = {resize.state for resize in store.open_resizes() if resize.job_id == job_id}
    return bool(states - {"draining", "requeuing", "starting"} if site.at_gate else states)
