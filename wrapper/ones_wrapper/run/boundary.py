"""Step boundaries, at which all ranks agree on what orders and signals request, and act on it together.

An agreement begins at one boundary and is acted on at the next. It is an all-reduce (maximum) of three integers. The
first is n, plus `_ASKS` if a rank has a request: the ranks agree at every n-th boundary, and rank 0 chooses n. The
second and third are the most and the fewest gradient exchanges that any rank has begun; the two must be equal. If a
rank has a request, a second all-reduce of eleven integers follows (and two more for each rank, if shares are uneven).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ones_wrapper.files.job_io import SAVE, STOP, OrderReader, OwnerRequests
from ones_wrapper.group import Group
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.process.hooks import FLAGS, Flags
from ones_wrapper.protocol import DRAIN_WAIT_S, Order
from ones_wrapper.script.stuck import fewer_passes

SHARE = 0.01
"""Largest fraction of the training time that agreements may take, unless they would then be over `LONGEST_S` apart."""
LONGEST_S = 1.0
"""Longest time between two agreements, in seconds. If a step takes longer, each step boundary has an agreement."""
EVERY_S = 0.1
"""Shortest time between two agreements, in seconds. At most `MOST_LEFT_OUT` boundaries in a row are left out for it."""
MOST_LEFT_OUT = 3
"""Largest number of consecutive boundaries that are left out because of `EVERY_S`."""
HELD_S = 30.0
"""Longest delay of requests, in seconds, because a rank has gradients that its optimizer has not used."""
_ASKS = 2**32
"""Number that a rank with a request adds to the first integer of an agreement (see the module). It is larger than any
n."""

CHECKPOINT_DUE, COPY_DUE = 1, 2
"""Values of `due`: rank 0 itself finds that a checkpoint, or a copy in the nodes' memory, is due."""

BY_SIGNAL, BY_OWNER = 1, 2
"""Causes of a stop. The owner's stop is permanent, and so has the higher number."""


@dataclass(frozen=True)
class Agreement:
    """Actions of all ranks at this step boundary."""

    stop: int
    """0, `BY_SIGNAL` or `BY_OWNER`."""
    checkpoint: bool
    number: int
    """Number of the newest order; 0 for none."""
    wanted: int
    """Global batch of the newest order, in samples; 0 for none."""
    drain: bool
    measure: bool
    """True if the ranks add up their measurements of the gradient noise."""
    behind: bool
    """True if a checkpoint may be written in the background: no owner or signal requested it."""
    plan: int = 0
    """Generation of the newest plan in a job of blocks; 0 for none."""
    change: int = 0
    """Generation to which the ranks change now; 0 for none."""
    copy: bool = False
    """True if a copy in the nodes' memory is due."""
    measured: tuple[int, ...] = ()
    """Numbers of all ranks from `Uneven.proposal`; empty if shares are even."""


