"""A rank's one thread for the membership: it signs the leader's board, hears what is pushed from there, begins to form
the groups of plans before the ranks agree on them, and has the leader's coordinator take its turns. It works on while
the script's thread waits in a collective that never ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Former
from ones_wrapper.membership.coordinator import Coordinator
from ones_wrapper.membership.plan import Plan, decode_plan
from ones_wrapper.network.client import StoreLostError, rest_idle

SIGN_S = 1.0
"""Time between two signs."""
LOOK_S = 0.1
"""After so long at most the others hear that this block was told to end, and the coordinator looks."""
LEADER_S = 20.0
"""A leader that has given no sign for so long is lost. It is longer than for others: everybody starts again for it, and
its script may hold the interpreter's lock."""
MAIN_S = 1.0
"""How long the rank's own thread may take to notice that others are lost, before this one leaves for it."""
_KINDS = ("lost", "mode", "leave", "newest", "plan", "verdict")

Make = Callable[[Plan, int, Board], Former]


class Link(threading.Thread):
    """One rank's."""

    def __init__(self, board: Board, name: str, leaving: Callable[[], bool], abandon: Callable[[str], None]) -> None:
        """`name` is the rank's, and `leaving` says whether its block was told to end. Raises `StoreLostError`."""
        super().__init__(name="ones-link", daemon=True)
        self._name, self._leaving = name, leaving
        self.abandon = abandon
        """Ends a process whose membership is lost."""
        self.lost = ""
        """Why the others count as lost; empty while they don't."""
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._signed_at, self._told = 0.0, False
        self._coordinator: Coordinator | None = None
        self._make: Make | None = None
        self._next, self._uid = 0, ""
        self._formers: dict[int, Former] = {}
        """Of each plan that was begun and not taken. A later plan ends none of them: rank 0 may have changed over, and
        the leader published the next plan, before this rank asks for its groups."""
        self.follow(board)

    def follow(self, board: Board, coordinator: Coordinator | None = None) -> None:
        """This board counts from now on, on which `coordinator` steers if this rank leads. Raises `StoreLostError`."""
        board.follow(*_KINDS)
        board.will(f"gone-{self._name}", "1")
        self._sign(board)
        with self._lock:
            self._board, self._coordinator, self.lost = board, coordinator, ""

    def heard(self, key: str) -> str | None:
        """What the board says, without asking it."""
        return self._board.heard(key)

    def stop(self) -> None:
        """End, as it was planned: nobody is to take this rank for lost."""
        self._stop_asked.set()
        with suppress(StoreLostError):
            self._board.will()

    # -- plans --------------------------------------------------------------------------------------------------------

    def form(self, present: int, uid: str, make: Make) -> None:
        """From now on form the groups of plans that come after the generation `present`. `uid` is this rank's block,
        and `make` takes a plan, its first rank of that block, and a board."""
        with self._lock:
            self._next, self._uid, self._make = max(self._next, present + 1), uid, make

    def take(self, generation: int) -> Former | None:
        """What forms this plan's groups; None if this thread has not begun and no longer will: the caller has to."""
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
                except ValueError:  # the rank itself says so
                    continue
                if (first := plan.first_rank(self._uid)) is not None:
                    self._formers[generation] = former = self._make(plan, first, board.again())
                    former.start()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it is told to stop, or others are lost and the process ends for that."""
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

    def _turn(self, board: Board) -> str:
        """Why others count as lost."""
        board.listen(LOOK_S)
        if self._leaving() != self._told or time.monotonic() - self._signed_at > SIGN_S:
            if self._sign(board) > LEADER_S:
                return f"the leader gave no sign for {LEADER_S:g} s"
            rest_idle()
        self._begin(board)
        coordinator = self._coordinator
        lost = coordinator.turn() if coordinator is not None else ""
        return lost or board.heard("lost") or ""

    def _sign(self, board: Board) -> float:
        self._signed_at, self._told = time.monotonic(), self._leaving()
        if self._told:
            board.put(f"leaving-{self._name}", "1")
        return board.sign(self._name)
