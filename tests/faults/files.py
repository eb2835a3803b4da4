"""Files between job and companion, with everything that can go wrong on their way."""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ones_wrapper.protocol import (
    CHECKPOINTS,
    MANIFEST,
    ORDERS,
    SPEC,
    Batch,
    Checkpoint,
    Hello,
    Membership,
    Order,
    Report,
    Throughput,
    decode_report,
    directory_name,
    reports_name,
)
from slurm_ones import untrusted_files
from slurm_ones.act import orders
from slurm_ones.act.orders import OrderError, write_order
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.simulate.slurm.timeline import Timeline
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.untrusted_files import NotBelieved, read_from
from tests.faults.injector import READS, FaultInjector
from tests.faults.kinds import IN_REPORTS, FaultKind
from tests.faults.safety import BlockSafety, SafetyChecker

LATE_S = 400.0
"""How long reports are late at most."""
LATE_ORDER_S = 60.0
"""How long a job does not look at its orders at most."""
REORDERED_S = 20.0
"""How long an older order stands where a newer one was written, at most."""

_GARBAGE = (b"\x00\xff\xfe{{{{\n", b"[[[[\n", b"null\n", b'{"n":1\n', b"\n\n\n", "{\u202e}\n".encode())
_WRONG: tuple[dict[str, Any], ...] = (
    {"n": "one", "t": [], "kind": "hello"},
    {"n": 2**60, "t": 0, "kind": "bye", "reason": "finished", "step": 1},
    {"n": -1, "t": 1e308, "kind": "checkpoint", "name": "../../etc", "epoch": 0, "cursor": 0, "step": 0},
    {"n": 10**9, "t": {"a": {}}, "kind": ["throughput"]},
    {"n": True, "t": None, "kind": "epoch", "epoch": 1e9},
)


class FaultyFiles(JobFiles):
    """One job's directory. What it truly reported is kept beside what becomes of it."""

    def __init__(
        self,
        work_dir: Path,
        job_id: int,
        injector: FaultInjector,
        flaws: frozenset[FaultKind],
        clock: Callable[[], float],
    ):
        super().__init__(work_dir, job_id)
        self.truth: defaultdict[int, list[Report]] = defaultdict(list)
        """What each run reported."""
        self.reported_batch: int | None = None
        """Batch in force, as last reported."""
        self.reported_at = 0.0
        """When that was."""
        self._injector = injector
        self._flaws = flaws
        self._clock = clock
        self._late_until = 0.0
        self._reads_orders_from = 0.0
        self._told: Membership | None = None
        self.unread = False
        """No companion reads it any more."""
        self.offset_s = 0.0
        """Seconds by which its clock is ahead."""
        if FaultKind.JOB_CLOCK in flaws:
            self.offset_s = injector.random.choice((-7200.0, -120.0, -20.0, -2.0, 2.0, 20.0, 120.0, 7200.0))

    def readable(self, restart: int) -> Report | None:
        """The last report of that run of which the whole line stands in the file: no companion can know more."""
        path, written = self.directory / reports_name(restart), len(self.truth[restart])
        last: tuple[int, Report | None] = 0, None
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            with suppress(ValueError):
                number, _, report = decode_report(line)
                if last[0] < number <= written:
                    last = number, report
        return last[1]

    @property
    def honest(self) -> bool:
        """All that it reported is what happened, and arrived so."""
        return not self._flaws

    @property
    def lies(self) -> bool:
        """It may report a checkpoint that it never made."""
        return FaultKind.FALSE_CHECKPOINT in self._flaws

    def _shows(self, kind: FaultKind, share: float) -> bool:
        """Whether a flaw of this job shows now."""
        if kind in self._flaws and self._injector.enabled and self._injector.random.random() < share:
            self._injector.count(kind, self.directory.name)
            return True
        return False

    def report(self, time: float, report: Report) -> None:
        self.truth[self._restart].append(report)
        if isinstance(report, (Hello, Batch, Membership)):
            self.reported_batch, self.reported_at = report.batch, self._clock()
        if self.unread:
            return
        if self.offset_s and self._shows(FaultKind.JOB_CLOCK, 1.0):
            time = max(time + self.offset_s, 0.0)
        if isinstance(report, Throughput) and self._shows(FaultKind.LIES, 0.5):
            report = replace(report, samples=report.samples * 1000 + 7, noise=0.0, progress=2.0**50, cursor=2**52)
        if isinstance(report, Membership):
            if self._shows(FaultKind.SPLIT_VIEW, 0.4):
                super().report(time, self._contradicting(report))
            self._told = report
        super().report(time, report)

    def _contradicting(self, report: Membership) -> Membership:
        """Another block's view of the membership."""
        random = self._injector.random
        wrong = (
            self._told or report,
            replace(report, generation=report.generation + 1, blocks=(77,), restarts=(3,)),
            replace(report, generation=max(report.generation - 1, 0), blocks=tuple(reversed(report.blocks))),
            replace(report, generation=report.generation + 5, blocks=(0, 1, 2), restarts=(0, 0, 0), world=64),
            replace(report, restarts=()),
        )
        return random.choice(wrong)

    def flush(self) -> None:
        if self._flaws and self._lines:
            if self._clock() < self._late_until:
                return
            for kind in IN_REPORTS:
                if self._shows(kind, 0.15):
                    self._spoil(kind)
        super().flush()

    def open(self, restart: int, spec: Any) -> None:
        self._late_until = 0.0
        super().open(restart, spec)

    def _spoil(self, kind: FaultKind) -> None:
        lines, random = self._lines, self._injector.random
        match kind:
            case FaultKind.CUT_SHORT:
                lines[-1] = lines[-1][: random.randrange(len(lines[-1]))]
            case FaultKind.REPEATED:
                lines += lines
            case FaultKind.REORDERED:
                random.shuffle(lines)
            case FaultKind.MISSING:
                del lines[random.randrange(len(lines))]
            case FaultKind.GARBAGE:
                lines.insert(random.randrange(len(lines) + 1), random.choice(_GARBAGE))
            case FaultKind.WRONG_TYPES:
                lines.insert(random.randrange(len(lines) + 1), json.dumps(random.choice(_WRONG)).encode() + b"\n")
            case FaultKind.HUGE:
                lines.insert(
                    random.randrange(len(lines) + 1), b"9" * random.choice((20_000, 100_000, 1_200_000)) + b"\n"
                )
            case FaultKind.LATE:
                self._late_until = self._clock() + random.uniform(1.0, LATE_S)

    def checkpoint(self, step: int) -> str:
        if self._shows(FaultKind.JOB_DISK_FULL, 0.3):
            raise OSError(errno.ENOSPC, "No space left on device")
        name = super().checkpoint(step)
        if self._shows(FaultKind.NO_MANIFEST, 0.3):
            (self.directory / CHECKPOINTS / name / MANIFEST).write_bytes(b"")
        return name

    def newer_order(self) -> bool:
        if self._clock() < self._reads_orders_from:
            return False
        if FaultKind.PLAN_LATE in self._flaws and self._shows(FaultKind.PLAN_LATE, 0.02):
            self._reads_orders_from = self._clock() + self._injector.random.uniform(1.0, LATE_ORDER_S)
            return False
        if not super().newer_order():
            return False
        if self._shows(FaultKind.ORDER_LOST, 0.3):
            return False
        if self.order is not None and self.order.drain and self._shows(FaultKind.FALSE_CHECKPOINT, 0.3):
            name = self._checkpoints[-1] if self._checkpoints else "step-000000000"
            super().report(self._clock(), Checkpoint(name, 0, 0, 0, 0, 0.0, order=self.order.number))
        if self.order is not None and self.order.drain and self._shows(FaultKind.DRAIN_IGNORED, 0.3):
            self.order = replace(self.order, drain=False)
        return True


