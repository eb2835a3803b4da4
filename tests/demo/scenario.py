"""Running the ten jobs once: under the companion, all of them elastic or some, or under Slurm alone. Next to two rigid
jobs of others, in another partition over the same nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ones_wrapper.protocol import Bye, Epoch, Hello, Membership, ProtocolError, Report, decode_report
from slurm_ones.demo.jobs import MOST_GPUS, ON_CLUSTER, DemoJob, comment
from slurm_ones.jobs.elastic import arrays, whole_job
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.slurm.parse import parse_jobs
from tests.cluster.cluster import Cluster
from tests.cluster.sites import GRES_SCAVENGE, OPERATOR
from tests.slurm.whole import as_one

TOP = Path(__file__).resolve().parents[2]
GIVE_UP_S = 300.0
"""After the last submission; by then something is wrong."""
DATABASE = "ones/ones.sqlite"
SETTINGS = """\
database = "{database}"
cluster = "demo"
mode = "act"
spool = "/scratch/ones"
tick_s = 5
[resize]
preempted_s = 5
[guests.gpu]
partition = "scavenge"
charged = false
most = 2
"""
"""All else is as shipped. These jobs last a minute, so tick and rest after a preemption are a twelfth of the defaults.
Guests are few and large, since all nodes are one machine: its two cores import torch for each, as a node would with
cores of its own; and base blocks that start between small guests end up on all nodes, so that none is left whole."""
SITE = GRES_SCAVENGE


@dataclass(frozen=True)
class RigidJob:
    """A job that knows nothing of slurm-ones: `gpus` GPUs of one node for `seconds`."""

    name: str
    at: float
    gpus: int
    seconds: int
    user: str


RIGID = (RigidJob("rigid-1", 34, 2, 20, "bob"), RigidJob("rigid-2", 66, 4, 20, "alice"))

TEMPLATE, PLAIN = TOP / "sbatch_templates/ddp.sbatch", TOP / "tests/endtoend/plain.sbatch"
"""With slurm-ones, of blocks; and for Slurm alone, which makes no use of any but the first."""
LEARNING_RATE = {"cnn": 0.02, "transformer": 0.001}


def arguments(job: DemoJob | RigidJob, *, elastic: bool) -> list[str]:
    """sbatch's arguments: the user's options, the template, the script and its own.

    A rigid job only notes when it starts. The user of another one scales batch and learning rate to the GPUs asked for,
    by the same linear rule that the wrapper applies at each size. Both ways the job is the same but that it opts in by
    its comment, and is an array of blocks.
    """
    if isinstance(job, RigidJob):
        script = f"date +%s.%N > started-{job.name}; sleep {job.seconds}"
        options = ("--partition=other", f"--gres=gpu:{job.gpus}", "--time=1", "--output=/dev/null")
        return [f"--job-name={job.name}", *options, f"--wrap={script}"]
    nodes, per_node = (1, job.gpus) if job.gpus <= 4 else (job.gpus // 4, 4)
    return [
        f"--job-name={job.name}",
        f"--nodes={nodes}",
        f"--gres=gpu:{per_node}",
        "--cpus-per-gpu=1",
        f"--comment={comment(MOST_GPUS) if elastic else ''}",
        str(TEMPLATE if elastic else PLAIN),
        str(TOP / f"wrapper/examples/{job.model}.py"),
        *job.options(MOST_GPUS),
        f"--lr={LEARNING_RATE[job.model] * job.gpus:g}",
    ]


@dataclass
class Size:
    """A stretch of training at one size."""

    began: float
    ended: float
    nodes: int
    gpus_per_node: int
    """0 where nodes give unequally many."""
    gpus: int
    batch: int


@dataclass
class Outcome:
    """What became of one job. Times are Unix seconds by Slurm's clock, which is this machine's."""

    job: DemoJob | RigidJob
    job_id: int
    submitted: float
    state: str = ""
    restarts: int = 0
    ended: float = 0.0
    sizes: list[Size] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds without training between each of `sizes` and the next, by the job's own reports."""
    hellos: list[Hello] = field(default_factory=list)
    """Each run's first report."""
    memberships: list[Membership] = field(default_factory=list)
    """Of a job of blocks: who trained together, in order."""
    accuracy: float | None = None
    waited_s: float | None = None
    """Of a rigid job: from its submission to its first line."""
    left: int = 0
    """Tasks of the job that still waited when it had ended."""
    unordered: int = 0
    """Changes of size that nobody ordered: Slurm preempted blocks, or they were lost."""

    @property
    def resizes(self) -> int:
        return len(self.sizes) - 1 - self.unordered

    @property
    def jct_s(self) -> float:
        return self.ended - self.submitted

    @property
    def finished(self) -> bool:
        return self.state == "COMPLETED"


def reports(directory: Path, restart: int) -> Iterator[tuple[float, Report]]:
    path = directory / f"reports-{restart}.jsonl"
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                yield decode_report(line)[1:]
            except ProtocolError:
                continue


def queue(cluster: Cluster) -> dict[int, SlurmJob]:
    """All jobs that Slurm knows, those that ended too; a job of blocks as one job, under its array's id."""
    found = parse_jobs(json.loads(cluster.run(["squeue", "--json", "--states=all"], user="root").stdout))
    of_blocks = {array: as_one(whole_job(array, records)) for array, records in arrays(found.values()).items()}
    return {id_: job for id_, job in found.items() if job.array_id not in of_blocks} | of_blocks


