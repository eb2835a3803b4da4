"""What the live page costs: its server, its readers, and the companion beside it.

    OMP_NUM_THREADS=1 python benchmarks/live_page.py --json live_page.json

Three sites of 256 nodes are made, in SQLite: an idle one, one with 1,000 jobs (700 run, 300 wait, with reports, and
decisions on all of them), and that one with 100,000 jobs more that have ended. `slurm-ones web` serves each, in a
process of its own.

* `update_ms`: the server's processor time for one tick of the companion: its look, the reading, the page, and one
  browser's request for what changed. The mean over `--ticks` ticks, from /proc's schedstat, less what the server uses
  in as many seconds without a tick (`idle_ms_a_second`: its looks, and its framework's clock).
* `first_paint_ms`: from the address to the first text on the screen, in a real Chromium that has never seen the page:
  the browser's own `first-contentful-paint`. The median and the largest of `--paints`.
* `tick_ratio`: the processor time of the companion's tick on a simulated cluster of 1,000 jobs, while a server serves
  100 browsers that hear of each tick and fetch the page, over that without a server. Some ticks of each kind in turns,
  in one run of one companion; the ratio of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from ones_db import DecisionJobRecord, DecisionRecord, HealthRecord, NodeRecord, Store, migrate
from ones_db.engine import backend_behind, backend_of, transaction
from ones_db.leader import LeaderLock
from ones_db.reasons import Reason
from ones_db.records import AlternativeRecord
from ones_db.shape import Shape
from ones_db.tables import METADATA

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_ones.companion import Companion
from slurm_ones.simulate.run import companion_settings, fast_directory
from slurm_ones.simulate.slurm.timeline import ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.simulate.world import World

TOKEN = "benchmark"
CLUSTER = "bench"
RUNNING, WAITING = 700, 300
ENDED = 100_000
USERS = 100
NODES, GPUS = 256, 8
VIEWERS = 100
BETWEEN_S = 1.5
"""Between two ticks: the server looks once a second."""
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
WHY = "the search gives it 4 GPUs: of the sizes that were weighed this one gains most for the jobs of the partition"


# -- sites ------------------------------------------------------------------------------------------------------------


def site(url: str, running: int, waiting: int, ended: int) -> None:
    """A database with so many jobs. All that is in it was written within the last days."""
    migrate.upgrade(url)
    now = time.time()
    with Store.open(url, CLUSTER) as store, LeaderLock(url, CLUSTER) as lock:
        lock.take(now)
        store.record_nodes(now, [NodeRecord(f"n{i}", "UP", True, GPUS, "gpu") for i in range(NODES)])
    engine = backend_of(url).engine("write")
    try:
        with transaction(engine, write=True) as connection:
            _fill(connection, now, running, waiting, ended)
    finally:
        engine.dispose()
    ids = [1000 + ended + n for n in range(1, running + waiting + 1)]
    weighed = tuple(AlternativeRecord(Shape(1, gpus), 64 * gpus, 1.0 / gpus) for gpus in (4, 2, 8))
    reason = Reason(WHY)
    with Store.open(url, CLUSTER) as store:
        for n in range(10 if ids else 0):
            jobs = tuple(
                DecisionJobRecord(i, Shape(1, 4), 256, reason, Shape(1, 2), 128, alternatives=weighed) for i in ids
            )
            store.add_decision(DecisionRecord(now - 600.0 + 60.0 * n, "ones", "act", seconds=0.1, score=1.0, jobs=jobs))
    tick(url)


def _fill(connection: Connection, now: float, running: int, waiting: int, ended: int) -> None:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("jobs", "runs", "throughput", "epochs", "resizes")}
    for n in range(1, ended + running + waiting + 1):
        over, runs = n <= ended, n <= ended + running
        # Jobs that ended did so over a year, the last of them now; of those that run each has begun within a day.
        begin = now - 3.15e7 * (1.0 - n / ended) - 7200.0 if over else now - 60.0 - n * 7919 % 80_000
        words = {"account": f"lab{n % 7}", "partition": "gpu", "comment": "ones: gpus=1-16", "work_dir": f"/home/{n}"}
        rows["jobs"].append(
            {"id": n, "cluster_id": 1, "job_id": 1000 + n, "submit_time": begin, "name": f"train-{n % 40}", **words}
            | {"user_name": f"user{n % USERS}", "requested_nodes": 1, "requested_gpus_per_node": 2, "restart": 1}
            | {"elastic": True, "refusal": "", "report_note": ""}
            | {"state": "COMPLETED" if over else "RUNNING" if runs else "PENDING"}
            | {"end_time": begin + 7200.0 if over else None, "exit_code": 0 if over else None}
            | {"base_batch": 64, "max_batch": 512, "max_local_batch": 64, "dataset": 6400, "epochs": 100}
            | {"max_passes": 1}
        )
        for restart in (0, 1) if runs else ():
            run, start = 2 * n - 1 + restart, begin + 30.0 + 30.0 * restart
            last = over or not restart
            rows["runs"].append(
                {"id": run, "job_id": n, "restart": restart, "nodes": 1, "gpus_per_node": 2 + 2 * restart}
                | {"node_list": f"n{n % NODES}", "start_time": start, "end_time": start + 25.0 if last else None}
                | {"batch": 128, "hello_time": start + 5.0, "hello_number": 1, "report_time": start + 20.0}
                | {"report_offset": 900, "report_number": 9, "epoch": 3, "cursor": 640, "step": 90, "resizes": restart}
            )
            rows["throughput"] += [
                {"run_id": run, "number": k, "time": start + k, "epoch": 3, "step": 10 * k, "cursor": 640, "batch": 128}
                | {"samples": 640, "seconds": 1.0, "lr_factor": 1.0, "loss": 1.0 / k}
                for k in (2, 4, 6)
            ]
            rows["epochs"] += [
                {"run_id": run, "number": k, "time": start + k, "epoch": k // 2, "step": 10 * k, "samples": 6400}
                | {"loss": 1.0 / k, "accuracy": 0.1 * k}
                for k in (3, 5)
            ]
        if runs:
            rows["resizes"].append(
                {"id": n, "job_id": n, "decision_id": None, "restart": 0, "old_nodes": 1, "old_gpus_per_node": 2}
                | {"old_batch": 128, "new_nodes": 1, "new_gpus_per_node": 4, "new_batch": 256, "state": "done"}
                | {
                    "order_number": n,
                    "back": False,
                    "started": begin + 55.0,
                    "ended": begin + 60.0,
                    "outcome": "",
                    "pause_s": 5.0,
                }
            )
    for name, found in rows.items():
        if found:
            connection.execute(METADATA.tables[name].insert(), found)
            if "id" in METADATA.tables[name].columns:
                backend_behind(connection).renumber(connection, METADATA.tables[name])


def tick(url: str) -> None:
    """As a companion that has ticked."""
    with Store.open(url, CLUSTER) as store:
        now = time.time()
        store.record_health(HealthRecord(now, "act", 60.0, now, 0.25, RUNNING, WAITING, 4 * RUNNING))


# -- the server -------------------------------------------------------------------------------------------------------


class Server:
    """`slurm-ones web` on a database, in a process of its own."""

    def __init__(self, url: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "slurm_ones.cli", "web", "--port", str(self.port), "--database", url]
        environment = {**os.environ, "SLURM_ONES_WEB_TOKEN": TOKEN}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while True:
            try:
                if 'data-number="0"' not in self.get("/"):
                    return
            except ConnectionRefusedError:
                pass
            if time.monotonic() > until or self._process.poll() is not None:
                raise SystemExit("the page is not served")
            time.sleep(0.1)

    def get(self, path: str) -> str:
        """What is answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Cookie": f"slurm-ones-{self.port}={TOKEN}", "Accept-Encoding": "gzip"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        text = (gzip.decompress(body) if answer.getheader("Content-Encoding") == "gzip" else body).decode()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {text[:200]}")
        return text

    def listen(self) -> http.client.HTTPResponse:
        """The stream of ticks, with its first line read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", "/events", headers={"Cookie": f"slurm-ones-{self.port}={TOKEN}"})
        answer = connection.getresponse()
        _next(answer)
        return answer

    def processor_s(self) -> float:
        """Seconds on a processor so far, of all threads that live."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _next(answer: http.client.HTTPResponse) -> None:
    """Wait for the next tick."""
    while not answer.readline().startswith(b"data: "):
        if answer.isclosed():
            raise OSError("the server has ended the stream")
    answer.readline()


