"""Simulated Slurm in real time for this machine. Jobs of its first partition run as real processes."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_ones.demo import reaper
from slurm_ones.demo.jobs import SIMULATED, SIMULATED_JOBS, SLOTS, DemoJob, comment, workload
from slurm_ones.simulate.slurm.nodes import PartitionSpec
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program, Request
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Application, Hot, Submission
from slurm_ones.simulate.world import World
from slurm_ones.slurm.model import JobKey, Task

HERE = "this-machine"
"""Partition of the real trainings."""
NODES, GPUS = 4, 4
"""Number of simulated nodes, and number of GPUs on each."""
BLOCKS = 8
"""Number of tasks in each job array, as in our sbatch templates."""
SCRIPT = Path(__file__).parent / "scripts" / "spirals.py"
"""Training script that each rank runs. It needs torch."""
START_S = 3.0
"""Seconds that a simulated job takes to start."""
CLUSTER_SETTINGS = ClusterSettings(
    requeue_delay_s=1.0, schedule_s=0.3, backfill_s=2.0, ending_s=0.3, report_s=1.0, first_report_s=1.0
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "OMP_NUM_THREADS": "1",
    "ONES_LAUNCHER": "local",
    "ONES_BACKEND": "gloo",
    "ONES_REPORT_EVERY_S": "1",
}
"""Environment of the trainings, which use only CPUs and only the loopback network."""
SHIMS = ("scontrol", "squeue", "srun")
"""Commands of Slurm that failing scripts replace, so that no job id of the demo reaches a real Slurm."""
FAILS = '#!/bin/sh\necho "this is slurm-ones demo: there is no Slurm here" >&2\nexit 1\n'
ASKED = "cancelled"
CANCEL = f"""#!/bin/sh
for last; do :; done
echo "$last" >> "$(dirname "$0")/{ASKED}"
"""
"""Script in place of `scancel`, which jobs call only as `scancel --state=PENDING ARRAY`. It records the array's id."""

ANNOUNCE = 'echo "+$$"; exec "$@" >&2'
"""Shell script that prints its process group for the reaper, and then becomes the command."""


