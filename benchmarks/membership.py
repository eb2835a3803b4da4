"""What the membership of a job of blocks costs: threads and connections of a rank, forming a group, and many agents.

    python benchmarks/membership.py --json membership.json

Two real blocks of two ranks train for some seconds; what each rank holds is read from the kernel and from the stacks
that it prints. A group of many ranks of this machine is formed as plans form it. Everything is on one machine, by the
loopback device, and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_wrapper.membership.board import Board
from ones_wrapper.membership.connections import control_group
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.protocol import First
from tests.wrapper.membership.blocks import Job

ROUNDS = 5


def connections_of(pid: int, port: int) -> int:
    """Connections of a process to a port."""
    mine = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(str(entry.readlink()))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in mine for row in rows)


def threads_of(stacks: str) -> int:
    """Threads of ours in what one process printed of its stacks; its script's thread is none."""
    found = re.split(r"\n(?=(?:Current t|T)hread 0x)", stacks)
    return sum("/ones_wrapper/" in one and "runpy" not in one and "in run_script" not in one for one in found)


def held_by_a_rank() -> dict[str, Any]:
    """Of each rank of two blocks that train together: its threads of ours and its connections to the board's store."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory) / "job", epochs=4000)
        try:
            job.start(0, 2)
            job.wait(First)
            job.start(1, 2)
            job.order(0, 1)
            job.wait_for(0, 1)
            time.sleep(15.0)
            port = json.loads((job.directory / "hot" / "leader-0.json").read_text())["port"]
            rows = []
            for block in job.blocks:
                for pid in block.ranks():
                    before = len(block.errors)
                    os.kill(pid, 3)
                    time.sleep(0.5)
                    rows.append(
                        {"threads": threads_of(block.errors[before:]), "connections": connections_of(pid, port)}
                    )
            return {"ranks": rows}
        finally:
            job.kill()


def _in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def group_formed(ranks: int) -> dict[str, Any]:
    """Seconds until so many processes of this machine have formed a group."""
    network = JobNetwork.here()
    took = []
    for number in range(ROUNDS):
        board = Board.hosted(network, number)
        begin = time.monotonic() + 1.0

        def work(rank: int, place: str = board.place, begin: float = begin) -> None:
            mine = Board(network, network.host, network.port, place, 20.0)
            time.sleep(max(0.0, begin - time.monotonic()))
            control_group(mine, "group", rank, ranks, 60.0)
            mine.count("done", 1)

        children = [_in_child(lambda rank=rank: work(rank)) for rank in range(ranks)]  # type: ignore[misc]
        while board.count("done") < ranks:
            time.sleep(0.01)
        took.append(time.monotonic() - begin)
        for pid in children:
            os.waitpid(pid, 0)
    return {"ranks": ranks, "median_s": round(statistics.median(took), 3), "all_s": [round(one, 3) for one in took]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"
    found = {"group": group_formed(64), "rank": held_by_a_rank()}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
