"""How long work says what it is doing, without knowing who listens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    """Steps have a start and an end; a detail replaces the one before it; a note stays."""

    def start(self, step: str) -> None: ...
    def detail(self, text: str) -> None: ...
    def end(self, step: str, seconds: float, failed: bool) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, step: str) -> None:
        pass

    def detail(self, text: str) -> None:
        pass

    def end(self, step: str, seconds: float, failed: bool) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@contextmanager
def step(report: Report, name: str) -> Iterator[None]:
    """Report what happens in the block as one step."""
    began = time.monotonic()
    report.start(name)
    failed = True
    try:
        yield
        failed = False
    finally:
        report.end(name, time.monotonic() - began, failed)
