"""Past jobs from Slurm's accounting, read with `sacct` of Slurm 22.05 to 26.05.

`sacct` prints lines with separators here; its JSON lists every step and must be read whole. A job's comment and name,
which users write, are the last fields, and a random separator is drawn for each call. So they cannot pass for another
field or row.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from slurm_ones.slurm.client import Refused, Unreachable
from slurm_ones.slurm.command import error_of, not_started

FIELDS = (
    *("JobIDRaw", "JobID", "Cluster", "Submit", "Start", "End", "State", "ExitCode", "NNodes", "AllocTRES", "ReqTRES"),
    *("NodeList", "TimelimitRaw", "User", "Account", "Partition"),
)
"""Fields that every release has, except the job's comment and name."""
RESTARTS = "Restarts"
"""Field with a job's restart count, which older releases lack."""
OWN = ("Comment", "JobName")
"""Fields that users write."""
MOST = 2**53
"""Largest number accepted in a field of a row."""
LONGEST = 65_536
"""Longest accepted row, in bytes."""
TIMEOUT_S = 600.0
"""Longest time, in seconds, that one call of `sacct` may take."""

ENDS = "BF,CA,CD,DL,F,NF,OOM,PR,RQ,RS,TO"
"""States of ended runs, for `sacct --state`. Without it `sacct` omits jobs cancelled before they were eligible, and
jobs held while they ran."""