def _standing(job: WholeJob) -> bytes:
    """The text of the order in force; empty where there is none."""
    path = Path(job.work_dir, directory_name(job.job_id), ORDERS)
    return path.read_bytes() if path.exists() else b""


def _put_back_for_a_while(job: WholeJob, older: bytes, timeline: Timeline, seconds: float) -> None:
    """The order before takes the newer one's place, as where a file system shows two writes in the wrong order."""
    path = Path(job.work_dir, directory_name(job.job_id), ORDERS)
    newer = path.read_bytes()

    def write(text: bytes) -> None:
        path.with_name("put").write_bytes(text)
        path.with_name("put").rename(path)

    def right() -> None:
        if path.exists() and path.read_bytes() == older:
            write(newer)

    write(older)
    timeline.after(seconds, right)


@contextmanager
def faulty_access(
    injector: FaultInjector, checker: SafetyChecker, blocks: BlockSafety, timeline: Timeline
) -> Iterator[None]:
    """While it lasts, companions of this process write orders and read reports through faults."""

    def write(job: WholeJob, order: Order, spool: Path | None) -> None:
        injector.step(f"before order {order.number} to {job.job_id}", job.job_id)
        checker.check_order(job, order)
        if job.by_blocks:
            blocks.check_order(job, order)
        if injector.injects(FaultKind.ORDER_FULL):
            raise OrderError(f"{job.work_dir}: No space left on device")
        before = _standing(job)
        write_order(job, order, spool)
        checker.note_order(job.job_id, order)
        blocks.note_order(job, order)
        if before and injector.injects(FaultKind.ORDERS_REORDERED):
            _put_back_for_a_while(job, before, timeline, injector.random.uniform(1.0, REORDERED_S))
        injector.step(f"after order {order.number} to {job.job_id}", job.job_id)

    def read(directory: int | None, name: str, uid: int, offset: int, limit: int) -> tuple[bytes, int]:
        if name != SPEC and not name.startswith(reports_name(0)[:7]):
            return read_from(directory, name, uid, offset, limit)
        injector.step(f"read {name}", reads=True)
        if name.startswith(reports_name(0)[:7]) and injector.injects(FaultKind.READ_ERROR, READS):
            raise NotBelieved(f"{name}: Input/output error")
        return read_from(directory, name, uid, offset, limit)

    with mock.patch.object(orders, "write_order", write), mock.patch.object(untrusted_files, "read_from", read):
        yield
