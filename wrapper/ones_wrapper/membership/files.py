"""The folder `hot/` in the job's directory, by which the blocks of a job find each other.

::

    leader-<term>.json   address of the term's leader (`Leader`), made once; the highest term counts
    over                 mark that the job has ended: a block that starts now has nothing to do
    secret               key by which the job's processes authenticate each other (`network.secret`)
    node-<name>.json     measurements of a node, made when its block started (`node_check`)
    coming.json          blocks that train in the next term, if the term begins from a checkpoint

Several blocks may look for a leader at once. A block claims a term by linking a complete file to the term's name, which
succeeds for one block only. Imports only the standard library, since `ones-run` reads this folder before torch is
imported.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ones_wrapper.files.places import make_job_directory
from ones_wrapper.files.small_files import create_small, read_json, read_small, replace_small
from ones_wrapper.network.client import StoreClient, StoreLostError
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import MEMBER
from ones_wrapper.process.log import log
from ones_wrapper.protocol import HOT
from ones_wrapper.protocol.fields import build, types_of

OVER = "over"
COMING = "coming.json"
KEPT = 8
"""Number of leader files that are kept, so that people can read them."""
MOST_BYTES = 4096
MOST_COMING = 1 << 20
_MOST_ENTRIES = 10_000
_STALE_S = 3600.0
_NAME = re.compile(r"leader-(0|[1-9]\d{0,8})\.json", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}", re.ASCII)
_PLACE = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)


@dataclass(frozen=True)
class Leader:
    """Leading block of a term, and the address of the term's board, its key-value store."""

    term: int
    """Number of the term, from 0. In the job's reports it replaces Slurm's restart count."""
    host: str
    port: int
    """Port of the store server with the term's board."""
    place: str
    """Name of the board in the store server. Not secret: every caller proves that it has the job's secret."""
    task: int
    restart: int
    """Slurm's count of the task's requeues."""


def living(leader: Leader, secret: JobSecret, timeout_s: float = 2.0) -> bool:
    """Return True if the leader's board answers within `timeout_s` seconds. Only a process with the secret can
    answer."""
    try:
        StoreClient(leader.host, leader.port, secret, MEMBER, leader.place, timeout_s).close()
    except StoreLostError:
        return False
    return True


