"""The way back: a resize that cannot be had gives the job its old shape and batch again."""

from __future__ import annotations

import logging

from ones_db import ResizeRecord
from ones_wrapper.protocol import Order
from slurm_ones.act.orders import OrderError
from slurm_ones.act.states import State
from slurm_ones.act.steps import Steps
from slurm_ones.rules.reserved import new_of, target_of
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.model import Job
from slurm_ones.slurm.reshape import has_shape

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
        try:
            self._put_back(resize, job)
        except Refused as error:
            # Not to be held for it: it is tried again of the job that waits.
            return self._to(resize, State.RELEASING_BACK, f"the old shape was refused: {error}")
        return self._to(resize, State.RELEASING_BACK)

    def _put_back(self, resize: ResizeRecord, job: Job) -> None:
        """Its old batch and shape; raises `Refused` where Slurm does not take the shape."""
        if resize.restart >= 0:
            try:
                self._order(job, Order(self._next_number(job), resize.restart + 1, resize.old_batch))
            except OrderError as error:
                log.warning("job %d: its batch could not be put back: %s", job.job_id, error)
        self.client.reshape(job.job_id, target_of(resize))

    def _releasing_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._release(resize, job, State.WAITING_BACK, State.STARTING_BACK)

    def _waiting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        if job.running:
            deadline = self.clock() + self.settings.start_timeout_s
            return self._to(resize, State.STARTING_BACK, deadline=deadline)
        late = self._late(resize)
        if job.pending and has_shape(job, new_of(resize)) and not has_shape(job, target_of(resize)):
            # Refused a moment ago, or not asked for yet.
            if self._due(resize):
                try:
                    self._put_back(resize, job)
                except Refused as error:
                    log.warning("job %d: the old shape was refused: %s", job.job_id, error)
                else:
                    return self._handle(resize, self.client.job(job.job_id))
            if not late:
                return resize
        if resize.restart < 0 or job.held or late:
            return self._settle(resize, job)
        return resize

    def _starting_back(self, resize: ResizeRecord, job: Job) -> ResizeRecord:
        return self._greet(resize, job)
