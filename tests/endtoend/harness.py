"""What a person does at a cluster: submit from a template, look, run the companion, clear up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ones_db import Store, StoreError
from ones_wrapper.protocol import (
    Epoch,
    Hello,
    Membership,
    Report,
    Throughput,
    decode_pointer,
    decode_report,
    directory_name,
    pointer_name,
    reports_name,
)
from slurm_ones.jobs.elastic import arrays, whole_job
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.slurm.parse import parse_jobs
from tests.cluster import Cluster, paths
from tests.cluster.sites import OPERATOR
from tests.endtoend.scripted import STAY
from tests.slurm.whole import as_one
from tests.waiting import until

HERE = paths.REPOSITORY / "tests/endtoend"
TEMPLATE, WHOLE_NODES = HERE / "plain.sbatch", HERE / "plain-whole-node.sbatch"
"""Jobs that are resized by a requeue."""
BLOCKS = paths.REPOSITORY / "sbatch_templates/ddp.sbatch"
WHOLE_NODE_BLOCKS = paths.REPOSITORY / "sbatch_templates/ddp-whole-node.sbatch"
"""Jobs of blocks, as users submit them."""
TRAIN = paths.REPOSITORY / "tests/wrapper/train.py"
FOR_EVER = ("--epochs", "100000", "--samples", "64", "--batch", "16", "--step-ms", "50")
"""Arguments of `TRAIN` for a job that is not to end by itself: an epoch takes about 0.2 s."""
WAIT_S = 240.0
"""Longest wait for something that comes within seconds on a machine that is not busy."""
TICK_S = 0.7
MOST_LOSS = 1e4
LAUNCHER = b"ones_wrapper.launch.node"
"""In the command line of what starts ranks, and of each of them."""
LOOK_S = 0.5
"""Between two questions to Slurm: each starts two processes, and the machine has other tests to run."""
DATABASE = "ones.sqlite"
HELD = ("JobHeldUser", "job requeued in held state")
"""Why a task waits that is in a user's hold."""


@dataclass(frozen=True)
class BlockTask:
    """A task of an array, as Slurm shows it."""

    state: str
    reason: str
    nodes: int
    gpus: int
    """Of each node; 0 where Slurm does not know of them."""
    node_list: str

    @property
    def held(self) -> bool:
        return self.state == "PENDING" and self.reason in HELD


def processes(cluster: Cluster, named: Sequence[str], programs: Sequence[bytes] = (LAUNCHER,)) -> list[int]:
    """Processes of this cluster that run one of the programs and have all these `NAME=VALUE` in their environments, the
    youngest last. Other clusters of the machine have jobs of the same numbers."""
    space = Path(f"/proc/{cluster.box.init}/ns/pid").readlink()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if not folder.name.isdecimal() or (folder / "ns/pid").readlink() != space:
                continue
            words, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            ours = any(program in words for program in programs)
            if ours and all(f"{one}\0".encode() in environ for one in named):
                begun = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
                found.append((begun, int(folder.name)))
    # Not by number: these begin from 1 again after the largest.
    return [pid for _, pid in sorted(found)]


