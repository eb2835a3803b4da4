"""Command-line client: squeue, scontrol, sbatch, scancel and sstat, of any Slurm since 21.08.

The queue is read as squeue's columns. Single jobs are read as JSON, which has more fields but takes long for many jobs.
In both forms a user's text cannot pass for another field. Nodes, partitions and reservations are read from
`scontrol -o`, one line each: only operators name them, and the form of the lines has not changed in years.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

import tenacity

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import (
    ALREADY_ENDED,
    again_command,
    cancel_waiting_command,
    defer_command,
    hold_command,
    hold_tasks_command,
    release_commands,
    requeue_command,
    reshape_command,
    throttle_command,
)
from slurm_ones.slurm.client import (
    SWITCH_WAIT_S,
    NotPermitted,
    NotResizable,
    Refused,
    SlurmError,
    SlurmMissing,
    UnknownJob,
    Unreachable,
    reshape,
)
from slurm_ones.slurm.model import GpuUse, JobKey, JobState, Node, Queue, Quotas, SlurmJob, Snapshot, Task
from slurm_ones.slurm.parse import (
    BITSTR,
    COMMAND,
    FORMAT,
    columns_of,
    format_of,
    json_fault,
    nodes_of,
    parse_jobs,
    parse_licenses,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_quotas,
    parse_reservations,
    parse_topology,
    parse_usage_factors,
    separator,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

_ANSWERS: tuple[tuple[type[SlurmError], re.Pattern[str]], ...] = (
    (
        Unreachable,
        re.compile(
            r"unable to contact|socket timed out|connection (refused|reset|timed)|zero bytes|"
            r"(send|receive|recv) failure|communication|slurmctld.*(down|not respond)|rate limit|"
            # scontrol's answer to a request for a change if the controller is dead.
            r"unexpected message received",
            re.I,
        ),
    ),
    (UnknownJob, re.compile(r"invalid job id|job/step already completing|job.*not found", re.I)),
    (NotPermitted, re.compile(r"access/permission denied|invalid user id|operation not permitted", re.I)),
    (
        NotResizable,
        re.compile(
            r"update of this parameter|node count specification|requested node configuration|"
            r"invalid generic resource|requested (partition|time)|job is no longer pending|"
            r"invalid (qos|account|partition)",
            re.I,
        ),
    ),
)


_CPUS_PER_GPU = re.compile(r"\bCpusPerTres=gres:gpu(?::[^:\s]+)?:(\d+)")
_SENT = "Job is in transitional state, retrying"
MOST_NAMED = 10_000
"""Largest number of job ids in one command; the kernel allows 128 KiB for an argument."""


def error_of(what: str, answer: str) -> SlurmError:
    """Map Slurm's error text to a client error; an unknown text becomes a plain `Refused`."""
    text = " ".join(answer.split())[:500]
    kind = next((kind for kind, pattern in _ANSWERS if pattern.search(text)), Refused)
    return kind(f"{what}: {text or 'failed without a message'}")


def not_started(command: str, error: OSError) -> SlurmError:
    """Return the client error for a command that cannot be started."""
    if isinstance(error, FileNotFoundError):
        return SlurmMissing(f"{command}: no such command; is Slurm on the PATH?")
    return Unreachable(f"{command}: cannot be started: {error.strerror}")


def apart(jobs: Iterable[SlurmJob], array_id: int) -> list[SlurmJob]:
    """Return one job for each task in an array's records, in which Slurm lists waiting tasks together."""
    found = (job for job in jobs if job.array_id == array_id)
    return [replace(job, array_tasks=(task,)) for job in found for task in job.array_tasks]


