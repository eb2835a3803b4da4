"""A rank that trains hears of the leader's plans by a thread, which begins to form their groups at once. So the groups
are there when the ranks agree on a plan, two steps sooner than if they began then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ones_wrapper.membership import connections
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import Former
from ones_wrapper.membership.plan import decode_plan
from ones_wrapper.network.client import StoreLostError

LOOK_S = 0.1
"""Time between two looks for a plan. torch's own wait writes lines to the job's log whenever its time is over."""


class Ahead(threading.Thread):
    """Of one rank and one term."""

    def __init__(self, board: Board, present: int, uid: str, make: Callable[..., Former]) -> None:
        """`board` is a connection of its own, `present` the generation that trains, `uid` this rank's block, and `make`
        takes a plan, its first rank of that block, and a board.
        """
        super().__init__(name="ones-ahead", daemon=True)
        self.place = board.place
        """Of the term."""
        self._board = board
        self._next = present + 1
        self._uid = uid
        self._make = make
        self._formers: dict[int, Former] = {}
        """Of each plan that was begun and not taken. A later plan ends none of them: rank 0 may have changed over, and
        the leader published the next plan, before this rank asks for its groups."""
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()

    def take(self, generation: int) -> Former | None:
        """What forms this plan's groups; None where the caller has to begin, since this thread has not and no longer
        will.
        """
        with self._lock:
            self._next = max(self._next, generation + 1)
            for past in [one for one in self._formers if one < generation]:
                connections.drop(self._formers.pop(past).formed)
            return self._formers.pop(generation, None)

    def stop(self) -> None:
        """Begin nothing any more; returns at once."""
        self._stop_asked.set()

    def run(self) -> None:
        """Until it is told to stop, or the board is lost, which others find too."""
        while not self._stop_asked.wait(LOOK_S):
            generation = self._next
            try:
                text = self._board.read(f"plan-{generation}")
                if text is not None:
                    self._begin(generation, text)
            except (StoreLostError, ValueError):  # of a plan that cannot be read the rank itself says so
                return

    def _begin(self, generation: int, text: str) -> None:
        plan = decode_plan(text)
        first = plan.first_rank(self._uid)
        with self._lock:
            if self._next != generation or self._stop_asked.is_set():  # the rank was faster, and has begun
                return
            self._next += 1
            if first is not None:
                self._formers[generation] = former = self._make(plan, first, self._board.again())
                former.start()