class Processes:
    """Processes of a demo. `close` ends all of them."""

    def __init__(self) -> None:
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._starter = ThreadPoolExecutor(1, "demo-starter")
        """Thread that starts and records processes. Ctrl-C, which interrupts the main thread, cannot come in
        between."""
        # Its thread is there from now on: one that Ctrl-C met as it began would not be waited for.
        self._starter.submit(os.getpid).result()

    def start(self, command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a process in `folder` that Ctrl-C does not reach. Raises RuntimeError after `close`."""

        def begin() -> subprocess.Popen[bytes]:
            with log.open("ab") as out:
                process = subprocess.Popen(
                    ["sh", "-c", ANNOUNCE, "sh", *command], env=env, cwd=folder, stdin=subprocess.DEVNULL,
                    stdout=self._reaper.stdin, stderr=out, start_new_session=True,
                )  # fmt: skip
            self._running[process.pid] = process
            return process

        return self._starter.submit(begin).result()

    def poll(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return the exit code of a process (128+n after signal n); None while it runs."""
        code = process.poll()
        if code is None:
            return None
        if self._running.pop(process.pid, None) is not None and self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.write(f"-{process.pid}\n".encode())
                self._reaper.stdin.flush()
        return 128 - code if code < 0 else code

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """End these processes, and wait for their end."""
        for process in processes:
            if self.poll(process) is None:
                reaper.signal_group(process.pid, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(reaper.GRACE_S)
            if self.poll(process) is None:
                reaper.signal_group(process.pid, signal.SIGKILL)
                process.wait()
                self.poll(process)

    def close(self) -> None:
        """End all running processes and the reaper."""
        self._starter.shutdown()
        self.end(*self._running.values())
        if self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.close()
        self._reaper.wait()


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables of a Slurm job, since the demo may run in one."""
    stale = ("SLURM_", "ONES_", "SBATCH_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(stale)}


def make_shims(folder: Path) -> str:
    """Write the scripts that replace Slurm's commands into `folder`. Return a PATH with this folder first."""
    folder.mkdir()
    for name, text in {**dict.fromkeys(SHIMS, FAILS), "scancel": CANCEL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def cancelled(folder: Path) -> list[int]:
    """Return the ids of the arrays that jobs have cancelled through `CANCEL` since the last call."""
    asked = folder / ASKED
    if not asked.exists():
        return []
    taken = asked.rename(folder / f"{ASKED}-taken")
    return [int(line) for line in taken.read_text().split() if line.isdigit()]


@dataclass
class ProcessProgram:
    """Program of one block (`simulated_job.Program`): each start runs `ones-run` on this machine."""

    task: Task
    command: Callable[[int], Sequence[str]]
    """Function that returns the `ones-run` command for a number of ranks."""
    env: Mapping[str, str]
    folder: Path
    """Directory from which the job was submitted. Its output files are written there, with Slurm's names."""
    processes: Processes
    batch: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, restart: int, gpus: Mapping[str, int]) -> None:
        array, task = self.task.array, self.task.task
        slurm = {
            "SLURM_ARRAY_JOB_ID": str(array),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_TASK_MIN": "0",
            "SLURM_JOB_ID": str(array + task),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_RESTART_COUNT": str(restart),
        }
        log = self.folder / f"slurm-{array}_{task}.out"
        command = self.command(sum(gpus.values()))
        self._process = self.processes.start(command, {**self.env, **slurm}, self.folder, log)

    def stop(self, *, killed: bool = False) -> float:
        """See `Program`. Wait until the processes have ended."""
        process, self._process = self._process, None
        if process is not None:
            if killed:
                reaper.signal_group(process.pid, signal.SIGKILL)
            self.processes.end(process)
        return 0.0

    def ended(self) -> int | None:
        """Return the exit code if the processes have ended by themselves since the last call, else None."""
        code = self.processes.poll(self._process) if self._process is not None else None
        if code is not None:
            self._process = None
        return code


GROWN_S = 60.0
"""Seconds after the start at which the second training is submitted even if the first has not grown."""


class _SimulatedNodes(ClusterSpec):
    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{SIMULATED}-{i}" for i in range(1, self.nodes + 1))

    def partitions(self) -> Iterator[PartitionSpec]:
        yield PartitionSpec(SIMULATED, self.names, self.gpus_per_node)


class _SimulatedJobs(World):
    def _request(self, submission: Submission, app: Application) -> Request:
        return replace(super()._request(submission, app), user=SIMULATED, partition=SIMULATED)


@dataclass
class Submitted:
    """Submitted real training, with the program of each of its blocks."""

    job: DemoJob
    job_id: int
    programs: list[ProcessProgram]


class LocalSlurm:
    """Simulated Slurm that also runs real processes. `look` advances its time. `lock` is held during each change."""

    def __init__(
        self, folder: Path, processes: Processes, jobs: Sequence[DemoJob], simulated: int = len(SIMULATED_JOBS)
    ) -> None:
        """Prepare the real trainings `jobs`, and the first `simulated` of the simulated jobs."""
        self.lock = threading.RLock()
        self.submitted: list[Submitted] = []
        self.grown = False
        """True once a training has grown (set by `DemoProgress`). Before that, and before `GROWN_S`, only the first
        training is submitted: so it grows before it must shrink, even on a slow machine."""
        self._folder, self._processes = folder, processes
        self._upcoming = sorted(jobs, key=lambda job: job.at)
        here = PartitionSpec(HERE, (HERE,), SLOTS, default=False)
        spec = _SimulatedNodes(NODES, GPUS)
        self.world = _SimulatedJobs(
            workload(SIMULATED_JOBS[:simulated]), spec, folder, CLUSTER_SETTINGS,
            mechanism=Hot(launch_s=START_S), timeline=Timeline(time.time()), others=[here] if jobs else [],
        )  # fmt: skip
        self.client = SimulatedClient(self.world.cluster)
        self._env = clean_environment() | ENVIRONMENT | {"PATH": make_shims(folder / "bin")}

    @property
    def seconds(self) -> float:
        """Seconds since the start of the demo."""
        return time.time() - self.world.began

    @property
    def over(self) -> bool:
        """True once all jobs have been submitted and have ended."""
        return not self._upcoming and self.world.done

    def look(self) -> None:
        """Record ended processes, submit the jobs that are due, and advance simulated jobs to the present time."""
        with self.lock:
            for one in self.submitted:
                for program in one.programs:
                    code = program.ended()
                    if code is not None:
                        self.world.cluster.exited(program.task, code)
            for array_id in cancelled(self._folder / "bin"):
                self.client.cancel_waiting(array_id)
            while self._upcoming and self._upcoming[0].at <= self.seconds:
                if self.submitted and not self.grown and self.seconds <= GROWN_S:
                    break
                self._submit(self._upcoming.pop(0))
            self.world.pass_time(max(time.time() - self.world.timeline.now, 0.0))

    def _submit(self, job: DemoJob) -> None:
        request = Request(
            gpus_per_node=1,
            partition=HERE,
            name=job.name,
            comment=comment(SLOTS),
            work_dir=str(self._folder),
            array_tasks=tuple(range(BLOCKS)),
            throttle=1,
            user=getpass.getuser(),
            uid=os.geteuid(),
        )
        programs: list[ProcessProgram] = []
        own = [*job.options(SLOTS), f"--samples={job.samples}", f"--seed={len(self.submitted)}"]

        def command(ranks: int) -> list[str]:
            options = ["--blocks", f"--gpus-per-node={ranks}", str(SCRIPT)]
            return [sys.executable, "-m", "ones_wrapper.launch", *options, *own]

        def program(key: JobKey) -> Program:
            assert isinstance(key, Task)
            folder = self._folder / f"ones-{key.array}"
            env = {**self._env, "ONES_TRACE": str(folder / "trace-{restart}-{rank}.jsonl")}
            programs.append(ProcessProgram(key, command, env, self._folder, self._processes))
            return programs[-1]

        self.submitted.append(Submitted(job, self.world.cluster.submit(request, program), programs))
