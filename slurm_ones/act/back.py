"""The way back: a resize that cannot be had gives the job its old shape and batch again."""

from __future__ import annotations

import logging

from ones_db import ResizeRecord
from ones_wrapper.protocol import Order
from slurm_ones.act.orders import OrderError
from slurm_ones.act.states import State
from slurm_ones.act.steps import Steps
from slurm_ones.observe.reserve import target_of
from slurm_ones.slurm.client import SlurmError, Unreachable
from slurm_ones.slurm.model import Job

log = logging.getLogger(__name__)


class WayBack(Steps):
    """The states of which the last is `rolled_back`."""

    def _holding_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if not job.pending:
            # It started at the new shape after all.
            return self._to(resize, State.RELEASING)
        if job.held:
            return self._to(resize, State.RESHAPING_BACK)
        return self._ask_to_hold(resize, job)

    def _reshaping_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if resize.restart >= 0:
            try:
                self._order(job, Order(self._next_number(job), resize.restart + 1, resize.old_batch))
            except OrderError as error:
                log.warning("job %d: its batch could not be put back: %s", job.job_id, error)
        try:
            self.client.reshape(job.job_id, target_of(resize))
        except Unreachable:
            raise
        except SlurmError as error:
            # Not to be held for it: whatever shape Slurm has now is the owner's again.
            return self._to(resize, State.RELEASING_BACK, f"the old shape was refused: {error}")
        return self._to(resize, State.RELEASING_BACK)

    def _releasing_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._release(resize, job, State.WAITING_BACK, State.STARTING_BACK)

    def _waiting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            deadline = self.clock() + self.settings.start_timeout_s
            return self._to(resize, State.STARTING_BACK, deadline=deadline)
        if resize.restart < 0 or job.held or self._late(resize):
            return self._settle(resize, job)
        return resize

    def _starting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._greet(resize, job)
