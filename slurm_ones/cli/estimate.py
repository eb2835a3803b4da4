"""`slurm-ones estimate`: when Slurm would start a job at other sizes."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from slurm_ones.cli.by_hand import JobArgument, gpus_of, look, opted_in, size_of
from slurm_ones.cli.common import JsonOption, command, console, job_number, print_json
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.model import Job

_START = re.compile(r"to start at (\S+)")


@dataclass(frozen=True)
class Wait:
    """Slurm's word on one size."""

    gpus: int
    nodes: int
    gpus_per_node: int
    wait_s: float | None
    """Seconds until a new job of this size would start; None where Slurm does not say."""
    note: str = ""


def start_of(answer: str) -> float | None:
    """The Unix time in the answer of `sbatch --test-only`; None where it names none."""
    match = _START.search(answer)
    if match is None:
        return None
    try:
        return float(match[1]) if match[1].isdecimal() else datetime.fromisoformat(match[1]).timestamp()
    except ValueError:
        return None


def test_command(job: Job, nodes: int, gpus_per_node: int) -> list[str]:
    """What asks Slurm when a job like this one would start at that shape; nothing is submitted."""
    partition = job.partition
    argv = ["sbatch", "--test-only", f"--partition={partition}", f"--nodes={nodes}"]
    argv += [f"--gres=gpu:{gpus_per_node}"] if job.gpus_per_node else []
    argv += [f"--account={job.account}"] if job.account else []
    argv += [f"--time={max(int(job.time_limit_s // 60), 1)}"] if job.time_limit_s else []
    return [*argv, "--wrap=true"]


def waits(client: CommandClient, job: Job, shapes: list[tuple[int, int]]) -> list[Wait]:
    """Slurm's word on each of these (nodes, GPUs per node)."""
    found = []
    for nodes, gpus in shapes:
        size = (nodes * gpus, nodes, gpus)
        try:
            answer = client.test_only(test_command(job, nodes, gpus))
        except SlurmError as error:
            found.append(Wait(*size, None, str(error).partition(": ")[2]))
            continue
        start = start_of(answer)
        note = "" if start is not None else "Slurm does not say"
        found.append(Wait(*size, None if start is None else max(start - time.time(), 0.0), note))
    return found


@command
def estimate(
    job: JobArgument,
    sizes: Annotated[list[str], typer.Argument(metavar="SIZE…", help="GPUs, such as 8, or nodes × GPUs, such as 2x4.")],
    as_json: JsonOption = False,
) -> None:
    """Ask Slurm when a job like this one would start at other sizes, from now; nothing is submitted.

    A resize by a requeue waits about so long. One by blocks trains on meanwhile, and waits for the difference alone.
    """
    client, job_id = CommandClient(), job_number(job)
    now = look(client, job_id)
    opted_in(now)
    each = now.gpus_per_node or 1
    shapes = []
    for size in sizes:
        gpus = gpus_of(size)
        nodes, _, per_node = size.partition("x")
        shapes.append((int(nodes), int(per_node)) if per_node else (max(-(-gpus // each), 1), min(gpus, each)))
    found = waits(client, now, shapes)
    if as_json:
        print_json({"job": job_id, "gpus": size_of(now), "sizes": [asdict(one) for one in found]})
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("GPUs", "shape", "would start"):
        table.add_column(heading, justify="right" if heading == "GPUs" else "left")
    for one in found:
        when = one.note if one.wait_s is None else "now" if one.wait_s < 1 else f"in {one.wait_s:.0f} s"
        table.add_row(str(one.gpus), f"{one.nodes}x{one.gpus_per_node}", when)
    console.print(table)
