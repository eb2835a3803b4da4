"""The live page over a job database, on a real server."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from ones_db import HealthRecord, NodeRecord, Store
from ones_db.leader import LeaderLock
from slurm_ones.show.app import Web
from slurm_ones.show.logs import Logs
from tests.db.make import SPEC, decision, epoch, hello, job, report, resized_job, run, said, throughput
from tests.test_cli import HOSTILE
from tests.waiting import until

TOKEN = "a-secret"


@dataclass
class Page:
    """A served live page, and its database."""

    web: Web
    url: str
    port: int

    @property
    def cookie(self) -> str:
        """What a browser sends that has opened the address with the token."""
        return f"slurm-ones-{self.port}{quote(self.web._root, safe='')}={TOKEN}"

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of what is answered; with the token's cookie unless `Cookie` is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Cookie": self.cookie} | headers)
        answer = connection.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found

    def tick(self, at: float | None = None) -> None:
        now = time.time() if at is None else at
        with Store.open(self.url, "gres") as store:
            store.record_health(HealthRecord(now, "act", 60.0, now, 0.25, 2, 2, 6))


@pytest.fixture
def url(empty_url: str) -> str:
    """A companion that leads; a job that was resized, one that runs, one that waits, one of a hostile user."""
    url = empty_url
    now = time.time()
    with Store.open(url, "gres") as store, LeaderLock(url, "gres") as lock:
        lock.take(now)
        resized_job(store, 7)
        store.record_jobs([job(8, state="PENDING", user="bob", name="waits-for-gpus")])
        store.record_jobs([job(9, name=HOSTILE, user=HOSTILE, refusal=said(HOSTILE), state="PENDING")])
        store.record_jobs([job(10, name="trains", user="bob", submit_time=now - 600.0)])
        store.record_runs([run(10, gpus=2, start_time=now - 500.0, node_list=("n3",))])
        epochs = [epoch(3 + n, n, now - 300 + n, loss=2.0 / (n + 1), accuracy=0.2 * n) for n in range(4)]
        samples = [throughput(2, now - 400, seconds=100.0, samples=6400)]
        report(store, 10, 0, spec=SPEC, hello=hello(1, now - 490), samples=samples, epochs=epochs, offset=50, number=6)
        states = {"n1": "UP", "n2": "DOWN", "n3": "UP"}
        store.record_nodes(now, [NodeRecord(name, state, state == "UP", 4, "gpu") for name, state in states.items()])
        store.record_other_gpus(now - 400.0, 3)
        store.add_decision(decision(now - 60.0, 7, 8, 10))
        store.record_health(HealthRecord(now, "act", 60.0, now, 0.25, 2, 2, 6))
    return url


@pytest.fixture
def serve(url: str) -> Iterator[Callable[..., Page]]:
    """Serves the page as it is asked to, until the test ends."""
    uvicorn = pytest.importorskip("uvicorn")
    servers: list[tuple[Any, threading.Thread]] = []

    def begin(
        token: str = TOKEN, user_header: str = "", root: str = "", look_s: float = 0.05, logs: Logs | None = None
    ) -> Page:
        def opened() -> Store:
            return Store.open(url, "gres", read_only=True)

        from slurm_ones.show.connections import OPTIONS, BoundedSocket

        web = Web(opened, token, root, logs, user_header)
        web.feed._look_s = look_s
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        server = uvicorn.Server(uvicorn.Config(web.app, **OPTIONS))
        door = BoundedSocket(listening, server.server_state.connections)
        thread = threading.Thread(target=server.run, args=([door],), daemon=True)
        thread.start()
        servers.append((server, thread))
        page = Page(web, url, door.getsockname()[1])
        until(lambda: web.feed.moment.number)
        return page

    yield begin
    for server, thread in servers:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