_LIVE = {"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "COMPLETING"}
_LIVE |= {"CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_NEVER = {"", "Unknown", "None"}
_UNLIMITED = {"", "UNLIMITED", "Partition_Limit", "INVALID"}
_ALL_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TYPED_GPUS = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_ARRAY = re.compile(r"([0-9]{1,15})_", re.ASCII)
_NODES = re.compile(r"(?:^|,)node=(\d+)")


class BadRow(Exception):
    """A row of accounting that cannot be stored; the message says why."""


@dataclass(frozen=True)
class Rejected:
    """Row that was rejected: its number in the output, the reason, and its first characters."""

    row: int
    why: str
    text: str


@dataclass(frozen=True)
class AccountingRow:
    """One run of a job, or a wait in the queue that ended without a run. Times are Unix seconds."""

    job_id: int
    restart: int | None
    """Restart count; None if this release does not show it."""
    submit: float
    start: float | None
    """Start of the run; None if it never started."""
    end: float | None
    """End of the run; None until it ends."""
    state: str
    exit_code: int
    """Exit code as a shell gives it: 128 + N after signal N."""
    nodes: int
    gpus: int
    """Total GPUs; 0 if the run had none, or accounting does not count GPUs."""
    requested_nodes: int
    requested_gpus: int
    node_list: str
    time_limit_s: float | None
    user: str
    account: str
    partition: str
    name: str
    array: int = 0
    """Job id of the task's array; 0 if the row is of no array."""
    comment: str = ""
    """Comment of the job; empty unless AccountingStoreFlags names job_comment."""

    @property
    def live(self) -> bool:
        """True if the run has not ended, or was requeued."""
        return self.end is None or self.state in _LIVE


def gpus_of(tres: str) -> int:
    """Return the number of GPUs in a TRES text; counts by type are not added to a total."""
    of_all = _ALL_GPUS.search(tres)
    found = [of_all[1]] if of_all else _TYPED_GPUS.findall(tres)
    return _bounded(sum(map(_count, found)), "GPUs")


def _count(text: str, what: str = "a count") -> int:
    if not (text.isascii() and text.isdigit()):
        raise BadRow(f"{what}: {text[:40]!r} is no number")
    if len(text) > 16:
        raise BadRow(f"{what}: {text[:40]} is too large to be true")
    return _bounded(int(text), what)


def _bounded(count: int, what: str) -> int:
    if count > MOST:
        raise BadRow(f"{what}: {count} is too large to be true")
    return count


def _time(text: str, what: str) -> float | None:
    return None if text in _NEVER else float(_count(text, what))


def parse_row(fields: Sequence[str], cluster: str) -> AccountingRow:
    """Parse a row from its fields: `FIELDS`, then the restart count ("" if unknown), then `OWN`. Raises `BadRow`."""
    of = dict(zip((*FIELDS, RESTARTS, *OWN), fields, strict=True))
    if cluster and of["Cluster"] != cluster:
        raise BadRow(f"it is of cluster {of['Cluster'][:40]!r}, not {cluster}")
    submitted, ended = _time(of["Submit"], "Submit"), _time(of["End"], "End")
    if submitted is None:
        raise BadRow("it has no submission time")
    state = re.match(r"[A-Z_]+", of["State"])
    if state is None:
        raise BadRow(f"State: {of['State'][:40]!r} is none")
    ran = of["NodeList"] not in ("", "None assigned", "(null)")
    started = _time(of["Start"], "Start") if ran else None
    times = [time for time in (submitted, started, ended) if time is not None]
    if times != sorted(times):
        shown = ", ".join(of[name] for name in ("Submit", "Start", "End"))
        raise BadRow(f"its times are out of order: submitted, started, ended at {shown}")
    code, _, signal = of["ExitCode"].partition(":")
    killed = _count(signal or "0", "ExitCode")
    on = _NODES.search(of["ReqTRES"])
    array = _ARRAY.match(of["JobID"])
    return AccountingRow(
        job_id=_count(of["JobIDRaw"], "JobIDRaw"),
        restart=_count(of[RESTARTS], RESTARTS) if of[RESTARTS] else None,
        submit=submitted,
        start=started,
        end=ended,
        state=state[0],
        exit_code=128 + killed if killed else _count(code or "0", "ExitCode"),
        nodes=_count(of["NNodes"] or "0", "NNodes") if ran else 0,
        gpus=gpus_of(of["AllocTRES"]) if ran else 0,
        requested_nodes=_count(on[1], "ReqTRES") if on else _count(of["NNodes"] or "0", "NNodes"),
        requested_gpus=gpus_of(of["ReqTRES"]),
        node_list=of["NodeList"] if ran else "",
        time_limit_s=None if of["TimelimitRaw"] in _UNLIMITED else 60.0 * _count(of["TimelimitRaw"], "TimelimitRaw"),
        user=of["User"],
        account=of["Account"],
        partition=of["Partition"],
        name=of["JobName"],
        array=int(array[1]) if array else 0,
        comment=of["Comment"],
    )


def parse_rows(
    lines: Iterable[bytes], separator: str, cluster: str, *, restarts: bool
) -> Iterator[AccountingRow | Rejected]:
    """Parse the output lines of `sacct`, newlines included. Yield a row, or `Rejected` for a row that is not valid.

    A comment or a job's name may have several lines, so a line without a separator continues the last.
    """
    many = len(FIELDS) + restarts + 1
    row, pending = 0, ""

    def finished() -> Iterator[AccountingRow | Rejected]:
        if pending and pending.count(separator) < many:
            yield Rejected(row, "its comment has no end", pending.replace(separator, "|")[:200])
        elif pending:
            fields = pending.split(separator)
            complete = fields if restarts else [*fields[:-2], "", *fields[-2:]]
            try:
                yield parse_row(complete, cluster)
            except BadRow as error:
                yield Rejected(row, str(error), pending.replace(separator, "|")[:200])

    for line in lines:
        text = line.decode("utf-8", "replace").replace("\0", "\\0").removesuffix("\n")
        found = text.count(separator)
        if pending and (found == 0 or (found == 1 and pending.count(separator) < many)):
            if found or len(pending) < LONGEST:
                pending += f"\n{text}"
            continue
        yield from finished()
        row, pending = row + 1, ""
        if found in (many - 1, many) and line.endswith(b"\n"):
            pending = text
        elif found == many:
            yield Rejected(row, "it is cut off", text.replace(separator, "|")[:200])
        else:
            why = f"it has {found + 1} fields, not {many + 1}"
            yield Rejected(row, why, text.replace(separator, "|")[:200])
    yield from finished()


class Sacct:
    """The installed `sacct` command. Raises `SlurmMissing` if there is none, `Refused` if it fails."""

    def __init__(self, cluster: str = "") -> None:
        self._cluster = cluster
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("SACCT_")}
        # Times are numbers, messages are English.
        self._env |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        with self._output(["sacct", "--helpformat"]) as lines:
            known = {word.lower() for line in lines for word in line.decode("utf-8", "replace").split()}
        missing = [name for name in FIELDS if name.lower() not in known]
        if missing:
            raise Refused(f"sacct: this release does not have {', '.join(missing)}")
        self._restarts = RESTARTS.lower() in known

    def command(self, since: float, until: float, separator: str) -> list[str]:
        """Return the command that lists all users' runs that ended in a span of time, ends included."""
        fields = [*FIELDS, *([RESTARTS] if self._restarts else []), *OWN]
        asked = ["sacct", "--parsable2", "--noheader", "--duplicates", "--allocations", "--allusers"]
        asked += [f"--delimiter={separator}", f"--format={','.join(fields)}", f"--state={ENDS}"]
        asked += [f"--starttime=uts{since:.0f}", f"--endtime=uts{until:.0f}"]
        return [*asked, *([f"--clusters={self._cluster}"] if self._cluster else [])]

    def rows(self, since: float, until: float) -> Iterator[AccountingRow | Rejected]:
        """Yield the rows of runs that ended in a span of time, while `sacct` prints them."""
        separator = f"|{secrets.token_hex(8)}|"
        with self._output(self.command(since, until, separator)) as lines:
            yield from parse_rows(lines, separator, self._cluster, restarts=self._restarts)

    @contextmanager
    def _output(self, argv: Sequence[str]) -> Iterator[Iterator[bytes]]:
        """Yield a command's output lines while it prints them. If it fails, raise the error for its messages."""
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=self._env
                )
            except OSError as error:
                raise not_started(argv[0], error) from None
            assert process.stdout is not None
            guard = threading.Timer(TIMEOUT_S, process.kill)
            guard.start()
            read = False
            try:
                yield iter(partial(process.stdout.readline, LONGEST), b"")
                read = True
            finally:
                if not read:
                    process.kill()
                process.stdout.close()
                process.wait()
                late = not guard.is_alive()
                guard.cancel()
            if late:
                raise Unreachable(f"{argv[0]}: no end of its answer within {TIMEOUT_S:.0f} s")
            if process.returncode:
                errors.seek(0)
                raise error_of(argv[0], errors.read(LONGEST).decode("utf-8", "replace"))