@dataclass
class Harness:
    """One cluster, as its users see it. Its jobs end with the test."""

    cluster: Cluster
    _processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def operator(self) -> str:
        """Who may change everybody's jobs, unprivileged if there is accounting."""
        return OPERATOR if self.cluster.accounting else "slurm"

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit(
        self, *arguments: str, user: str = "alice", options: tuple[str, ...] = (), template: Path = TEMPLATE, **env: str
    ) -> int:
        """Submit a template from the user's home: `ones-run ARGUMENTS`, by default training that does not end."""
        command = ["sbatch", "--parsable", *options, str(template), *(arguments or (str(TRAIN), *FOR_EVER))]
        env = {"ONES_REPORT_EVERY_S": "0.3", **env}
        return int(self.cluster.run(command, user=user, env=env).stdout)

    def light(self, *options: str, user: str = "alice", **env: str) -> int:
        """Submit a job that trains nothing (`light.py`)."""
        return self.submit(str(HERE / "light.py"), user=user, options=options, template=HERE / "light.sbatch", **env)

    def blocks(self, *options: str, user: str = "alice", **env: str) -> int:
        """Submit a job of blocks that trains nothing (`light_blocks.py`)."""
        script = HERE / "light_blocks.py"
        return self.submit(str(script), user=user, options=options, template=script.with_suffix(".sbatch"), **env)

    def rigid(self, *options: str, user: str = "bob", script: str = "exec sleep 600") -> int:
        """A job that knows nothing of us."""
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script]
        return int(self.cluster.run(command, user=user).stdout)

    def job(self, job_id: int) -> SlurmJob:
        """The job as Slurm has it; one of blocks as one, in its first term."""
        text = self.cluster.run(["squeue", "--json", "--states=all", f"--jobs={job_id}"], user="root").stdout
        found = parse_jobs(json.loads(text))
        blocks = arrays(found.values())
        return as_one(whole_job(job_id, blocks[job_id])) if job_id in blocks else found[job_id]

    def tasks(self, array_id: int) -> dict[int, BlockTask]:
        """The tasks of an array that Slurm knows. Its own words: `squeue` shows waiting tasks together otherwise,
        whatever their shapes are."""
        form = "%K|%T|%r|%D|%b|%N"
        command = ["squeue", "-h", "--array", "--states=all", f"--jobs={array_id}", "-o", form]
        found = {}
        for line in self.cluster.run(command, user="root").stdout.splitlines():
            task, state, reason, nodes, gres, node_list = line.split("|")
            if task.isdecimal():
                gpus = int(gres.rpartition(":")[2]) if gres.rpartition(":")[2].isdecimal() else 0
                found[int(task)] = BlockTask(state, reason, int(nodes), gpus, node_list)
        return found

    def memberships(self, job_id: int, user: str = "alice") -> list[Membership]:
        """Who trained together, in order, as the job reported it over all its terms."""
        count = len(list(self.directory(job_id, user).glob("reports-*.jsonl")))
        terms = [self.reports(job_id, term, user) for term in range(count)]
        return [report for reports in terms for report in reports if isinstance(report, Membership)]

    def membership(
        self,
        job_id: int,
        holds: Callable[[Membership], bool],
        what: str,
        timeout_s: float = WAIT_S,
        user: str = "alice",
    ) -> Membership:

        def missing() -> str:
            last = self.memberships(job_id, user)[-1:]
            return f"job {job_id}: {what}: {last}, {self.tasks(job_id)}\n{self.log(job_id, user)[-3000:]}"

        return until(
            lambda: last[0] if (last := self.memberships(job_id, user)[-1:]) and holds(last[0]) else None,
            missing,
            timeout_s,
            0.1,
        )

    def wait(self, job_id: int, holds: Callable[[SlurmJob], bool], what: str, timeout_s: float = WAIT_S) -> SlurmJob:
        return until(
            lambda: job if holds(job := self.job(job_id)) else None,
            lambda: f"job {job_id} {what}: {self.job(job_id)}\n{self.traces(job_id)}",
            timeout_s,
            LOOK_S,
        )

    def ended(self, array_id: int, within_s: float = WAIT_S) -> None:
        """Wait until no task of an array runs, waits or is at its end."""

        def over() -> bool:
            return not {task.state for task in self.tasks(array_id).values()} & {"RUNNING", "PENDING", "COMPLETING"}

        until(over, lambda: f"{self.tasks(array_id)}\n{self.log(array_id)[-6000:]}", within_s, LOOK_S)

    def directory(self, job_id: int, user: str = "alice") -> Path:
        """The host's name of the job's directory, in /scratch where it is not in the user's home."""
        pointer = self.cluster.home(user) / pointer_name(job_id)
        if pointer.exists():
            return self._host(decode_pointer(pointer.read_bytes()))
        return self.cluster.home(user) / directory_name(job_id)

    def reports(self, job_id: int, restart: int, user: str = "alice") -> list[Report]:
        path = self.directory(job_id, user) / reports_name(restart)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [decode_report(line)[2] for line in lines if line.endswith(b"\n")]
        # Here all trainings converge: a loss that is far away is of a model that was spoilt.
        odd = [one for one in found if isinstance(one, (Throughput, Epoch)) and abs(one.loss or 0.0) > MOST_LOSS]
        assert not odd, (odd, found)
        return found

    def report(
        self, job_id: int, restart: int, holds: Callable[[Report], bool], what: str, timeout_s: float = WAIT_S
    ) -> Report:
        """The run's first report of which that holds, once it is there."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.job(job_id).ended
            look = time.monotonic() + 1.0
            while True:
                if found := [report for report in self.reports(job_id, restart) if holds(report)]:
                    return found[0]
                if time.monotonic() > look:
                    break
                time.sleep(0.1)
            words = f"run {restart} of job {job_id} reported no {what}: {self.log(job_id)[-2000:]}"
            assert time.monotonic() < deadline and not ended, words

    def trains(self, *job_ids: int, restart: int = 0) -> None:
        """Wait until these jobs train."""
        for job_id in job_ids:
            self.report(job_id, restart, lambda report: not isinstance(report, Hello), "steps")

    def log(self, job_id: int, user: str = "alice") -> str:
        home = self.cluster.home(user)
        paths = (*home.glob(f"*-{job_id}.out"), *home.glob(f"*-{job_id}_*.out"))
        return "".join(path.read_text() for path in paths)

    def traces(self, job_id: int) -> str:
        """What Slurm's daemons logged of a job, and its processes: why it does not start, or does not end."""
        lines = [
            f"{log.stem}: {line}"
            for log in sorted(self.cluster.logs.glob("slurm*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if re.search(rf"\b{job_id}\b", line)
        ]
        shown = self.cluster.run(["ps", "-eo", "pid,ppid,stat,wchan,etime,args"], user="root", check=False).stdout
        steps = [line for line in shown.splitlines() if f"[{job_id}" in line or f"-{job_id}" in line]
        return "\n".join([*lines[-60:], *steps])

    def folder(self, name: str) -> Path:
        """A new folder that everybody may write to, by its host's name; inside it is in /scratch."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.cluster.scratch))
        folder.chmod(0o777)
        return folder

    def spool(self, user: str) -> Path:
        """A spool of this user's, by its host's name."""
        folder = self.folder("spool")
        self.cluster.run(["chown", user, f"/scratch/{folder.name}"], user="root")
        folder.chmod(0o755)
        return folder

    # -- the companion -------------------------------------------------------------------------------------------

    def settings(
        self, user: str = "alice", *, resize: str = "", limits: str = "", options: str = "", **top: str
    ) -> str:
        """Write a settings file with quick ticks and a database of its own; returns its path inside.

        `top` are further lines, as TOML; `resize`, `limits` and `options`, those of the policy, further ones of those
        sections.
        """
        folder = self.folder(user)
        inside = f"/scratch/{folder.name}"
        lines = {"database": f'"sqlite:///{inside}/{DATABASE}"', "cluster": '"here"', "tick_s": str(TICK_S)}
        # ONES as published gives free GPUs away without asking what a change costs.
        lines |= {"policy": '"ones-sc21"'} | top
        quick = {"dwell_s": "1", "max_wait_s": "30", "advance_s": "0.2", "settle_s": "0"}
        quick |= dict(line.split(" = ") for line in resize.splitlines())
        # Epochs of half a second, of which nobody knows how many come, are always near their end.
        # What trains nothing scales no better for growing, and here it is to grow.
        near = {"near_end_s": "0", "near_limit_s": "0", "growth_cost": "1000"} | dict(
            line.split(" = ") for line in limits.splitlines()
        )
        given = {"epochs_before_doubling": "1"} if lines["policy"] == '"ones-sc21"' else {}
        given |= dict(line.split(" = ") for line in options.splitlines())
        sections = {"policy_options": given, "resize": quick, "limits": near}
        text = [f"{key} = {value}" for key, value in lines.items()]
        for name, values in sections.items():
            text += [f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]
        (folder / "ones.toml").write_text("\n".join(text))
        return f"{inside}/ones.toml"

    def start(
        self, command: list[str], settings: str, *, user: str = "alice", cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a companion; it ends with the test. What it says is in `words`."""
        with (self._host(settings).parent / "companion.log").open("a") as log:
            process = self.cluster.popen(command, user=user, cwd=cwd, stdout=log, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return process

    def scripted(
        self, settings: str, steps: Mapping[int, Any], *mode: str, user: str = "alice"
    ) -> subprocess.Popen[str]:
        """Start a companion that is to bring jobs to these shapes (`tests.endtoend.scripted`)."""
        command = [self.cluster.python, "-m", "tests.endtoend.scripted", settings, json.dumps(steps), *mode]
        return self.start(command, settings, user=user, cwd=paths.REPOSITORY)

    def carry_out(self, settings: str, steps: Mapping[int, Any], timeout_s: float = 120.0) -> None:
        """Run such a companion to its end."""
        assert self.scripted(settings, steps).wait(timeout_s) == 0, self.companion_log(settings)[-6000:]

    def kill_at_end(self, process: subprocess.Popen[Any]) -> None:
        self._processes.append(process)

    @contextmanager
    def running(self, settings: str, *options: str, user: str = "alice", cwd: Path | None = None) -> Iterator[None]:
        """The companion for the length of a block; fails when it does not end well."""
        command = ["slurm-ones", "run", "--config", settings, "--verbose", *options]
        process = self.start(command, settings, user=user, cwd=cwd)
        try:
            yield
            assert process.poll() is None, self.companion_log(settings)
        finally:
            process.terminate()
            self._ended(process, settings)

    def _ended(self, process: subprocess.Popen[str], settings: str) -> None:
        """Wait for a companion's end; if it does not come, show what its threads do."""
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)  # `tests.forks`
            time.sleep(1.0)
            raise AssertionError(f"no end within {WAIT_S:.0f} s\n{self.companion_log(settings)[-9000:]}") from None
        assert "Timeout (" not in self.companion_log(settings), self.companion_log(settings)[-9000:]

    def companion_log(self, settings: str) -> str:
        """What the companions with these settings have said so far."""
        return (self._host(settings).parent / "companion.log").read_text()

    def ticks(self, settings: str, more: int = 3) -> None:
        """Wait until the companion has made some more ticks."""

        def made() -> int:
            return self.companion_log(settings).count("elastic jobs run")

        wanted = made() + more
        until(lambda: made() >= wanted, lambda: self.companion_log(settings), WAIT_S, 0.1)

    def resize_ended(self, settings: str, job_id: int) -> None:
        """Wait until a resize of the job was begun and has ended."""

        def ended() -> bool:
            if (self._host(settings).parent / DATABASE).exists():
                with suppress(StoreError), self.store(settings) as store:
                    return any(resize.ended is not None for resize in store.resizes(job_id))
            return False

        until(ended, lambda: self.companion_log(settings), WAIT_S, 0.2)

    def stay(self, settings: str) -> Path:
        """A file: while it is there `tests.endtoend.scripted` leaves a parked job so, and does not end."""
        return self._host(settings).with_name(STAY)

    def store(self, settings: str) -> Store:
        return Store.open(f"sqlite:///{self._host(settings).parent / DATABASE}", "here", read_only=True)

    def why(self, settings: str, job_id: int, user: str = "alice") -> dict[str, Any]:
        command = ["slurm-ones", "why", str(job_id), "--config", settings, "--json"]
        told: dict[str, Any] = json.loads(self.cluster.run(command, user=user).stdout)
        return told

    def _host(self, path: str) -> Path:
        return self.cluster.scratch / Path(path).relative_to("/scratch")

    # -- the end -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """End companions and jobs, and wait until the nodes are free.

        Slurm knows ended jobs for five minutes more: what they reported goes, or the next test's companion would learn
        from it.
        """
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        self.cluster.run(["scancel", "--user=alice"], user="root")
        self.cluster.run(["scancel", "--user=bob"], user="root")

        def left() -> str:
            return self.cluster.run(["squeue", "-h", "-o", "%i %T"], user="root").stdout

        until(lambda: not left(), lambda: f"jobs that do not end: {left()}", WAIT_S, LOOK_S)
        known = self.cluster.run(["squeue", "-h", "--states=all", "-o", "%F %Z"], user="root").stdout
        places = dict.fromkeys(tuple(line.split(" ", 1)) for line in known.splitlines())
        folders = [
            f"{where}/{name(int(job_id))}" for job_id, where in places for name in (directory_name, pointer_name)
        ]
        self.cluster.run(["rm", "-rf", *folders], user="root")
