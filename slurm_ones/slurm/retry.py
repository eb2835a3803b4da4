"""Asking a controller that does not answer again, politely."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import tenacity

from slurm_ones.slurm.client import Unreachable

T = TypeVar("T")
log = logging.getLogger(__name__)


def _note(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("%s; asking again (attempt %d)", error, state.attempt_number + 1)


def with_retries(
    call: Callable[[], T], *, attempts: int = 4, first_s: float = 0.5, most_s: float = 10.0, give_up_s: float = 30.0
) -> T:
    """The call's result; on `Unreachable` it is repeated with jittered exponential back-off, then that is raised.

    Slurm's own commands wait for a dead controller, too, so nothing is begun again after `give_up_s`.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Unreachable),
        stop=tenacity.stop_after_attempt(attempts) | tenacity.stop_after_delay(give_up_s),
        wait=tenacity.wait_exponential(multiplier=first_s, max=most_s) + tenacity.wait_random(0, first_s),
        before_sleep=_note,
        reraise=True,
    )(call)
