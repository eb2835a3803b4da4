"""What a run tells: reports to the companion, and a word to its owner where something is wrong."""

from __future__ import annotations

from ones_wrapper.mailbox import Outbox, say
from ones_wrapper.meter import Meter
from ones_wrapper.protocol import Bye, Report, Throughput


class Reporter:
    """The reports of one rank's run; only rank 0 has an outbox. Not collective."""

    def __init__(self, outbox: Outbox | None, meter: Meter) -> None:
        self._outbox = outbox
        self._meter = meter
        self._warned = self._left = False

    def send(self, report: Report | None) -> None:
        """Send a report, where there is one."""
        if report is not None and self._outbox is not None:
            self._outbox.send(report)

    def stretch(self, report: Throughput | None) -> None:
        """Send a stretch's report, and say what its owner should not find out at the end."""
        self.send(report)
        if report is not None and report.nonfinite and not self._warned and self._outbox is not None:
            self._warned = True
            say(f"the loss is not a finite number (by step {report.step}); training goes on, and it is reported")

    def flush(self) -> None:
        """Send the stretch so far: what follows is no step, or one at another batch."""
        self.stretch(self._meter.flush())

    def bye(self, reason: str, step: int, code: int, note: str) -> None:
        """Send the last report; later calls do nothing."""
        if not self._left:
            self._left = True
            self.flush()
            self.send(Bye(reason, step, code, note))
