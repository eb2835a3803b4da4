"""First steps of a job whose sweep may be trained as one (`ones-run --fuse`), before its ranks start.

The first job that Slurm starts asks the companion for waiting jobs of its sweep, and trains them itself. When a waiting
job starts later, it finds its result in its directory, and ends with the result's exit code.

Four small files are used. `fusion.json`, in the first job's directory, is its request, and names the jobs that it
trains. In the directory of each of these jobs, `taken.json` names the first job, and `result.json` has the result. The
file `left` says that a job trains by itself: then the first job stops training it, and its result does not count. So a
job that starts early needs neither the companion nor the first job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ones_wrapper.files.job_directory import LEFT, RESULT, TAKEN, newest_checkpoint
from ones_wrapper.files.job_io import OrderReader, ReportWriter
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.launch.main_module import MODULE
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import number
from ones_wrapper.protocol import FUSION, Bye, FusedMember, Fusion, directory_name, encode

COLLECTED = "collected"
"""Key in a job's result, set when the job has ended with this result."""
FUSED = "ONES_FUSED"
"""Variable with the path of the file that names the jobs to train, for the script of the job that trains them."""
MOST_BYTES = 1 << 20
WAIT_S = 60.0
"""Longest wait for the companion's answer, in seconds."""


@dataclass(frozen=True)
class Row:
    """One of the jobs that a fused training trains; the first row is the job itself."""

    job_id: int
    arguments: tuple[str, ...]
    folder: str


def before_ranks(
    job_dir: Path, env: dict[str, str], script: str, arguments: Sequence[str], wait_s: float = WAIT_S
) -> int | None:
    """Return the exit code if another job has trained this job; None if this job must train. It is the first step of
    `--fuse`.

    If this job trains others, `env` gets a variable for the script. After any failure this job trains only itself.
    """
    job_id, restart = number(env, "SLURM_JOB_ID") or 0, number(env, "SLURM_RESTART_COUNT") or 0
    env.pop(FUSED, None)
    first = script if script == MODULE else os.path.realpath(script)
    words, program = [first, *arguments], 2 if script == MODULE else 1
    # A job that goes on from a checkpoint, also by --resume-from, does not begin as the others do.
    untouched = not any(job_dir.glob("reports-*.jsonl")) and newest_checkpoint(job_dir) is None
    if (code := _collect(job_dir, words, untouched, restart)) is not None:
        return code
    may_ask = job_id and not restart and untouched and job_dir.name == directory_name(job_id)
    if read_fused(job_dir / FUSION).get("rows") or (
        may_ask and _ask(job_dir, env, job_id, [script, *arguments], words[:program], wait_s)
    ):
        env[FUSED] = str(job_dir / FUSION)
    return None


def _collect(job_dir: Path, words: list[str], untouched: bool, restart: int) -> int | None:
    """Return the exit code of this job's result if the result is for exactly these words, and report it. Otherwise
    return None, and write the file `left`."""
    taken = read_fused(job_dir / TAKEN)
    if not taken:
        return None
    result = read_fused(job_dir / RESULT)
    code = result.get("code")
    # A collected result left a report, and a later start returns the same code.
    known = untouched or result.get(COLLECTED) is True
    if known and result.get("words") == words and type(code) is int and 0 <= code < 256:
        seconds, by = result.get("gpu_s"), result.get("by")
        log(
            f"job {by} trained this one: exit code {code}, {seconds} s of its GPU; results are in {job_dir}", "ones-run"
        )
        if type(by) is int and isinstance(seconds, (int, float)):
            # For the database: this job's own run takes a GPU only for a moment.
            note = f"job {by} trained it: {seconds:.2f} s of that job's GPU"
            with suppress(OSError):  # without the mark no report
                replace_small(job_dir / RESULT, json.dumps({**result, COLLECTED: True}).encode())
                ReportWriter(job_dir, restart).send(Bye("error" if code else "finished", 0, code, note))
        return code
    with suppress(FileExistsError), (job_dir / LEFT).open("x"):
        log(f"job {taken.get('by')} was to train this job and has no result: this job trains by itself", "ones-run")
    return None


def _ask(
    job_dir: Path, env: Mapping[str, str], job_id: int, given: Sequence[str], program: Sequence[str], wait_s: float
) -> list[Row]:
    """Return the jobs to train, this job first; none if this job trains only itself. `given` are the script and its
    arguments. `program` are the words that name the script: its path, or -m and the module."""
    path = job_dir / FUSION
    try:
        replace_small(path, encode(Fusion(0, asks=True)))
        named = _answer(job_dir, env, job_id, wait_s)
        rows = _rows(job_dir, named, job_id, given, len(program))
        rows = [row for row in rows if row.job_id == job_id or _take(row, job_id)] if rows else []
        if len(rows) < 2:
            rows = []
        told = {**asdict(Fusion(0, asks=False, members=tuple(row.job_id for row in rows[1:]))), "program": program}
        replace_small(path, json.dumps({**told, "rows": [asdict(row) for row in rows]}).encode())
    except OSError as error:
        log(f"{path}: {error.strerror}; this job trains by itself", "ones-run")
        return []
    if rows:
        log(
            f"this job trains {len(rows) - 1} others of its sweep: {', '.join(str(row.job_id) for row in rows[1:])}",
            "ones-run",
        )
    return rows


def _answer(job_dir: Path, env: Mapping[str, str], job_id: int, wait_s: float) -> tuple[FusedMember, ...]:
    spool = Path(env["ONES_SPOOL"]) if env.get("ONES_SPOOL") else None
    reader, until = OrderReader(job_dir, 0, spool, job_id), time.monotonic() + wait_s
    while time.monotonic() < until:
        order = reader.poll()
        if order is not None and order.members is not None:
            return order.members
        time.sleep(0.2)
    log(f"no companion has answered in {wait_s:.0f} s: this job trains by itself", "ones-run")
    return ()


def _rows(job_dir: Path, named: Sequence[FusedMember], job_id: int, words: Sequence[str], program: int) -> list[Row]:
    """Return a row for each job. In its words, the arguments of the job's batch script replace ours. `words` are the
    script's name (`program` words) and its arguments, which must end with ours."""
    if len(named) < 2 or named[0].job_id != job_id:
        return []
    own = list(named[0].arguments)
    fixed = list(words[: len(words) - len(own)])
    if not own or [*fixed, *own] != list(words):
        log("Slurm has other arguments, or they are not the script's last: this job trains by itself", "ones-run")
        return []
    rows = []
    for one in named:
        its = [*fixed, *one.arguments]
        if its[:program] == [*words[:program]]:
            rows.append(Row(one.job_id, tuple(its[program:]), str(job_dir.parent / directory_name(one.job_id))))
    return rows


def _take(row: Row, by: int) -> bool:
    """Write into a member's directory that job `by` trains it; return False if the member already trains by itself."""
    folder = Path(row.folder)
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o755)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or any(folder.glob("reports-*.jsonl")):
        return False
    replace_small(folder / TAKEN, json.dumps({"by": by}).encode())
    return not (folder / LEFT).exists()


def read_fused(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of this user; empty if there is none."""
    try:
        return read_json(path, MOST_BYTES)
    except (OSError, ValueError):
        return {}