def gpus_of(job: SlurmJob) -> int:
    return job.gpus_total or job.nodes * job.gpus_per_node


def _submit(cluster: Cluster, job: DemoJob | RigidJob, *, elastic: bool) -> Outcome:
    command = ["sbatch", "--parsable", *arguments(job, elastic=elastic)]
    env = {"ONES_SPOOL": "/scratch/ones"} if elastic else {}
    now = time.time()
    job_id = int(cluster.run(command, user=job.user, env=env).stdout)
    return Outcome(job, job_id, now)


def _finish(cluster: Cluster, outcome: Outcome, job: SlurmJob) -> None:
    outcome.state, outcome.restarts, outcome.ended = job.state.value, job.restart, job.end_time
    home = cluster.home(outcome.job.user)
    if isinstance(outcome.job, RigidJob):
        began = float((home / f"started-{outcome.job.name}").read_text())
        outcome.waited_s = began - outcome.submitted
        outcome.sizes = [Size(began, outcome.ended, 1, outcome.job.gpus, outcome.job.gpus, 0)]
        return
    directory = home / f"ones-{outcome.job_id}"
    # A term of a job of blocks is what a restart is of another job.
    for run in range(len(list(directory.glob("reports-*.jsonl")))):
        _read(outcome, list(reports(directory, run)))
    if outcome.sizes:
        outcome.sizes[-1].ended = outcome.ended
    command = ["squeue", "-h", "--array", "--states=PENDING", f"--jobs={outcome.job_id}", "-o", "%i"]
    outcome.left = len(cluster.run(command, user="root", check=False).stdout.split())


def _read(outcome: Outcome, told: list[tuple[float, Report]]) -> None:
    """Add what a run reported."""
    moved = bool(outcome.memberships)
    for at, report in told:
        if isinstance(report, Hello):
            outcome.hellos.append(report)
            began = at if moved else at - report.launch_s - report.group_s - report.load_s
            if outcome.sizes:
                outcome.pauses.append(at - outcome.sizes[-1].ended)
            outcome.sizes.append(Size(began, at, report.nodes, report.gpus_per_node, report.world, report.batch))
        elif isinstance(report, Membership):
            size = Size(at, at, report.nodes, report.gpus_per_node, report.world, report.batch)
            if outcome.memberships and not moved:
                outcome.sizes[-1].ended = at
                outcome.sizes.append(size)
                outcome.pauses.append(report.pause_s)
                outcome.unordered += report.order is None
            elif outcome.sizes:
                # The first of a run says more exactly what its hello has said.
                size.began = outcome.sizes[-1].began
                outcome.sizes[-1] = size
                if moved and report.why != "lost":
                    outcome.pauses[-1] = report.pause_s
            moved = False
            outcome.memberships.append(report)
        if outcome.sizes and not isinstance(report, Bye):
            outcome.sizes[-1].ended = at
        if isinstance(report, Epoch) and report.accuracy is not None:
            outcome.accuracy = report.accuracy


def operator(cluster: Cluster) -> str:
    """Who may resize everybody's jobs: an unprivileged operator, or Slurm's own user where nobody accounts."""
    return OPERATOR if cluster.accounting else "slurm"


@contextmanager
def companion(cluster: Cluster) -> Iterator[None]:
    """The companion in act mode over a database in a file, after its first tick; ended as an admin ends it."""
    user = operator(cluster)
    cluster.run(["mkdir", "-m", "755", "/scratch/ones"], user=user, cwd="/")
    (cluster.scratch / "ones.toml").write_text(SETTINGS.format(database=f"sqlite:////scratch/{DATABASE}"))
    path = cluster.scratch / "ones/companion.log"
    with path.open("a") as log:
        command = ["slurm-ones", "run", "--config", "/scratch/ones.toml", "--verbose"]
        process = cluster.popen(command, user=user, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while "elastic jobs" not in (words := path.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the companion did not start:\n{words[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)


def run(
    cluster: Cluster,
    *,
    elastic: Collection[DemoJob],
    show: Callable[[list[Outcome], dict[int, SlurmJob]], None],
    rigid: Sequence[RigidJob] = (),
) -> list[Outcome]:
    """Submit the jobs on their timetable, some of them elastic, and rigid ones, and wait until all have ended.

    `show` is called about once a second.
    """
    begin = time.time()
    waiting: list[DemoJob | RigidJob] = sorted((*ON_CLUSTER, *rigid), key=lambda job: job.at)
    outcomes: list[Outcome] = []
    while time.time() < begin + waiting_until(waiting) + GIVE_UP_S:
        while waiting and time.time() >= begin + waiting[0].at:
            new = waiting.pop(0)
            outcomes.append(_submit(cluster, new, elastic=new in elastic))
        jobs = queue(cluster)
        for outcome in outcomes:
            job = jobs.get(outcome.job_id)
            if job is not None and job.ended and not job.completing and not outcome.state:
                _finish(cluster, outcome, job)
        show(outcomes, jobs)
        if not waiting and all(outcome.state for outcome in outcomes):
            break
        time.sleep(1)
    for outcome in outcomes:
        if not outcome.state:
            outcome.state = "still " + jobs[outcome.job_id].state.value if outcome.job_id in jobs else "lost"
    return outcomes


def waiting_until(waiting: Sequence[DemoJob | RigidJob]) -> float:
    """When the last of these jobs is to be submitted, in seconds from the beginning."""
    return max((job.at for job in waiting), default=ON_CLUSTER[-1].at)
