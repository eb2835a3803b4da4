"""What a job asks for, as `sbatch` reads it from its arguments and from the `#SBATCH` lines of a script."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from slurm_ones.simulate.slurm.jobs import Request
from slurm_ones.slurm.client import Refused

UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"sbatch: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    for name in ("--nodes", "--gres", "--partition", "--time", "--comment", "--job-name", "--begin", "--array"):
        parser.add_argument(name, default="")
    for name in ("--ntasks", "--ntasks-per-node", "--gpus"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--output", "--cpus-per-gpu", "--cpus-per-task", "--open-mode", "--signal"):
        parser.add_argument(name)
    for name in ("--hold", "--requeue", "--no-requeue"):
        parser.add_argument(name, action="store_true")
    return parser


def read_request(text: str, arguments: Sequence[str], *, now: float, work_dir: str, user: str, uid: int) -> Request:
    """The request of a script's text and further options, which come first. Raises `Refused`."""
    try:
        return _request(text, arguments, now=now, work_dir=work_dir, user=user, uid=uid)
    except (ValueError, OverflowError) as error:  # a quote without its end, a number that is none
        raise Refused(f"sbatch: {error}") from None


def _request(text: str, arguments: Sequence[str], *, now: float, work_dir: str, user: str, uid: int) -> Request:
    lines = [line.removeprefix("#SBATCH").strip() for line in text.splitlines() if line.startswith("#SBATCH")]
    inside = [word for line in lines for word in shlex.split(line, comments=True)]
    given = _parser().parse_args([*inside, *arguments])
    low, _, high = (given.nodes or "1").partition("-")
    gpus = re.fullmatch(r"gpu(?::\w*[a-z]\w*)?:(\d+)", given.gres) if given.gres else None
    if given.gres and gpus is None:
        raise Refused(f"sbatch: Invalid generic resource (gres) specification: {given.gres}")
    nodes = int(low)
    return Request(
        nodes=nodes,
        max_nodes=int(high or low),
        gpus_per_node=int(gpus[1]) if gpus else 0,
        gpus_total=given.gpus,
        tasks=given.ntasks or given.ntasks_per_node * nodes,
        partition=given.partition,
        name=given.job_name or "script",
        comment=given.comment,
        work_dir=work_dir,
        time_limit_s=_limit(given.time),
        begin=_begin(given.begin, now),
        hold=given.hold,
        requeue=not given.no_requeue,
        array=bool(given.array),
        user=user,
        uid=uid,
    )


def _limit(text: str) -> float:
    """Minutes, or hours:minutes:seconds."""
    if not text:
        return 0.0
    parts = [int(part) for part in text.split(":")]
    return 60.0 * parts[0] if len(parts) == 1 else float(sum(p * 60**i for i, p in enumerate(reversed(parts))))


def _begin(text: str, now: float) -> float:
    match = re.fullmatch(r"now(?:\+(\d+)(second|minute|hour|day)?s?)?", text or "now")
    if match is None:
        raise Refused(f"sbatch: Invalid --begin specification: {text}")
    return now + int(match[1]) * UNITS[match[2] or "second"] if match[1] else 0.0