def _log_retry(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("%s; asking again (attempt %d)", error, state.attempt_number + 1)


def with_retries(
    call: Callable[[], T], *, attempts: int = 4, first_s: float = 0.5, most_s: float = 10.0, give_up_s: float = 30.0
) -> T:
    """Return the result of `call`; after `Unreachable`, try again with jittered exponential back-off.

    Slurm's commands themselves wait for a controller that does not answer. So no attempt begins after `give_up_s`.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Unreachable),
        stop=tenacity.stop_after_attempt(attempts) | tenacity.stop_after_delay(give_up_s),
        wait=tenacity.wait_exponential(multiplier=first_s, max=most_s) + tenacity.wait_random(0, first_s),
        before_sleep=_log_retry,
        reraise=True,
    )(call)


class CommandClient:
    """Slurm through its commands, which must be on the PATH."""

    name = "command"

    def __init__(self, *, timeout_s: float = 30.0, keepalive: Callable[[], None] = lambda: None) -> None:
        """Create the client. `keepalive` is called before each command, so that a watchdog sees the process alive."""
        self._timeout_s = timeout_s
        self._keepalive = keepalive
        # Times are numbers, messages are English, and the user's own output formats are unset.
        self._env = {
            k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_"))
        }
        self._env |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C", **BITSTR}
        self._sstat = Sstat(self._env)

    def run(
        self,
        argv: Sequence[str],
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        enough: str = "",
        said: bool = False,
    ) -> str:
        """Run a command and return its standard output, or with `said` its standard error. A failed command raises the
        `SlurmError` for its message. Output that begins with `enough` counts as success at any exit code."""
        self._keepalive()
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                timeout=self._timeout_s,
                env={**self._env, **(environment or {})},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except OSError as error:
            raise not_started(argv[0], error) from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{argv[0]}: no answer within {self._timeout_s:.0f} s") from None
        # A user's text may have any encoding. Bytes that are not UTF-8 must not stop a tick.
        output = done.stdout.decode("utf-8", "replace")
        errors = done.stderr.decode("utf-8", "replace")
        if done.returncode and not (enough and output.startswith(enough)):
            raise error_of(" ".join(argv[:3]), errors or output)
        return errors if said else output

    def _ask(self, argv: Sequence[str]) -> str:
        """Run a command that changes nothing, with retries."""
        return with_retries(lambda: self.run(argv))

    @cached_property
    def _release(self) -> tuple[int, int]:
        return self.version()

    def version(self) -> tuple[int, int]:
        match = re.search(r"(\d+)\.(\d+)", self.run(["scontrol", "--version"]))
        if match is None:
            raise Refused("scontrol --version names no version")
        return int(match[1]), int(match[2])

    def config(self) -> dict[str, str]:
        # The output ends with a ping. If the ping fails, for example because slurmctld limits RPCs, the command fails
        # too.
        question = ["scontrol", "show", "config"]
        answer = with_retries(lambda: self.run(question, enough="Configuration data as of"))
        lines = (line.partition("=") for line in answer.splitlines())
        return {key.strip(): value.strip() for key, separator, value in lines if separator}

    def _queue(self) -> dict[int, SlurmJob]:
        def once() -> dict[int, SlurmJob]:
            # Slurm may have been upgraded since the last query.
            self._release = self.version()
            between, names = separator(), columns_of(self._release)
            return parse_queue(self.run(COMMAND, environment={FORMAT: format_of(names, between)}), names, between)

        return with_retries(once)

    def details(self, job_ids: Collection[int]) -> dict[int, SlurmJob]:
        wanted = set(job_ids)
        named, found = sorted(wanted), dict[int, SlurmJob]()
        for first in range(0, len(named), MOST_NAMED):
            with suppress(UnknownJob):  # squeue fails if it is asked only for jobs that it does not know
                found |= self._json(",".join(map(str, named[first : first + MOST_NAMED])))
        # 22.05 lists all jobs, whichever were requested.
        return {job_id: job for job_id, job in found.items() if job_id in wanted}

    def _json(self, job_ids: str) -> dict[int, SlurmJob]:
        def once() -> dict[int, SlurmJob]:
            text = self.run(["squeue", "--json", "--states=all", f"--jobs={job_ids}"])
            try:
                data: Any = json.loads(text)
            except ValueError as error:
                raise Refused(f"squeue --json: not JSON ({error}); is its serializer/json plugin installed?") from None
            # If the controller does not answer, a release may exit with status 0 and list no jobs, as 22.05 does. That
            # must not count as an empty queue.
            if fault := json_fault(data):
                raise Unreachable(f"squeue --json: {fault}")
            return parse_jobs(data)

        return with_retries(once)

    def nodes(self) -> dict[str, Node]:
        """Read all nodes. `-d` shows their GPUs in use, even if AccountingStorageTRES lacks gres/gpu."""
        return parse_nodes(self._ask(["scontrol", "-o", "-d", "show", "nodes"]))

    def leaves(self) -> dict[str, str]:
        """Read the leaf switch of each node; {} without a topology, which some releases report as an error."""
        with suppress(Refused):
            return parse_topology(self._ask(["scontrol", "-o", "show", "topology"]))
        return {}

    def snapshot(self) -> Snapshot:
        jobs = self._queue()
        partitions = parse_partitions(self._ask(["scontrol", "-o", "show", "partitions"]))
        reservations = parse_reservations(self._ask(["scontrol", "-o", "show", "reservations"]))
        now = time.time()
        nodes = nodes_of(self.nodes(), jobs, reservations, now, self.leaves())
        licensed = any(job.licenses for job in jobs.values())
        licenses = parse_licenses(self._ask(["scontrol", "-o", "show", "licenses"])) if licensed else {}
        return Snapshot(now, jobs, nodes, partitions, reservations, licenses)

    def job(self, job_id: JobKey) -> SlurmJob:
        return self._look(job_id)

    def _look(self, job_id: JobKey) -> SlurmJob:
        """Read a job as JSON, because PySlurm shows neither a GPU count per job nor an exact task count."""
        found = self._json(str(job_id))
        if not isinstance(job_id, Task):
            job = found.get(job_id)
        else:
            job = next((job for job in apart(found.values(), job_id.array) if job.array_tasks == (job_id.task,)), None)
        if job is None:
            raise UnknownJob(f"job {job_id}: Slurm does not know it (any more)")
        return job

    def tasks(self, array_id: int) -> tuple[SlurmJob, ...]:
        found = self._json(str(array_id))
        tasks = apart(found.values(), array_id)
        if not tasks and array_id not in found:
            raise UnknownJob(f"array {array_id}: Slurm does not know it (any more)")
        return tuple(sorted(tasks, key=lambda job: job.array_tasks))

    def quotas(self, users: Collection[str]) -> Quotas:
        whose = [f"users={','.join(sorted(users))}"] if users else []
        found = parse_quotas(self._ask(["scontrol", "-o", "show", "assoc_mgr", *whose, "flags=assoc,qos"]))
        if not found.parents:  # without accounting there are no usage factors either
            return found
        try:
            answer = self.run(["sacctmgr", "-nP", "show", "qos", "format=name,usagefactor"])
        except SlurmError as error:  # slurmdbd does not answer: nothing essential depends on them
            log.info("no usage factors: %s", error)
            return found
        return replace(found, usage_factors=parse_usage_factors(answer))

    def gpu_use(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        return self._sstat.ask(job_ids)

    def submit(self, script: Path, arguments: Sequence[str] = (), *, directory: Path | None = None) -> int:
        answer = self.run(["sbatch", "--parsable", *arguments, str(script)], directory=directory)
        try:
            return int(answer.strip().splitlines()[-1].split(";")[0])
        except (ValueError, IndexError):
            raise Refused(f"sbatch: no job id in its answer: {answer[:200]!r}") from None

    def requeue_hold(self, job_id: JobKey) -> None:
        self.run(requeue_command(job_id))

    def hold(self, job_id: JobKey) -> None:
        self.run(hold_command(job_id))

    def hold_waiting(self, array_id: int, tasks: Collection[int] | None = None) -> None:
        asked = {task for job in self.tasks(array_id) if job.pending and not job.held for task in job.array_tasks}
        if tasks is not None:
            asked &= {*tasks}
        if not asked:
            return
        self.run(hold_tasks_command(array_id, asked))
        # A task that started meanwhile is held too, and would still be held after its next requeue.
        for job in self.tasks(array_id):
            if job.held and not job.pending and not job.ended and asked.issuperset(job.array_tasks):
                self.release(job.key, start_now=False)

    def update_shape(self, job: SlurmJob, shape: Shape, queue: Queue) -> None:
        """Send the update of shape, GPU type and queue, without reading the job back."""
        whole, kind = job.gpus_per_node == 0, job.kind
        tasks, each = self._release < (25, 11), 0
        if tasks and not whole:
            # 22.05 keeps the task count of the run before, and counts --cpus-per-gpu for each task. So a job that
            # shrank to one GPU got all CPUs of a node, and a job with four GPUs got the CPUs of one.
            shown = _CPUS_PER_GPU.search(self.run(["scontrol", "-o", "show", "job", str(job.key)]))
            each = int(shown[1]) if shown else 0
        words = reshape_command(
            job.key,
            shape,
            whole_nodes=whole,
            kind=kind,
            queue=queue,
            tasks=tasks,
            cpus_per_gpu=each,
            others=job.other_gres,
        )
        self.run(words)

    def reshape(self, job_id: JobKey, shape: Shape, *, kind: str | None = None, queue: Queue = Queue()) -> None:
        reshape(self._look, self.tasks, self.update_shape, job_id, shape, kind, queue)

    @property
    def _now(self) -> str:
        # Releases before 25.11 may requeue without a delay. A run may then start in the second in which the last one
        # was killed. Its node refuses it ("Job credential revoked"), and the job fails.
        return "now+2" if self._release < (25, 11) else "now"

    def release(self, job_id: JobKey, *, start_now: bool = True) -> None:
        for command in release_commands(job_id, start=self._now if start_now else ""):
            self.run(command)

    def defer(self, job_id: JobKey, until: float) -> None:
        # Unix seconds mean the same in every time zone, and in the night when clocks change.
        self.run(defer_command(job_id, f"uts{math.ceil(until)}" if until > time.time() else self._now))

    def few_switches(self, job_id: JobKey, most: int) -> None:
        switches = f"{most}@{SWITCH_WAIT_S / 60:02.0f}:00" if most else "0"
        self.run(["scontrol", "update", f"JobId={job_id}", f"Switches={switches}"])

    def signal(self, job_id: JobKey, signal: str, *, batch: bool = False) -> None:
        # The job is read first, because scancel reports no error for a job that does not exist.
        job = self._look(job_id)
        command = ["scancel", f"--signal={signal}", *(["--full"] if batch else [])]
        if not job.array_id:
            self.run([*command, str(job_id)])
            return
        if job_id == job.array_id:
            keys = [task.key for task in self.tasks(job_id) if task.running]
        else:
            keys = [job.key] if not job.pending or signal == "KILL" else []
        if not keys:
            raise Refused(f"job {job_id} waits: there is nothing that could be sent {signal}")
        for key in keys:
            self._signal_once([*command, str(key)])

    def _signal_once(self, argv: Sequence[str]) -> None:
        """Send a signal once. If other tasks of the array wait, Slurm answers with an error, and scancel would repeat
        the signal for minutes. So scancel is killed as soon as it announces a repetition."""
        self._keepalive()
        printed: list[str] = []
        null = subprocess.DEVNULL
        try:
            began = subprocess.Popen(
                [*argv, "--verbose"], env=self._env, stdin=null, stdout=null, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise not_started(argv[0], error) from None
        with began as process:
            guard = threading.Timer(self._timeout_s, process.kill)
            guard.start()
            assert process.stderr is not None
            for line in process.stderr:
                printed.append(line.decode("utf-8", "replace"))
                if _SENT in printed[-1]:
                    process.kill()
                    break
            else:
                process.wait()
            late = not guard.is_alive()
            guard.cancel()
        if late:
            raise Unreachable(f"{argv[0]}: no answer within {self._timeout_s:.0f} s")
        if process.returncode and not (printed and _SENT in printed[-1]):
            faults = [line for line in printed if "error" in line or "Unknown" in line]
            raise error_of(" ".join(argv[:3]), " ".join(faults))

    def reuse(self, task: Task) -> None:
        job = self._look(task)
        if job.pending:
            return
        # A cancelled task would run again, and a running one would be killed.
        if not job.ended or job.completing or job.state is JobState.CANCELLED:
            shown = "+".join([job.state.value, *sorted(job.flags)])
            raise Refused(f"task {task} is {shown}: only one that has ended by itself waits again")
        self.run(again_command(task, hold=True))

    def throttle(self, array_id: int, most: int) -> None:
        try:
            self.run(throttle_command(array_id, most))
        except Refused as refused:
            if ALREADY_ENDED not in str(refused):
                raise
            tasks = self.tasks(array_id)
            if {job.throttle for job in tasks if not job.ended} - {most} or not tasks:
                raise

    def cancel_waiting(self, array_id: int) -> None:
        # scancel fails for an array that has ended as a whole.
        with suppress(UnknownJob):
            self.run(cancel_waiting_command(array_id))


MOST = 4 << 20
"""Largest number of bytes read from one answer of `sstat`."""
MOST_MEMORY = 1 << 60
"""Largest accepted GPU memory in bytes; the database cannot store more."""
_STEP = re.compile(r"(\d{1,10})\.[^|\n]*\|(.*)", re.ASCII)
_USE = re.compile(r"(?:^|,)gres/gpuutil=(\d{1,9})(?:,|$)", re.ASCII)
_MEMORY = re.compile(r"(?:^|,)gres/gpumem=(\d{1,15})([KMGT]?)", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_gpu_use(text: str) -> dict[int, GpuUse]:
    """Parse GPU use by job from `sstat -nPa --format=JobID,TRESUsageInTot`; steps that show none are skipped."""
    found: dict[int, GpuUse] = {}
    for line in text.splitlines():
        step = _STEP.fullmatch(line)
        use = _USE.search(step[2]) if step else None
        if step and use:
            memory = _MEMORY.search(step[2])
            size = int(memory[1]) * _UNITS[memory[2]] if memory else 0
            before = found.get(int(step[1]), GpuUse())
            whole = min(before.memory_bytes + size, MOST_MEMORY)
            found[int(step[1])] = GpuUse(before.gpus + int(use[1]) / 100, whole)
    return found


class Sstat:
    """GPU use of running jobs from `sstat`: one call starts the query, the next reads its result.

    Callers other than root, SlurmUser and the jobs' owner reportedly get nothing (not tested here).
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._asked: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def ask(self, job_ids: Collection[int]) -> dict[int, GpuUse]:
        """Return the previous query's result, if any, and start the next query. An unfinished query is killed."""
        found = self._answer()
        if job_ids:
            command = ["sstat", "-nPa", "--format=JobID,TRESUsageInTot", f"--jobs={','.join(map(str, job_ids))}"]
            output = tempfile.TemporaryFile()  # noqa: SIM115
            try:
                null = subprocess.DEVNULL
                self._asked = subprocess.Popen(command, stdin=null, stdout=output, stderr=null, env=self._env), output
            except OSError:  # there is no sstat, or the job ids do not fit one argument
                output.close()
        return found

    def _answer(self) -> dict[int, GpuUse]:
        if self._asked is None:
            return {}
        (process, output), self._asked = self._asked, None
        with output:
            if process.poll() is None:
                process.kill()
                # An sstat that hangs in the kernel is not waited for.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                return {}
            output.seek(0)
            return parse_gpu_use(output.read(MOST).decode("utf-8", "replace"))
