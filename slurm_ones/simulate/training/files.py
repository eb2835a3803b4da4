"""The files of a simulated job: the bytes that the wrapper writes, where it writes them."""

from __future__ import annotations

from pathlib import Path

from ones_wrapper.protocol import (
    CHECKPOINTS,
    MANIFEST,
    ORDERS,
    SPEC,
    Order,
    Report,
    Spec,
    decode_order,
    directory_name,
    encode,
    encode_report,
    reports_name,
)

KEPT = 2
"""Checkpoints that stay: the newest, and the one before."""


class JobFiles:
    """One job's directory. Reports are gathered, and written by `flush`, before anybody can look."""

    def __init__(self, work_dir: Path, job_id: int) -> None:
        self.directory = work_dir / directory_name(job_id)
        self._orders = self.directory / ORDERS
        self._restart = 0
        self._number = 0
        self._lines: list[bytes] = []
        self._seen: tuple[int, int] | None = None
        self._checkpoints: list[str] = []
        self.order: Order | None = None
        """The order in force: the highest number that this run has read."""

    def open(self, restart: int, spec: Spec) -> None:
        """A run begins."""
        self.flush()
        if not self.directory.exists():
            self.directory.mkdir()
            (self.directory / CHECKPOINTS).mkdir()
        (self.directory / SPEC).write_bytes(encode(spec))
        self._restart, self._number = restart, 0

    def report(self, time: float, report: Report) -> None:
        """Append a line to the run's reports."""
        self._number += 1
        self._lines.append(encode_report(self._number, time, report))

    def flush(self) -> None:
        """Write what was reported."""
        if self._lines:
            with (self.directory / reports_name(self._restart)).open("ab", buffering=0) as file:
                file.write(b"".join(self._lines))
            self._lines.clear()

    def checkpoint(self, step: int) -> str:
        """Leave a complete checkpoint; returns its name. Older ones go."""
        name = f"step-{step:09d}"
        folder = self.directory / CHECKPOINTS
        if name not in self._checkpoints:
            (folder / name).mkdir()
            (folder / name / MANIFEST).write_bytes(b"{}\n")
            self._checkpoints.append(name)
        while len(self._checkpoints) > KEPT:
            old = folder / self._checkpoints.pop(0)
            (old / MANIFEST).unlink()
            old.rmdir()
        return name

    def newer_order(self) -> bool:
        """Look whether an order has come since the last look; `order` then has it."""
        try:
            info = self._orders.stat()
        except FileNotFoundError:
            return False
        seen = (info.st_ino, info.st_mtime_ns)
        if seen == self._seen:
            return False
        self._seen = seen
        order = decode_order(self._orders.read_bytes())
        if self.order is None or order.number > self.order.number:
            self.order = order
        return True

    def look_anew(self) -> None:
        """Look for an order as a run does that knows of none."""
        self._seen = self.order = None
        self.newer_order()