class HotFolder:
    """The folder `hot/` of one job."""

    def __init__(self, job_dir: Path, array: int) -> None:
        self.path = job_dir / HOT
        self._array = array
        self._said: set[str] = set()

    def prepare(self) -> None:
        """Make the folder, readable by its owner only, or check the existing folder. Raises `LaunchError`."""
        make_job_directory(self.path, 0o700)
        # Only after the check, since chmod follows a link.
        with suppress(OSError):
            self.path.chmod(0o700)

    def newest(self) -> Leader | None:
        """Return the leader of the highest term with a valid file, or None. Invalid files are logged once."""
        for term in self._terms():
            leader = self._read(term)
            if leader is not None:
                return leader
        return None

    def next_term(self, after: Leader | None) -> int:
        """Return the term to claim after the loss of `after`, the newest known leader. Terms with invalid files are
        skipped.

        A term that another block has claimed meanwhile is returned, too: its claim then fails. A claim of a later term
        would replace that living leader.
        """
        taken = set(self._terms())
        term = after.term + 1 if after else 0
        while term in taken and self._read(term) is None:  # an invalid file keeps its name
            term += 1
        return term

    def claim(self, leader: Leader) -> bool:
        """Claim the term of this leader; return True on success.

        A claim fails if another block has claimed this or a later term, or if the file cannot be written. Of several
        claims at once exactly one succeeds. Raises ValueError for a leader whose file would be invalid.
        """
        data = asdict(leader) | {"array": self._array}
        self._decoded(data, leader.term)
        if self._later(leader.term - 1):
            return False
        path = self._file(leader.term)
        try:
            won = create_small(path, json.dumps(data).encode(), 0o600)
        except OSError as error:
            self._say(f"{path} cannot be written ({error.strerror})")
            return False
        # A later term was claimed while this term was free: this claim comes from an older look at the folder.
        if won and self._later(leader.term):
            with suppress(OSError):
                path.unlink()
            return False
        if won:
            self._prune(leader.term)
        return won

    def over(self) -> bool:
        """Return True if the job has ended."""
        try:
            # The directory may have been another job's before.
            return read_small(self.path / OVER, MOST_BYTES).strip() == str(self._array).encode()
        except (OSError, ValueError):
            return False

    def end(self) -> None:
        """Mark the job as ended; a failure is logged."""
        try:
            replace_small(self.path / OVER, f"{self._array}\n".encode(), 0o600)
        except OSError as error:
            self._say(f"{self.path / OVER} cannot be written ({error.strerror}): cancel tasks that still wait")

    def announce(self, coming: Mapping[str, Any]) -> str:
        """Write the announcement of the next term; return an error, or ''."""
        text = json.dumps(dict(coming) | {"array": self._array})
        try:
            replace_small(self.path / COMING, text.encode(), 0o600)
        except OSError as error:
            # A server that answers late may have renamed the file all the same, and starting blocks believe it.
            if self.announced() != json.loads(text):
                return f"{self.path / COMING} cannot be written ({error.strerror})"
        return ""

    def announced(self) -> dict[str, Any] | None:
        """Return this job's last announcement; None if there is none, or if it cannot be read (which is logged
        once)."""
        try:
            data = read_json(self.path / COMING, MOST_COMING)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._ignore(self.path / COMING, error)
            return None
        return data if data.get("array") == self._array else None

    def _terms(self) -> list[int]:
        """Return the terms of all leader files, the highest first."""
        found: list[int] = []
        try:
            with os.scandir(self.path) as entries:
                for count, entry in enumerate(entries):
                    if count >= _MOST_ENTRIES:
                        self._say(f"{self.path} has more than {_MOST_ENTRIES} files; the others are ignored")
                        break
                    if match := _NAME.fullmatch(entry.name):
                        found.append(int(match[1]))
        except OSError:
            return []
        return sorted(found, reverse=True)

    def _later(self, term: int) -> bool:
        newest = self.newest()
        return newest is not None and newest.term > term

    def _file(self, term: int) -> Path:
        return self.path / f"leader-{term}.json"

    def _read(self, term: int) -> Leader | None:
        path = self._file(term)
        try:
            return self._decoded(read_json(path, MOST_BYTES), term)
        except FileNotFoundError:  # pruned since
            return None
        except (OSError, ValueError) as error:
            self._ignore(path, error)
            return None

    def _decoded(self, data: Mapping[str, Any], term: int) -> Leader:
        if data.get("array") != self._array or isinstance(data["array"], bool):
            raise ValueError(f"array: {data.get('array')!r:.40} is another job than {self._array}")
        leader = build(Leader, types_of(Leader), data)
        sound = {
            "term": leader.term == term < 10**9,
            "host": _HOST.fullmatch(leader.host),
            "port": 1 <= leader.port <= 65_535,
            "place": _PLACE.fullmatch(leader.place),
        }
        if wrong := [name for name in sound if not sound[name]]:
            raise ValueError(f"{wrong[0]}: {getattr(leader, wrong[0])!r:.40} is no valid {wrong[0]} in term {term}")
        return leader

    def _prune(self, newest: int) -> None:
        """Remove leader files of terms that no block can claim any more, and temporary files that killed processes
        left."""
        for term in self._terms():
            if term <= newest - KEPT:
                with suppress(OSError):
                    self._file(term).unlink()
        for path in self.path.glob(".new-leader-*"):  # of claims that were killed
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()

    def _ignore(self, path: Path, error: Exception) -> None:
        self._say(f"{path} is ignored: {error.strerror if isinstance(error, OSError) else str(error)[:200]}")

    def _say(self, text: str) -> None:
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            log(text)
