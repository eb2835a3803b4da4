"""What sbatch reads: batch scripts and options, as the contract and the fuzzer give them to the simulated Slurm."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from slurm_ones.simulate.slurm.simulated_job import Request
from slurm_ones.slurm.client import Refused
from slurm_ones.slurm.fields import LICENCES, hosts

MAX_ARRAY_SIZE = 1001
"""First task number that Slurm refuses, by default."""
UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"sbatch: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    for name in ("--nodes", "--gres", "--partition", "--time", "--comment", "--job-name", "--begin", "--array"):
        parser.add_argument(name, default="")
    for name in ("--qos", "--account", "--licenses", "--nodelist", "--exclude", "--reservation"):
        parser.add_argument(name, default="")
    for name in ("--ntasks", "--ntasks-per-node", "--gpus", "--mem", "--cpus-per-gpu"):
        parser.add_argument(name, type=int, default=0)
    for name in ("--output", "--cpus-per-task", "--open-mode", "--signal"):
        parser.add_argument(name)
    for name in ("--hold", "--requeue", "--no-requeue", "--exclusive"):
        parser.add_argument(name, action="store_true")
    return parser


def read_request(text: str, arguments: Sequence[str], *, now: float, work_dir: str, user: str, uid: int) -> Request:
    """Return the request in a batch script and in options, which take precedence. Raises `Refused`."""
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
    tasks = given.ntasks or given.ntasks_per_node * nodes
    array_tasks, throttle = _tasks(given.array)
    return Request(
        nodes=nodes,
        max_nodes=int(high or low),
        gpus_per_node=int(gpus[1]) if gpus else 0,
        gpus_total=given.gpus,
        tasks=tasks,
        cpus_per_node=max(math.ceil(tasks / max(nodes, 1)), 1),
        cpus_per_gpu=given.cpus_per_gpu,
        memory_mb=given.mem,
        licenses=LICENCES.text(given.licenses),
        node_names=hosts(given.nodelist),
        excluded=hosts(given.exclude),
        exclusive=given.exclusive,
        reservation=given.reservation,
        qos=given.qos,
        account=given.account,
        partition=given.partition,
        name=given.job_name or "script",
        comment=given.comment,
        work_dir=work_dir,
        time_limit_s=_limit(given.time),
        begin=_begin(given.begin, now),
        hold=given.hold,
        requeue=not given.no_requeue,
        array_tasks=array_tasks,
        throttle=throttle,
        user=user,
        uid=uid,
    )


def _limit(text: str) -> float:
    if not text:
        return 0.0
    parts = [int(part) for part in text.split(":")]
    return 60.0 * parts[0] if len(parts) == 1 else float(sum(p * 60**i for i, p in enumerate(reversed(parts))))


def _begin(text: str, now: float) -> float:
    match = re.fullmatch(r"now(?:\+(\d+)(second|minute|hour|day)?s?)?", text or "now")
    if match is None:
        raise Refused(f"sbatch: Invalid --begin specification: {text}")
    return now + int(match[1]) * UNITS[match[2] or "second"] if match[1] else 0.0


def _tasks(text: str) -> tuple[tuple[int, ...], int]:
    """Return the tasks and the throttle of a text such as `0-7%1` or `1,3,5-9:2`; none of an empty text."""
    if not text:
        return (), 0
    numbers, _, most = text.partition("%")
    tasks: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None or int(match[2] or match[1]) >= MAX_ARRAY_SIZE:
            raise Refused(f"sbatch: Invalid job array specification: {text}")
        tasks |= {*range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))}
    if not tasks:
        raise Refused(f"sbatch: Invalid job array specification: {text}")
    return tuple(sorted(tasks)), int(most or 0)
