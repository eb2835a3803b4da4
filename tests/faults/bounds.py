"""How long a resize may take: what the settings say, counted in time in which there was a companion and a Slurm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ones_wrapper.protocol import DRAIN_WAIT_S
from slurm_ones.act.timing import ASK_AGAIN_S
from slurm_ones.act.transitions import State
from slurm_ones.config import Settings


def bound_s(settings: Settings) -> float:
    """The longest way through the states without a fault: there, given up in the queue, and back."""
    resize = settings.resize
    waits = resize.drain_timeout_s + DRAIN_WAIT_S + 2 * resize.max_wait_s + 2 * resize.start_timeout_s
    return waits + sum(not state.final for state in State) * (ASK_AGAIN_S + resize.advance_s)


@dataclass
class _Age:
    seconds: float
    struck: int
    set_back: int


class Ages:
    """The resizes under way, and for how long: time without a companion or a controller is not counted."""

    def __init__(self, settings: Settings) -> None:
        self._bound = bound_s(settings)
        # A fault costs the tick, and perhaps the next one, before the state's action comes again.
        self._fault = 3 * settings.interval_s + ASK_AGAIN_S
        resize = settings.resize
        # A clock that is set back begins the time of a state anew at most.
        self._longest = max(resize.drain_timeout_s, resize.max_wait_s, resize.start_timeout_s, DRAIN_WAIT_S)
        self._ages: dict[int, _Age] = {}
        self._told: set[int] = set()

    def passed(self, seconds: float, opened: Iterable[int], struck: int, set_back: int) -> list[int]:
        """So much time passed with these resizes open. `struck` is how many faults there were until then, and
        `set_back` how often the companion's clock was set back. Returns those that now take too long."""
        ages = {}
        late = []
        for resize in opened:
            age = self._ages.get(resize) or _Age(0.0, struck, set_back)
            age.seconds += seconds
            ages[resize] = age
            allowed = self._bound + (struck - age.struck) * self._fault + (set_back - age.set_back) * self._longest
            if age.seconds > allowed and resize not in self._told:
                self._told.add(resize)
                late.append(resize)
        self._ages = ages
        return late
