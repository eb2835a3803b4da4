"""What the membership of a job of blocks costs: threads and connections of a rank, forming a group, and many agents.

    python benchmarks/membership.py --json membership.json

Two real blocks of two ranks train for some seconds; what each rank holds is read from the kernel and from the stacks
that it prints. A group of many ranks of this machine is formed as plans form it. Light agents are processes without
torch, which hear and sign as a rank's thread does; more of them are connections of one process. Everything is on one
machine, by the loopback device, and gloo.
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

from ones_wrapper.network.client import StoreClient
from ones_wrapper.network.door import listen
from ones_wrapper.network.job_network import JobNetwork
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import HOST, MEMBER, StoreServer

# What needs torch is imported once the light agents are forked.

ROUNDS = 5
STEADY_S = 10.0
PLAN = b"x" * 2048
PLACE = "term-0-light"
KINDS = ("lost", "mode", "leave", "newest", "plan", "verdict")
DEAD_S = 5.0


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
    from ones_wrapper.protocol import First
    from tests.wrapper.membership.blocks import Job

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
    """Seconds until this number of processes of this machine, which are connected to the store, have formed a group."""
    from ones_wrapper.membership.board import Board
    from ones_wrapper.membership.connections import control_group

    network = JobNetwork.here()
    took, processor = [], []
    for number in range(ROUNDS):
        board = Board.hosted(network, number)

        def work(rank: int, place: str = board.place) -> None:
            mine = Board(network, network.host, network.port, place, 60.0)
            mine.count("here", 1)
            mine.wait("go", 60.0)
            before = time.process_time()
            control_group(mine, "group", rank, ranks, 60.0)
            mine.ask("append", b"processor", b"%.6f " % (time.process_time() - before))
            mine.count("done", 1)

        children = [_in_child(lambda rank=rank: work(rank)) for rank in range(ranks)]  # type: ignore[misc]
        _until(lambda board=board: board.count("here") == ranks)  # type: ignore[misc]
        began = time.monotonic()
        board.put("go", "")
        _until(lambda board=board: board.count("done") == ranks)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        processor.append(sum(map(float, (board.read("processor") or "").split())))
        for pid in children:
            os.waitpid(pid, 0)
    return {
        "ranks": ranks, "median_s": round(statistics.median(took), 3), "all_s": [round(one, 3) for one in took],
        "processor_s": round(statistics.median(processor), 3),
    }  # fmt: skip


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _server() -> tuple[JobNetwork, int]:
    """A store in a process of its own."""
    secret, listener = JobSecret.fresh(), listen("127.0.0.1")

    def work() -> None:
        StoreServer(listener, secret)
        time.sleep(600.0)

    network = JobNetwork(secret, "127.0.0.1", listener.getsockname()[1])
    pid = _in_child(work)
    listener.close()
    return network, pid


def _agent(network: JobNetwork, number: int) -> None:
    """Signs once a second, and says when it heard of the plan."""
    client = StoreClient(network.host, network.port, network.secret, MEMBER, PLACE, 60.0)
    client.follow(*KINDS)
    signed, said = time.monotonic() - number % 10 / 10, False
    while True:
        client.listen(0.1)
        if not said and b"plan-1" in client.news:
            said = bool(client.ask("append", b"heard", b"%.4f " % time.monotonic()) is not None)
        if time.monotonic() - signed > 1.0:
            client.ask("sign", b"%d-0" % number, b"0")
            signed = time.monotonic()


def _until(holds: Callable[[], bool], within_s: float = 300.0) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s
        time.sleep(0.02)
    return time.monotonic() - began


def light_agents(count: int) -> dict[str, Any]:
    """Processes of which one falls silent in the end."""
    network, server = _server()
    host = network.client(HOST, PLACE)
    pids = [_in_child(lambda number=number: _agent(network, number)) for number in range(count)]  # type: ignore[misc]
    names = [b"%d-0" % number for number in range(count)]
    try:
        time.sleep(3.0 + count / 50)
        before = _cpu_s(server)
        time.sleep(STEADY_S)
        steady = (_cpu_s(server) - before) / STEADY_S
        began = time.monotonic()
        host.ask("set", b"plan-1", PLAN)

        def heard() -> list[bytes]:
            return host.ask("peek", b"heard")[0].split()

        _until(lambda: len(heard()) == count)
        reached = max(float(one.lstrip(b"+")) for one in heard()) - began
        os.kill(pids[7], 19)
        silent = _until(lambda: any(int(age) > 1000 * DEAD_S for age in host.ask("ages", *names)))
        return {
            "agents": count,
            "plan_s": round(reached, 3),
            "store_core": round(steady, 4),
            "named_s": round(silent, 2),
        }
    finally:
        for pid in (*pids, server):
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def agents_in_one(count: int) -> dict[str, Any]:
    """Connections of one process, which takes its turns for all of them: the costs of each."""
    network, server = _server()
    host = network.client(HOST, PLACE)
    try:
        clients = [StoreClient(network.host, network.port, network.secret, MEMBER, PLACE, 60.0) for _ in range(count)]
        for client in clients:
            client.follow(*KINDS)
        before, began = _cpu_s(server), time.monotonic()
        for number, client in enumerate(clients):
            client.ask("sign", b"%d-0" % number, b"0")
        signs, signs_s = _cpu_s(server) - before, time.monotonic() - began
        began = time.monotonic()
        before, mine = _cpu_s(server), time.process_time()
        host.ask("set", b"plan-1", PLAN)
        for client in clients:
            while b"plan-1" not in client.news:
                client.listen(5.0)
        plan_s = time.monotonic() - began
        processor = [_cpu_s(server) - before, time.process_time() - mine]
        began = time.monotonic()
        host.ask("ages", *(b"%d-0" % number for number in range(count)))
        return {
            "agents": count, "plan_s": round(plan_s, 3),
            "plan_processor_s": {"store": round(processor[0], 3), "agents": round(processor[1], 3)},
            "store_core": round(signs, 3), "signs_s": round(signs_s, 3),
            "ages_s": round(time.monotonic() - began, 4), "requests_a_second": count,
        }  # fmt: skip
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"
    found = {"light": light_agents(512), "one": agents_in_one(4096)}
    found |= {"group": group_formed(64), "rank": held_by_a_rank()}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
