"""Control of a run by orders, signals and the job's owner, at the same step boundary on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ones_wrapper.files.job_io import STOP, OrderReader, OwnerRequests
from ones_wrapper.process.ending import flush_files
from ones_wrapper.process.exit_codes import DONT_RESTART, STOP_CODE
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.process.log import log
from ones_wrapper.run.boundary import BY_OWNER, Agreement, Boundary, wait_for_requeue
from ones_wrapper.run.keeping import Keeping
from ones_wrapper.run.records import Records
from ones_wrapper.run.settings import Common
from ones_wrapper.run.sizes import StepSizes


class Control:
    """The control of one run. Methods are collective unless they say otherwise."""

    def __init__(
        self, common: Common, sizes: StepSizes, records: Records, keeping: Keeping, leaving: Callable[[int], None]
    ) -> None:
        """`leaving` is called with the exit code before all ranks end."""
        self._common, self._group, self._progress, self._loop = common, common.group, common.progress, common.loop
        self._sizes, self._records, self._keeping, self._leaving = sizes, records, keeping, leaving
        self.boundary = Boundary(common.group, FLAGS)
        if common.identity.leads:
            self.lead(common.identity.restart)
        self.boundary.exchanges = lambda: common.loop.exchanges.begun
        if sizes.uneven is not None:
            self.boundary.measured, records.meter.watch = sizes.uneven.proposal, sizes.uneven.watch
        self._measured_at = time.monotonic()

    def lead(self, restart: int) -> None:
        """Make rank 0 read the orders for the run `restart` from now on. Called on all ranks, but not collective."""
        common = self._common
        if self._group.rank == 0:
            orders = OrderReader(common.directory, restart, common.spool, common.identity.job_id)
            self.boundary.lead(orders, OwnerRequests(common.directory), restart)
        else:
            self.boundary.lead(None, None, restart)

    def agree(self) -> Agreement | None:
        """Return the agreement for this step boundary; None if there is none."""
        self._keeping.report_finished()
        self._sizes.batch_fixed()
        FLAGS.keep()
        return self.boundary.finish_agreement(self._loop.unused)

    def propose(self) -> None:
        """Begin the next agreement with this rank's requests. It completes during the next step."""
        records, noise = self._records, self._loop.noise
        due = self._keeping.due() if self._group.rank == 0 else 0
        measure = noise is not None and time.monotonic() - self._measured_at >= records.every_s
        self.boundary.start_agreement(records.meter.step_s, due, measure)

    def carry_out(self, agreed: Agreement) -> None:
        """Act on an agreement of all ranks."""
        if agreed.measure:
            self._measure_noise()
        if agreed.wanted and agreed.number != self.boundary.applied:
            self.boundary.applied = agreed.number
            self._change_batch(agreed.wanted, agreed.number)
        self._sizes.divide(agreed.measured)
        if agreed.stop == BY_OWNER:
            self._stop_for_good()
        elif agreed.stop:
            flush_files()  # the checkpoint may take longer than Slurm waits
            self._keeping.save("before the stop that a signal asked for")
            self._leave("signal", STOP_CODE)
        elif agreed.drain:
            self._drain(agreed.number)
        elif agreed.checkpoint and agreed.behind and self._keeping.state is not None:
            self._keeping.save_behind()
        elif agreed.checkpoint:
            self._keeping.save("in passing")
        elif agreed.copy:
            self._keeping.copy()

    def _measure_noise(self) -> None:
        noise, progress = self._loop.noise, self._progress
        if noise is None:
            return
        self._records.meter.settle()
        noise.exchange()
        progress.noise, progress.noise_low = noise.samples or 0.0, noise.low
        self._measured_at = time.monotonic()
        before, changed = self._sizes.spec.grown, self._sizes.admit()
        if self._sizes.spec.grown != before:
            self._sizes.write_spec()
        if changed:
            self._records.flush()
            self._records.batch_changed(None, None)

    def _change_batch(self, wanted: int, number: int) -> None:
        self._records.flush()
        sizes, old = self._sizes, self._sizes.batch
        if sizes.order(wanted, number):
            sizes.put_in_force()
            sizes.admit()
            self._records.batch_changed(old, number)

    def _drain(self, number: int) -> None:
        """Write and report a checkpoint, and wait for the requeue. Returns if the requeue does not come, or after a
        newer order."""
        # First: once the checkpoint is reported, the companion may requeue, and the ranks have hardly a moment left.
        flush_files()
        if not self._keeping.save(f"for order {number}", number):
            return
        goodbye = partial(self._records.bye, "drained", STOP_CODE)
        why = wait_for_requeue(self.boundary, number, goodbye)
        if not why:
            self._leave("drained", STOP_CODE)
        self._group.say(f"carrying on after order {number}: {why}")

    def _stop_for_good(self) -> None:
        saved = self._keeping.save(f"for {STOP}")
        if (requests := self.boundary.requests) is not None:
            requests.remove(STOP)
            log(
                f"{STOP}: "
                + ("stopped for good" if saved else "training goes on, since no checkpoint was written; touch it again")
            )
        if saved:
            self._leave("stopped", DONT_RESTART)

    def _leave(self, reason: str, code: int) -> None:
        self._leaving(code)
        self._records.bye(reason, code)
        # If a rank ends with an error Slurm kills the others: none may before rank 0 has spoken.
        self._group.maximum([0])
        raise SystemExit(code)
