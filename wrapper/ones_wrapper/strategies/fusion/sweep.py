"""Members of a sweep that a script trains: its own job, and jobs that wait meanwhile (`ones-run --fuse`).

    sweep = ones.strategies.sweep(parser)
    models = {name: make(args) for name, args in sweep.members.items()}
    ...
    for name in sweep.left():      # each epoch: cancelled, or it started by itself
        fused.stop(name)
    for name in sweep.members:     # in the end
        members.save(sweep.folder(name), name)
        sweep.done(name)

A sweep without other members has only the script's own job, so that the same script also trains a single job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from ones_wrapper.files.job_directory import LEFT, RESULT
from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.files.small_files import replace_small
from ones_wrapper.launch.fused_start import FUSED, Row, read_fused
from ones_wrapper.process.log import log


class Sweep:
    """Members of a sweep that this job trains. Use it on one rank."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Parse each member's arguments. Call this in place of `parser.parse_args()`."""
        own = Row(int(os.environ.get("SLURM_JOB_ID") or 0), tuple(sys.argv[1:]), os.environ.get("ONES_JOB_DIR") or ".")
        path = os.environ.get(FUSED)
        self._file = Path(path) if path else None
        told = read_fused(self._file) if self._file else {}
        rows = [Row(row["job_id"], tuple(row["arguments"]), row["folder"]) for row in told.get("rows", ())] or [own]
        self._program = [str(word) for word in told.get("program", ())]
        self._rows = {str(row.job_id): row for row in rows}
        self._own = str(own.job_id)
        self.members = {name: parser.parse_args(list(row.arguments)) for name, row in self._rows.items()}
        """Arguments of each member, parsed by the script's parser. The member's name is its job id."""
        # A checkpoint also has the rows of members that left: these are fused again, and stopped at once.
        kept = {str(one) for one in told.get("members", ())}
        self._gone = [name for name in self._rows if name != self._own and name not in kept]
        self._trains = [name for name in self._rows if name not in self._gone]
        self._seconds = dict.fromkeys(self._rows, 0.0)
        self._since = time.monotonic()
        spool = os.environ.get("ONES_SPOOL")
        restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._orders = OrderReader(Path(own.folder), restart, Path(spool) if spool else None, own.job_id)
        for name in [one for one in self._trains if self._file and (self.folder(one) / RESULT).exists()]:
            self._trains.remove(name)  # done before a restart

    def folder(self, name: str) -> Path:
        """Return the directory of this member's job, for its results."""
        return Path(self._rows[name].folder)

    def left(self) -> list[str]:
        """Return the members to stop, because their jobs were cancelled or started by themselves. Each is returned once
        in a run, and removed from `members`, since this job does not write its results."""
        order = self._orders.poll()
        named = {str(one.job_id) for one in order.members or ()} if order is not None else set()
        gone = [
            name
            for name in self._trains
            if name != self._own and ((self.folder(name) / LEFT).exists() or (self._own in named and name not in named))
        ]
        for name in gone:
            log(f"job {name} left its sweep: it is trained no further")
            self._drop(name)
        gone, self._gone = [*self._gone, *gone], []
        self.members = {name: args for name, args in self.members.items() if name not in gone}
        return gone

    def alone(self) -> None:
        """Train only the script's own member, because fusing is not faster. The other members' jobs then start by
        themselves."""
        for name in [one for one in self._trains if one != self._own]:
            self._drop(name)
        self.members, self._gone = {self._own: self.members[self._own]}, []
        if self._file is not None:
            told = read_fused(self._file)
            told["rows"] = [row for row in told.get("rows", ()) if str(row["job_id"]) == self._own]
            replace_small(self._file, json.dumps(told).encode())

    def done(self, name: str, code: int = 0) -> None:
        """Mark a member's training as ended, so that its job ends with this exit code. The script must first write the
        member's results into its folder. Does nothing for the script's own job."""
        if name not in self._trains:
            return
        self._count()
        folder = self.folder(name)
        if name != self._own and not (folder / LEFT).exists():
            told = {"by": int(self._own), "code": code, "gpu_s": round(self._seconds[name], 2)}
            replace_small(
                folder / RESULT, json.dumps({**told, "words": [*self._program, *self._rows[name].arguments]}).encode()
            )
        self._trains.remove(name)

    def _drop(self, name: str) -> None:
        self._count()
        self._trains.remove(name)
        if self._file is not None:
            told = read_fused(self._file)
            told["members"] = [one for one in told["members"] if str(one) != name]
            replace_small(self._file, json.dumps(told).encode())

    def _count(self) -> None:
        """Divide the time since the last call equally among the members that are trained."""
        now = time.monotonic()
        for name in self._trains:
            self._seconds[name] += (now - self._since) / len(self._trains)
        self._since = now


sweep = Sweep
