"""Step boundaries, at which all ranks act together: they agree on what orders and signals ask for.

The agreement is begun at one boundary and obeyed at the next. It is one maximum over three integers: whether any rank
asks for anything, and the most and fewest exchanges of gradients that ranks have begun, which must be equal. If one
asks, a second maximum over ten integers says for what (and two for each rank, if shares are uneven). If this would cost
more than `SHARE` of a step, or several steps make up `EVERY_S`, the ranks agree only at every n-th boundary. Rank 0
gives n, as part of the agreement.
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
"""Largest share of a step's time that agreements may take."""
LONGEST_S = 1.0
"""Most seconds between two agreements, if steps are shorter."""
EVERY_S = 0.1
"""Seconds between two agreements that suffice, however little an agreement costs: a request waits at most this long."""
MOST_LEFT_OUT = 3
"""Most boundaries in a row at which the ranks do not agree for the sake of `EVERY_S`."""
HELD_S = 30.0
"""Most seconds for which an agreement is put off while gradients wait for an optimizer's step."""
_ASKS = 2**32
"""Number that a rank with a request adds to the agreement's first integer. Rank 0's n is the part below."""

BY_SIGNAL, BY_OWNER = 1, 2
"""Causes of a stop; if both ask, the owner's is the one that lasts."""


@dataclass(frozen=True)
class Agreement:
    """Actions that all ranks take at this step boundary."""

    stop: int
    """0, `BY_SIGNAL` or `BY_OWNER`."""
    checkpoint: bool
    number: int
    """Number of the order in force, 0 for none."""
    wanted: int
    """Global batch that the order asks for, in samples; 0 for none."""
    drain: bool
    measure: bool
    """True if the measured gradient noise is summed up now."""
    behind: bool
    """True if the checkpoint may be written in the background, since nobody waits for it."""
    plan: int = 0
    """Generation of the newest plan of a job of blocks, 0 for none."""
    change: int = 0
    """The generation to change to now, 0 for none."""
    measured: tuple[int, ...] = ()
    """Speeds of ranks with uneven shares, as they measured them."""


class Boundary:
    """The step boundaries of one run."""

    def __init__(self, group: Group, flags: Flags) -> None:
        self._group, self._flags = group, flags
        self._later: Callable[[], list[int]] | None = None
        self._proposed: list[int] = []
        self._began_s = self._held_since = 0.0
        self._counted = 0
        self.exchanges: Callable[[], int] = lambda: 0
        """Returns the number of gradient exchanges that this rank has begun; it must be equal on all ranks."""
        self.members: Blocks | None = None
        """The job's blocks, which take part in the agreement; None in a plain job."""
        self.measured: Callable[[int, int], list[int]] = lambda rank, world: []
        self.lead(None, None, 0)
        self.ranks_changed(0, 0)

    @property
    def order(self) -> Order | None:
        """The order in force on rank 0; None on other ranks."""
        return self._orders.order if self._orders is not None else None

    def lead(self, orders: OrderReader | None, requests: OwnerRequests | None, restart: int) -> None:
        """Read the orders and requests of the run `restart` from now on; None on ranks but rank 0. Not collective."""
        self._orders, self.requests, self._restart = orders, requests, restart
        self._told = (0, 0)

    def ranks_changed(self, applied: int, answered: int) -> None:
        """Begin, or go on with new ranks. Not collective. No agreement of the previous ranks may be pending."""
        assert self._later is None
        self.applied, self.answered = applied, answered
        """Numbers of the order whose batch is in force, and of the last order to drain that was obeyed."""
        self._skip, self._cost_s = 0, 0.0
        self._told = (0, 0)
        """Number and batch of the order that this rank last sent to the others."""
        self._quiet = Agreement(0, False, 0, 0, False, False, True)
        """The agreement if no rank asks for anything; there is no order at first."""

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
        """Return the agreement before the first step: an order's batch counts, and its drain waits for a boundary."""
        self._proposed = self._proposal(0, int(self._flags.checkpoint), 1, False, False)
        return self._agreed(self._group.maximum(self._proposed))

    def start_agreement(self, step_s: float, due: bool, measure: bool) -> None:
        """Begin an agreement of all ranks on what is asked for now: a checkpoint, a change, an end. All ranks call this
        at every step boundary, after they obeyed the last agreement. The exchange goes on during the next step, so that
        no rank waits; if steps are short, some calls begin none. `step_s` is the length of a step in seconds. `due`
        says whether it is time for a checkpoint, and `measure` whether to sum up the measured gradient noise: rank 0
        decides both."""
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
        proposal = self._proposal(BY_OWNER if owner else 0, int(asked), interval, first and measure, first and due)
        word = interval if first else 0
        self._proposed = proposal
        started = time.perf_counter()
        self._counted = self.exchanges()
        word += _ASKS if self._asks(proposal) else 0
        self._later = self._group.maximum_later([word, self._counted, -self._counted])
        self._began_s = time.perf_counter() - started

    def finish_agreement(self, unused: bool = False) -> Agreement | None:
        """Return the agreement of the step that has just ended; None if there was none. All ranks call it. If any rank
        has `unused` gradients, the agreement is put off, and its requests are made again."""
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
        """Return whether other ranks must see this rank's proposal. They know an order that was sent before."""
        stop, asked, number, wanted, drain, _, look, due, plan, change, *measured = proposal
        new = any(measured[: len(measured) // 2])  # times; the samples that ranks hold are of no use without times
        return bool(stop or asked or drain or look or due or plan or change or new) or (number, wanted) != self._told

    def _proposal(self, owner: int, checkpoint: int, interval: int, measure: bool, due: bool) -> list[int]:
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
            int(due),
            *(members.proposal() if members is not None else (0, 0)),
            *self.measured(self._group.rank, self._group.world),
        ]

    def _agreed(self, proposal: list[int]) -> Agreement:
        stop, asked, number, wanted, drain, interval, look, due, plan, change, *measured = proposal
        # While a change of ranks is under way nobody waits longer than needed.
        self._skip = 0 if plan else interval - 1
        self._told = (self._proposed[2], self._proposed[3])
        self._quiet = Agreement(0, False, number, wanted, False, False, True)
        also = (plan, change, tuple(measured))
        return Agreement(stop, bool(asked or due), number, wanted, bool(drain), bool(look), not asked, *also)

    def wait(self, number: int, over: bool) -> tuple[bool, bool]:
        """Return (stop, carry on): all ranks call it again and again while drained by order `number`.

        A newer order calls the drain off; a newer drain is obeyed at the next boundary. `over` on rank 0 says that no
        requeue will come.
        """
        order = self._order()
        newer = order is not None and order.number > number
        carry_on = newer or (over and self._group.rank == 0)
        stop, go = self._group.maximum([int(self._flags.stop), int(carry_on)])
        return bool(stop), bool(go)


DRAIN_POLL_S = 0.1
"""Seconds between two checks for a signal, a newer order or the end of the wait, while drained."""


def wait_for_requeue(boundary: Boundary, number: int, goodbye: Callable[[], None]) -> str:
    """Wait for the requeue after order `number`; return why to carry on, empty if a signal asks to stop. Collective. At
    a requeue `srun` ends the ranks almost at once, so each rank calls `goodbye` as soon as the signal comes."""
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
