"""Background thread for one rank's membership: heartbeats, pushed texts of the board, and groups of plans.

On rank 0 the thread also runs the coordinator. It begins to form a plan's groups before the ranks agree on the plan. It
continues while the script's thread hangs in a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ones_wrapper.membership import connections
from ones_wrapper.membership.agent import SIGN_S
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Former
from ones_wrapper.membership.coordinator import Coordinator
from ones_wrapper.membership.plan import Plan, decode_plan
from ones_wrapper.network.client import StoreLostError, rest_idle
from ones_wrapper.network.server import HOST
from ones_wrapper.script.stuck import Watch

LOOK_S = 0.1
"""Longest time, in seconds, that the thread waits for pushed texts. After each wait it checks whether its block is
asked to end, and runs the coordinator."""
LEADER_S = 20.0
"""Seconds without a heartbeat after which the leader counts as lost. It is longer than for other ranks, since all
blocks start again after this loss, and since the leader's script may hold the interpreter's lock."""
MAIN_S = 1.0
"""Seconds in which the script's thread must notice the loss of other ranks. After that this thread ends the process."""
_KINDS = ("lost", "failed", "mode", "leave", "newest", "plan", "verdict")

Make = Callable[[Plan, int, Board], Former]


class Link(threading.Thread):
    """The background thread of one rank, connected to its leader's board."""

    def __init__(self, board: Board, name: str, leaving: Callable[[], bool], abandon: Callable[[str], None]) -> None:
        """`name` is the rank's name in heartbeats. `leaving` returns True if the block is asked to end. Raises
        `StoreLostError`."""
        super().__init__(name="ones-link", daemon=True)
        self._name, self._leaving = name, leaving
        self.abandon = abandon
        """Function that is called with the reason when the membership is lost, and ends the process."""
        self.lost = ""
        """Reason why the membership is lost; '' while it is not."""
        self.watch: Watch | None = None
        """Search for stuck ranks, which this thread continues after `stop`; None before training."""
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._signed_at, self._told = 0.0, False
        self._coordinator: Coordinator | None = None
        self._make: Make | None = None
        self._next, self._uid = 0, ""
        self._board = board
        self._formers: dict[int, Former] = {}
        """`Former` of each plan by generation, until `take` returns it. It is kept after a later plan was published,
        since this rank may still need the earlier plan's groups."""
        self.follow(board)

    def follow(self, board: Board, coordinator: Coordinator | None = None) -> None:
        """Follow this board from now on, and run `coordinator` on the leader's rank 0. Raises `StoreLostError`."""
        followed = board.through_agent()
        followed.follow(*_KINDS)
        followed.will(f"gone-{self._name}", "1")
        self._sign(followed)
        with self._lock:
            past, self._board, self._coordinator, self.lost = self._board, followed, coordinator, ""
        if past is not followed and past.role != HOST:  # the end of this connection is planned
            with suppress(StoreLostError):
                past.will()

    def heard(self, key: str) -> str | None:
        """Return the newest text that the board has pushed for this key; None if there is none."""
        return self._board.heard(key)

    def stop(self) -> None:
        """Stop the thread in a planned way, so that this rank does not count as lost."""
        self._stop_asked.set()
        with suppress(StoreLostError):
            self._board.will()

    # -- plans --------------------------------------------------------------------------------------------------------

    def form(self, present: int, uid: str, make: Make) -> None:
        """Form the groups of each plan after generation `present` that has the block `uid`, from now on. `make` returns
        a `Former` for a plan, the rank of the block's first process, and a board."""
        with self._lock:
            self._next, self._uid, self._make = max(self._next, present + 1), uid, make

    def take(self, generation: int) -> Former | None:
        """Return the `Former` of a plan; None if this thread has not begun to form its groups. Then the caller must
        form them."""
        with self._lock:
            self._next = max(self._next, generation + 1)
            for past in [one for one in self._formers if one < generation]:
                connections.drop(self._formers.pop(past).formed)
            return self._formers.pop(generation, None)

    def _begin(self, board: Board) -> None:
        with self._lock:
            while self._make is not None and (text := board.heard(f"plan-{self._next}")) is not None:
                generation, self._next = self._next, self._next + 1
                board.unhear(f"plan-{generation - 2}", f"verdict-{generation - 2}")
                try:
                    plan = decode_plan(text)
                except ValueError:  # raised again when the rank prepares for the plan
                    continue
                if (first := plan.first_rank(self._uid)) is not None:
                    self._formers[generation] = former = self._make(plan, first, board.again())
                    former.start()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the thread is stopped, then find only stuck ranks. If the membership is lost, end the process."""
        while not self._stop_asked.is_set():
            board = self._board
            try:
                found = self._turn(board)
            except StoreLostError as error:
                found = f"the leader does not answer ({error})"[:300]
            if not found:
                continue
            with self._lock:
                if board is not self._board:
                    continue
                self.lost = found
            if not self._stop_asked.wait(MAIN_S) and board is self._board:
                self.abandon(found)
                return
        if self.watch is not None:
            self.watch.run()

    def _turn(self, board: Board) -> str:
        board.listen(LOOK_S)
        if self._leaving() != self._told or time.monotonic() - self._signed_at > SIGN_S:
            if self._sign(board) > LEADER_S:
                return f"the leader sent no heartbeat for {LEADER_S:g} s"
            rest_idle()
        self._begin(board)
        if self.watch is not None:
            self.watch.look()
        coordinator = self._coordinator
        lost = coordinator.turn() if coordinator is not None else ""
        return lost or board.heard("lost") or ""

    def _sign(self, board: Board) -> float:
        self._signed_at, self._told = time.monotonic(), self._leaving()
        if self._told:
            board.put(f"leaving-{self._name}", "1")
        return board.sign(self._name)
