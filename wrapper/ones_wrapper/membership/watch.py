"""A rank's sign of life, and its look for the others': by threads, so that it works while the rank waits in a
collective that never ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ones_wrapper.membership.board import Board
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.process.standstill import Standstill

SIGN_S = 1.0
"""Time between two signs."""
HURRY_S = 0.25
"""The same of a block that was told to end."""
LOOK_S = 0.1
"""After so long at most the others hear that it was."""
SILENCE_S = 6.0
"""A leader that has not answered for so long is lost."""
MAIN_S = 1.0
"""How long the rank's own thread may take to notice that others are lost, before this one leaves for it."""


class Watch:
    """One rank's."""

    def __init__(
        self, board: Board, name: str, leaving: Callable[[], bool], failed: Callable[[], str],
        abandon: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`board` is a connection of its own and `name` the rank's. `leaving` says whether the block was told to end,
        `failed` why the membership cannot go on (where this process leads), and `abandon` ends the process.
        """
        self._board = board
        self._name = name
        self._leaving, self._failed, self._abandon = leaving, failed, abandon
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._count = 0
        self.lost = ""
        """Why the others count as lost; empty while they don't."""
        self._found, self._heard = "", time.monotonic()
        self._threads = [
            threading.Thread(target=target, name="ones-watch", daemon=True) for target in (self._talk, self._run)
        ]
        self._sign()

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def follow(self, board: Board) -> None:
        """Another board counts from now on."""
        with self._lock:
            self._board, self._found, self._heard = board, "", time.monotonic()
            self.lost = ""
        self._sign()

    def stop(self) -> None:
        """Watch no longer; returns at once."""
        self._stop.set()

    def _sign(self) -> None:
        with self._lock:
            self._count += 1
            board, text = self._board, f"{self._count}{'!' if self._leaving() else ''}"
        board.put(f"sign-{self._name}", text)

    def _wait(self) -> bool:
        """Until the next sign is due, or the block is told to end; False once this watch is over."""
        told, since = self._leaving(), time.monotonic()
        while time.monotonic() - since < (HURRY_S if told else SIGN_S) and self._leaving() == told:
            if self._stop.wait(LOOK_S):
                return False
        return True

    def _talk(self) -> None:
        """Give signs, and hear of others. A store whose process hangs never answers, which the other thread sees."""
        while self._wait():
            with self._lock:
                board = self._board
            try:
                self._sign()
                found = self._failed() or board.read("lost") or ""
            except StoreLostError as error:
                found = f"the leader does not answer ({error})"[:300]
            with self._lock:
                if self._board is board:
                    self._found, self._heard = found, time.monotonic()

    def _run(self) -> None:
        still = Standstill()
        while not self._stop.wait(SIGN_S / 4):
            stood_s = still.look()
            with self._lock:
                board, found = self._board, self._found
                self._heard = min(self._heard + stood_s, time.monotonic())
                if time.monotonic() - self._heard > SILENCE_S:
                    found = f"the leader has not answered for {SILENCE_S:g} s"
            if not found:
                continue
            self.lost = found
            if not self._stop.wait(MAIN_S) and self._board is board:
                self._abandon(found)
                return
