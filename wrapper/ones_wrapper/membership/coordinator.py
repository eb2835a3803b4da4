"""Coordinator in the leader's first process: reads orders, tracks ready and lost blocks, and publishes the next
membership on the board, the term's key-value store.

It runs in the thread of `Link`, so that training never waits. Rank 0 requests its proposal at step boundaries.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.membership.back_off import BackOff
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import forget_groups, form_s
from ones_wrapper.membership.plan import Member, Plan, decode_member, encode, next_plan
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.process.hang_detector import Standstill
from ones_wrapper.process.log import log
from ones_wrapper.protocol.fields import MAX_TEXT

SILENCE_S = 0.5
"""Seconds between two checks for silent ranks."""
DEAD_S = 5.0
"""Seconds without a heartbeat after which a rank counts as lost."""
NAMED_S = 0.2
"""Longest time, in seconds, until the store reports a rank as lost after its connection ended."""
UNWANTED_S = 3.0
"""Seconds after which a new block is refused if no order names its task. A file system may show a new order late."""
DEADLINE_S = 5.0
"""Seconds, in addition to `form_s`, in which a plan's groups must be formed; for a new term, in which a step must end.
Otherwise the plan is dropped."""


class Coordinator:
    """Coordinator of the memberships in one term."""

    def __init__(
        self,
        board: Board,
        present: Plan,
        orders: OrderReader,
        superseded: Callable[[], bool],
        fits: Callable[[int], bool],
        back_off: BackOff,
    ) -> None:
        """`superseded` returns True if another block leads by now; `fits` returns True if the job can train with N
        ranks. No plan is published before `changes_by` is called. Raises `StoreLostError`."""
        board.follow("join", "ready", "leaving", "gone", "formed", "unfit")
        self._board, self._orders = board, orders
        self._superseded, self._fits = superseded, fits
        self._hot: bool | None = None
        self._back_off = back_off
        self._refused = 0
        """Number of ranks that was last logged as unusable; 0 for none."""
        self._lock = threading.Lock()
        self._present = present
        self._plan: Plan | None = None
        self._published_at = 0.0
        self._formed = self._offered = False
        self._last = present.generation
        self._before: Plan | None = None
        """Previous membership; None after the keys of its groups were removed from the board."""
        self._registered: dict[str, Member] = {}
        self._since: dict[str, float] = {}
        """Monotonic time at which each new block registered, by uid."""
        self._ready: dict[str, float] = {}
        """Monotonic time at which each new block was ready, by uid, earliest first."""
        self._ordered: tuple[int, float] = (-1, 0.0)
        self._left: set[int] = set()
        """Tasks of members that were requested to end since the newest order. Plans do not wait for them until they
        start again."""
        self._looked_at = 0.0
        self._still = Standstill()
        self._turning, self._stopped = threading.Lock(), False
        self.notes: deque[str] = deque(maxlen=100)
        """Notes on nodes that new blocks found unfit."""
        self.stop_all = False
        """True if all blocks, and so the job, were requested to end."""
        self.lost = ""
        """Reason why this membership is lost; '' while it is not."""

    def stop(self) -> None:
        """Wait until the present turn has ended; further turns do nothing."""
        with self._turning:
            self._stopped = True

    def changes_by(self, present: Plan, hot: bool) -> None:
        """Publish plans from now on. If `hot`, new blocks get the state from memory, and groups are formed in advance.
        If not, each change begins a term."""
        self._present, self._hot = present, hot

    def left(self) -> tuple[Member, ...]:
        """Return the members that lost no rank. A lost rank is silent, or its connection ended unplanned. Any thread
        may call this. Raises `StoreLostError`."""
        members, until = self._present.members, time.monotonic() + NAMED_S
        left: tuple[Member, ...] | None = None
        while True:
            gone = {name.rpartition("-")[0] for name in self._board.names("gone")}
            gone |= {member.uid for member, age_s in self._ages(members) if age_s > DEAD_S}
            before, left = left, tuple(member for member in members if member.uid not in gone)
            if time.monotonic() > until or left == before != members:
                return left
            time.sleep(0.01)

    @property
    def alive(self) -> bool:
        """False after `stop`, or once the membership is lost."""
        return not (self._stopped or self.lost)

    def look(self) -> None:
        """Make the next turn read the order files."""
        self._orders.skip_wait()

    def proposal(self, may: Callable[[Plan], bool]) -> tuple[int, int]:
        """Return (generation of the newest plan, generation to change to now), with 0 for none. `may` returns True if
        the ranks may change to a plan now. Once set, the second number is returned until `committed` or `dropped`."""
        with self._lock:
            plan = self._plan
            if plan is None:
                return 0, 0
            self._offered = self._offered or (self._formed and may(plan))
            return plan.generation, plan.generation if self._offered else 0

    def committed(self, plan: Plan) -> None:
        """Record that the ranks changed to the plan."""
        with self._lock:
            self._before, self._present, self._plan = self._present, plan, None
            self._formed = self._offered = False

    def dropped(self, why: str) -> None:
        """Drop the proposed plan because of `why`; training continues with the present ranks."""
        with self._lock:
            self._offered = False
        self._drop(why)

    def _drop(self, why: str, failed: bool = True) -> None:
        with self._lock:
            if self._plan is None or self._offered:
                return
            plan, self._plan, self._formed = self._plan, None, False
        if failed:
            self._back_off.failed(plan.members)
        log(f"membership {plan.generation} was dropped: {why}")
        self._board.put(f"verdict-{plan.generation}", "dropped")

    def turn(self) -> str:
        """Do the coordinator's regular work once. Return the reason if the membership is lost, or ''."""
        with self._turning:
            try:
                if self.alive:
                    self._turn()
            except StoreLostError as error:
                self.lost = f"the board is lost: {error}"[:300]
            except Exception as error:
                self.lost = f"the leader's thread failed: {type(error).__name__}: {error}"[:300]
            return "" if self._stopped else self.lost

    def _turn(self) -> None:
        if stood_s := self._still.look():
            self._published_at += stood_s
            self._ordered = self._ordered[0], self._ordered[1] + stood_s
            self._back_off.stood_still(stood_s)
            for times in (self._since, self._ready):
                times.update({uid: at + stood_s for uid, at in times.items()})
        self._hear_newcomers()
        for uid in self._board.heard_of("unfit"):
            self.notes.append(f"block {self._board.heard(f'unfit-{uid}')}"[:MAX_TEXT])
            self._board.unhear(f"unfit-{uid}")
        self._lose(dict.fromkeys(self._told("gone"), "a rank of {} ended"))
        now = time.monotonic()
        if now - self._looked_at >= SILENCE_S:
            self._looked_at = now
            self._hear_signs()
            if self._superseded():
                self.lost = "another block leads now"
        if self.lost:
            self._board.put("lost", self.lost)
            return
        self._settle()
        plan = self._plan
        if plan is None:
            if self._hot is not None:
                self._publish()
        elif not self._offered:
            self._check(plan)

    def _settle(self) -> None:
        """Remove keys of earlier memberships' groups from the board."""
        with self._lock:
            present, before, self._before = self._present, self._before, None
        if before is not None:
            self._back_off.begun(present.members, bool(present.newcomers(before)))
            forget_groups(self._board, before.generation)
        self._back_off.look()

    def _hear_newcomers(self) -> None:
        for member in self._present.members:
            self._registered.pop(member.uid, None)
            self._ready.pop(member.uid, None)
        for uid in self._board.heard_of("join"):
            text = self._board.heard(f"join-{uid}") or ""
            self._board.unhear(f"join-{uid}")
            try:
                member = decode_member(text)
            except ValueError as error:
                log(f"a block that wanted to join is ignored: {error}")
                continue
            self._registered[member.uid] = member
            self._since[member.uid] = time.monotonic()
            self._orders.skip_wait()
        for uid in self._registered:
            if uid not in self._ready and self._board.heard(f"ready-{uid}") is not None:
                self._ready[uid] = time.monotonic()

    def _hear_signs(self) -> None:
        members = (*self._present.members, *self._registered.values())
        silent = [member.uid for member, age_s in self._ages(members) if age_s > DEAD_S]
        self._lose(dict.fromkeys(silent, f"{{}} sent no heartbeat for {DEAD_S:g} s"))
        self._since = {uid: at for uid, at in self._since.items() if uid in self._registered}

    def _ages(self, members: Sequence[Member]) -> Iterable[tuple[Member, float]]:
        """Return (its block, seconds since its last heartbeat) for each rank."""
        ranks = {f"{member.uid}-{local}": member for member in members for local in range(member.ranks)}
        return zip(ranks.values(), self._board.silent_s([*ranks]), strict=True)

    def _lose(self, whys: dict[str, str]) -> None:
        """Set `lost` if a present member is among `whys` (reasons by uid); refuse new blocks that are among them."""
        for member in self._present.members:
            if member.uid in whys:
                self.lost = whys[member.uid].format(member.name)
        for uid in whys.keys() & self._registered.keys():
            why = whys[uid].format(self._registered.pop(uid).name)
            log(f"{why}; it does not join")
            self._board.put(f"leave-{uid}", why)  # else a suspended block would wait for ever
            self._ready.pop(uid, None)
            if self._plan is not None and self._plan.first_rank(uid) is not None:
                self._drop(why, failed=False)

    def _told(self, kind: str) -> set[str]:
        """Return the uids of blocks with at least one rank that has posted a key of this kind."""
        return {name.rpartition("-")[0] for name in self._board.heard_of(kind)}

    def _publish(self) -> None:
        order, present, now = self._orders.poll(), self._present, time.monotonic()
        if order is not None and order.number != self._ordered[0]:
            self._ordered, self._left = (order.number, now), set()
        self._left -= {member.task for member in self._registered.values()}
        wanted = None if order is None else order.blocks
        if wanted is not None:
            wanted = tuple(task for task in wanted if task not in self._left) or wanted
        self._turn_away(wanted)
        ready = [self._registered[uid] for uid in self._ready]
        leaving = self._told("leaving") & {member.uid for member in present.members}
        waited = now - min(self._ready.values(), default=now)
        members = next_plan(present.members, wanted, ready, leaving, waited)
        self.stop_all = members is None and leaving >= {member.uid for member in present.members}
        if members is None or self._back_off.refuses(members):
            return
        if not self._usable(sum(member.ranks for member in members)):
            return
        self._left |= {member.task for member in present.members if member.uid in leaving}
        self._last += 1
        moves = members[0].uid != present.members[0].uid
        by_order = order is not None and not leaving
        as_ordered = order is not None and set(order.blocks or ()) == {member.task for member in members}
        known = {member.uid for member in present.members}
        ready_s = max((self._ready[m.uid] - self._ordered[1] for m in members if m.uid not in known), default=0.0)
        plan = Plan(
            self._last,
            present.term + (moves or not self._hot),
            members,
            order.number if order is not None and by_order else None,
            (order.batch or 0) if order is not None and as_ordered else 0,
            "leaving" if leaving else "order",
            max(0.0, ready_s) if by_order else 0.0,
            moves,
        )
        self._published_at = now
        self._board.put(f"plan-{plan.generation}", encode(plan))
        self._board.put("newest", str(plan.generation))
        with self._lock:
            self._plan, self._formed = plan, not self._hot

    def _usable(self, world: int) -> bool:
        fits = self._fits(world)
        if not fits and world != self._refused:
            log(f"no membership of {world} ranks is made: the strategy cannot use them")
        self._refused = 0 if fits else world
        return fits

    def _turn_away(self, wanted: tuple[int, ...] | None) -> None:
        """Refuse new blocks that the newest order does not name, after `UNWANTED_S` seconds."""
        now = time.monotonic()
        for uid, member in list(self._registered.items()):
            if wanted is not None and member.task not in wanted and now - self._since[uid] > UNWANTED_S:
                self._board.put(f"leave-{uid}", "no order names it")
                del self._registered[uid]
                self._ready.pop(uid, None)

    def _check(self, plan: Plan) -> None:
        """Record that all ranks have formed the plan's groups, or drop the plan if a rank failed or is late."""
        if not self._formed:
            told = [self._board.heard(f"formed-{plan.generation}-{rank}") for rank in range(plan.world)]
            failed = [text for text in told if text is not None and text.startswith("failed")]
            if failed:
                self._drop(failed[0])
                return
            if None not in told:
                self._formed = True
        if self._hot and self._formed:
            return  # an evaluation may keep the ranks from a boundary for long, which is no fault of the members
        if time.monotonic() - self._published_at > form_s(plan.world) + DEADLINE_S:
            why = "not all ranks could form its groups in time" if self._hot else "no step ended meanwhile"
            self._drop(why, failed=bool(self._hot))