@contextmanager
def served(url: str) -> Iterator[Server]:
    server = Server(url)
    try:
        yield server
    finally:
        server.close()


def updates(url: str, ticks: int) -> dict[str, float]:
    """The server's processor time a tick, with one browser that fetches what changed."""
    with served(url) as server:
        stream, times, sizes, idle = server.listen(), [], [], 0.0
        for n in range(ticks + 1):
            before, began = server.processor_s(), time.monotonic()
            if n:
                tick(url)
                _next(stream)
                sizes.append(len(server.get("/?part=1")))
            time.sleep(BETWEEN_S if n else 2 * BETWEEN_S)
            used, took = server.processor_s() - before, time.monotonic() - began
            idle = idle if n else used / took
            times += [used - idle * took] if n else []
    return {
        "update_ms": round(1e3 * statistics.fmean(times), 1),
        "largest_ms": round(1e3 * max(times), 1),
        "idle_ms_a_second": round(1e3 * idle, 1),
        "page_kib": round(sizes[-1] / 1024),
    }


def paints(url: str, count: int) -> dict[str, float]:
    """The first text on the screen, in browsers that have never seen the page."""
    from tests.show.test_browser import driver, installed

    if why := installed():
        raise SystemExit(why)
    found = []
    with served(url) as server:
        for _ in range(count):
            browser = driver()
            try:
                # The server must make the page anew.
                tick(url)
                time.sleep(BETWEEN_S)
                browser.get(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
                until = time.monotonic() + 30
                while (painted := browser.execute_script(PAINT)) is None and time.monotonic() < until:
                    time.sleep(0.05)
                found.append(float(painted))
            finally:
                browser.quit()
    return {"first_paint_ms": round(statistics.median(found)), "largest_paint_ms": round(max(found))}


# -- the companion beside it ------------------------------------------------------------------------------------------


def beside(rounds: int, each: int) -> dict[str, float]:
    """The companion's ticks on 1,000 simulated jobs, `each` without a server, as many with one, and so on."""
    spec = ClusterSpec(NODES, GPUS)
    apps = {"cnn": build(KINDS["resnet18-cifar10"], name="cnn")}
    jobs = [
        Submission(f"job-{n}", 0.0, "cnn", 1 + n % 4, apps["cnn"].base_batch, elastic=True, epochs=20.0)
        for n in range(RUNNING + WAITING)
    ]
    with tempfile.TemporaryDirectory(dir=fast_directory()) as name:
        folder = Path(name)
        world = World(Workload("live", tuple(jobs), apps), spec, folder, ClusterSettings())
        settings = companion_settings(spec, folder, {}, tick_s=60.0, policy="fifo", seed=1)
        url = f"sqlite:///{folder / 'ones.sqlite'}"
        migrate.upgrade(url)
        took: dict[bool, list[float]] = {False: [], True: []}
        with Store.open(url, settings.cluster) as store:
            companion = Companion(settings, world.client, store, clock=world.timeline)

            def ticked() -> float:
                world.pass_time(60.0)
                began = time.process_time()
                companion.tick()
                used = time.process_time() - began
                now = world.timeline.now
                store.record_health(HealthRecord(now, "act", 60.0, now, used, RUNNING, WAITING, 0))
                time.sleep(BETWEEN_S)
                return used

            for _ in range(3):
                ticked()
            heard = 0
            # Each kind comes first as often as last.
            for watched in [False, True, True, False] * rounds:
                if not watched:
                    took[False] += [ticked() for _ in range(each)]
                    continue
                with served(url) as server, Audience(server.port) as audience:
                    took[True] += [ticked() for _ in range(each)]
                    heard += audience.fetched()
    usual, seen = statistics.median(took[False]), statistics.median(took[True])
    return {
        "tick_ratio": round(seen / usual, 3),
        "tick_ms": round(1e3 * usual, 1),
        "watched_tick_ms": round(1e3 * seen, 1),
        "ticks_of_each": len(took[True]),
        "pages_fetched": heard,
    }


class Audience:
    """Browsers, as far as a server can tell, in a process of their own."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, __file__, "--audience", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def __enter__(self) -> Audience:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def fetched(self) -> int:
        """How many pages they have fetched."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


async def audience(port: int) -> None:
    """The audience's own process: each listens, and fetches the page at each tick."""
    fetched = 0
    head = f"HTTP/1.1\r\nHost: x\r\nCookie: slurm-ones-{port}={TOKEN}\r\nAccept-Encoding: gzip\r\n"

    async def one(listening: asyncio.Event) -> None:
        nonlocal fetched
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /events {head}\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"data: "):
                if not listening.is_set():
                    listening.set()
                    continue
                page, asking = await asyncio.open_connection("127.0.0.1", port)
                asking.write(f"GET /?part=1 {head}Connection: close\r\n\r\n".encode())
                await page.read()
                asking.close()
                fetched += 1

    started = [asyncio.Event() for _ in range(VIEWERS)]
    tasks = [asyncio.ensure_future(one(event)) for event in started]
    await asyncio.gather(*(event.wait() for event in started))
    print(len(tasks), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(fetched, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=5, help="of each site, after a first one")
    parser.add_argument("--paints", type=int, default=3)
    parser.add_argument("--ended", type=int, default=ENDED, help="jobs that have ended, of the largest site")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--audience", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.audience is not None:
        asyncio.run(audience(asked.audience))
        return
    found: dict[str, Any] = {"cpus": os.cpu_count(), "load": os.getloadavg()}
    with tempfile.TemporaryDirectory(dir=fast_directory()) as name:
        for title, sizes in (
            ("idle", (0, 0, 0)),
            ("1,000 jobs", (RUNNING, WAITING, 0)),
            (f"1,000 jobs, {asked.ended:,} ended", (RUNNING, WAITING, asked.ended)),
        ):
            url = f"sqlite:///{name}/{sum(sizes)}.sqlite"
            site(url, *sizes)
            found[title] = updates(url, asked.ticks)
            if sizes[0]:
                found[title] |= paints(url, asked.paints)
            print(f"{title}: {found[title]}", flush=True)
    found["the companion beside it"] = beside(rounds=1, each=asked.ticks)
    print(found["the companion beside it"], flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