class Boundary:
    """The step boundaries of one run."""

    def __init__(self, group: Group, flags: Flags) -> None:
        self._group, self._flags = group, flags
        self._later: Callable[[], list[int]] | None = None
        self._proposed: list[int] = []
        self._began_s = self._held_since = 0.0
        self._counted = 0
        self.exchanges: Callable[[], int] = lambda: 0
        """Function that returns the number of gradient exchanges begun on this rank; it must be equal on all ranks."""
        self.members: Blocks | None = None
        """The job's blocks, whose requests are in the agreement; None in a plain job."""
        self.measured: Callable[[int, int], list[int]] = lambda rank, world: []
        self.lead(None, None, 0)
        self.ranks_changed(0, 0)

    @property
    def order(self) -> Order | None:
        """The newest order on rank 0; None on other ranks."""
        return self._orders.order if self._orders is not None else None

    def lead(self, orders: OrderReader | None, requests: OwnerRequests | None, restart: int) -> None:
        """Read orders and requests for the run `restart` from now on. Both readers are None except on rank 0. Not
        collective."""
        self._orders, self.requests, self._restart = orders, requests, restart
        self._told = (0, 0)

    def ranks_changed(self, applied: int, answered: int) -> None:
        """Begin with new ranks. The previous ranks must have no unfinished agreement. Not collective."""
        assert self._later is None
        self.applied, self.answered = applied, answered
        """Number of the order whose batch is used, and of the last drain that was carried out."""
        self._skip, self._cost_s = 0, 0.0
        self._told = (0, 0)
        """(number, batch) of the last order in this rank's proposals."""
        self._quiet = Agreement(0, False, 0, 0, False, False, True)
        """Agreement for boundaries at which no rank has a request."""

    def _order(self) -> Order | None:
        if self._orders is None:
            return None
        if self._flags.look:
            self._flags.look = False
            self._orders.skip_wait()
            if self.members is not None:
                self.members.look()
        return self._orders.poll()

    def first_agreement(self) -> Agreement:
        """Return the agreement before the first step, which contains an order's batch. A drain waits for the first
        boundary."""
        self._proposed = self._proposal(0, int(self._flags.checkpoint), 1, False, 0)
        return self._agreed(self._group.maximum(self._proposed))

    def start_agreement(self, step_s: float, due: int, measure: bool) -> None:
        """Begin an agreement of all ranks on their requests: a checkpoint, a change, a stop.

        All ranks call this at every step boundary, after they have acted on the last agreement. The all-reduce runs
        during the next step, so that no rank waits. If steps are short, some calls do nothing. `step_s` is the length
        of a step in seconds. `due` is `CHECKPOINT_DUE`, `COPY_DUE` or 0. `measure` is True if measurements of the
        gradient noise are to be added up. Only rank 0's `due` and `measure` count.
        """
        if self._skip > 0:
            self._skip -= 1
            return
        first, owner = self._group.rank == 0, False
        if asked := self._flags.checkpoint:  # cleared only if seen: a signal may come in between
            self._flags.checkpoint = False
        if self.requests is not None and self.requests.due():
            owner = self.requests.requested(STOP)
            if self.requests.requested(SAVE):
                self.requests.remove(SAVE)
                asked = True
        interval = self._interval(step_s)
        due = due if first else 0
        proposal = self._proposal(BY_OWNER if owner else 0, int(asked), interval, first and measure, due)
        word = interval if first else 0
        self._proposed = proposal
        started = time.perf_counter()
        self._counted = self.exchanges()
        word += _ASKS if self._asks(proposal) else 0
        self._later = self._group.maximum_later([word, self._counted, -self._counted])
        self._began_s = time.perf_counter() - started

    def finish_agreement(self, unused: bool = False) -> Agreement | None:
        """Return the agreement that was begun at the last boundary; None if there was none. All ranks call this. All
        requests are delayed if any rank has `unused` gradients, which no optimizer has used."""
        if self._later is None:
            return None
        later, self._later = self._later, None
        started = time.perf_counter()
        word, most, least = later()
        cost = self._began_s + time.perf_counter() - started
        # The shortest of late: a longer time is waiting for a slower rank, for which the step would wait anyway.
        self._cost_s = min(self._cost_s * 1.1, cost) if self._cost_s else cost
        if most != -least:
            raise RuntimeError(fewer_passes(self._group.rank, most - self._counted))
        if word < _ASKS:
            self._skip = word - 1
            return self._quiet
        *proposal, held = self._group.maximum([*self._proposed, int(unused and self._may_hold())])
        if held:
            if self._proposed[1]:
                self._flags.checkpoint = True
            self._skip = 0
            return self._quiet
        self._held_since = 0.0
        agreed = self._agreed(proposal)
        if agreed.drain:
            self.answered = agreed.number
        return agreed

    def _may_hold(self) -> bool:
        self._held_since = self._held_since or time.monotonic()
        return time.monotonic() - self._held_since < HELD_S

    def _interval(self, step_s: float) -> int:
        if step_s <= 0 or self._group.world == 1:
            return 1
        enough = min(round(EVERY_S / step_s), MOST_LEFT_OUT + 1)
        return max(1, min(max(round(self._cost_s / (SHARE * step_s)), enough), int(LONGEST_S / step_s)))

    def _asks(self, proposal: list[int]) -> bool:
        """Return True if this rank's proposal is news for other ranks."""
        stop, asked, number, wanted, drain, _, look, due, plan, change, *measured = proposal
        new = any(measured[: len(measured) // 2])  # times; the samples that ranks hold are of no use without times
        return bool(stop or asked or drain or look or due or plan or change or new) or (number, wanted) != self._told

    def _proposal(self, owner: int, checkpoint: int, interval: int, measure: bool, due: int) -> list[int]:
        order, members = self._order(), self.members
        number = order.number if order else 0
        stops = self._flags.stop and (members is None or members.stops())
        stops = stops or (members is not None and members.stop_all())
        wanted = 0
        if order and (members is None or members.trains_as(order.blocks)):
            wanted = order.batch or 0
        drains = order is not None and order.drain and order.restart == self._restart
        return [
            max(owner, BY_SIGNAL if stops else 0),
            checkpoint,
            number,
            wanted,
            int(drains and number > self.answered),
            interval if self._group.rank == 0 else 0,
            int(measure),
            due,
            *(members.proposal() if members is not None else (0, 0)),
            *self.measured(self._group.rank, self._group.world),
        ]

    def _agreed(self, proposal: list[int]) -> Agreement:
        stop, asked, number, wanted, drain, interval, look, due, plan, change, *measured = proposal
        # While a change of ranks is under way nobody waits longer than needed.
        self._skip = 0 if plan else interval - 1
        self._told = (self._proposed[2], self._proposed[3])
        self._quiet = Agreement(0, False, number, wanted, False, False, True)
        also = (plan, change, due == COPY_DUE and not (asked or change), tuple(measured))
        saves = bool(asked or due == CHECKPOINT_DUE)
        return Agreement(stop, saves, number, wanted, bool(drain), bool(look), not asked, *also)

    def wait(self, number: int, over: bool) -> tuple[bool, bool]:
        """Return (stop, end of the wait), equal on all ranks. They call this repeatedly while they are drained by order
        `number`.

        The wait ends after a newer order; a newer drain is then obeyed at the next boundary. It also ends if rank 0's
        `over` is True, because the requeue has not come in time.
        """
        order = self._order()
        newer = order is not None and order.number > number
        carry_on = newer or (over and self._group.rank == 0)
        stop, go = self._group.maximum([int(self._flags.stop), int(carry_on)])
        return bool(stop), bool(go)


DRAIN_POLL_S = 0.1
"""Seconds between two calls of `Boundary.wait`."""


def wait_for_requeue(boundary: Boundary, number: int, goodbye: Callable[[], None]) -> str:
    """Wait for the requeue after drain order `number`. Return why training continues, or '' if a signal requests a
    stop. Collective. At a requeue `srun` ends the ranks almost at once, so that each rank calls `goodbye` as soon as it
    gets the signal."""
    wait_s = float(os.environ.get("ONES_DRAIN_WAIT_S") or DRAIN_WAIT_S)
    started = time.monotonic()
    while True:
        over = time.monotonic() - started > wait_s
        stop, carry_on = boundary.wait(number, over)
        if stop:
            return ""
        if carry_on:
            return "no requeue came" if over else "a newer order came"
        until = time.monotonic() + DRAIN_POLL_S
        while time.monotonic() < until and not FLAGS.stop:
            time.sleep(0.005)
        if FLAGS.stop:
            goodbye()
