"""A real Prometheus, Debian's, over what tests serve; and what the dashboard in the package asks it."""

from __future__ import annotations

import json
import math
import random
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from slurm_ones.service import dashboard
from tests import debian
from tests.cluster import linux, paths

ALERTS = paths.REPOSITORY / "slurm_ones/service/monitoring/slurm-ones-alerts.yml"
VARIABLES = {"$partition": ".*", "$account": ".*", "$__rate_interval": "30s"}
"""What Grafana puts into queries: of the two lists everything."""

Series = dict[str, Any]


def missing() -> str:
    """Why there is no Prometheus, empty where there is one; installs Debian's where that can be done."""
    return debian.installed(("prometheus", "promtool"), ("prometheus",))


def free_port() -> int:
    """One of those that the system gives to nobody who connects."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Query:
    """What one line of a panel asks."""

    panel: str
    expr: str


def queries() -> list[Query]:
    """All that the dashboard asks, with Grafana's variables filled in."""
    panels = json.loads(dashboard.text())["panels"]
    return [Query(panel["title"], filled(one["expr"])) for panel in panels for one in panel.get("targets", ())]


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def enter(network: int | None) -> None:
    """Have this thread be in the network of that process from now on."""
    if network is not None:
        with Path(f"/proc/{network}/ns/net").open("rb") as space:
            linux.setns(space.fileno())


@dataclass
class Prometheus:
    """One that scrapes `targets`, by the job's name: address and path.

    With `network` it is in the network of that process, and is asked there.
    """

    folder: Path
    targets: Mapping[str, tuple[str, str]]
    network: int | None = None

    def __post_init__(self) -> None:
        jobs = [
            {
                "job_name": name,
                "metrics_path": path,
                "static_configs": [{"targets": [address], "labels": {"cluster": "here"}}],
            }
            for name, (address, path) in self.targets.items()
        ]
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": jobs,
        }
        # JSON is YAML.
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        checked = promtool("check", "config", str(self.folder / "prometheus.yml"))
        assert checked.returncode == 0, checked.stderr
        self.began = time.time()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1/"
        self._log = (self.folder / "prometheus.log").open("w")
        self._asking = ThreadPoolExecutor(1, initializer=enter, initargs=(self.network,))
        self._process = subprocess.Popen(
            [
                *(["nsenter", f"--net=/proc/{self.network}/ns/net"] if self.network is not None else []),
                str(shutil.which("prometheus")),
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._asking.shutdown()
        self._log.close()

    def ask(self, what: str, **values: str) -> Any:
        """The data of an answer of its API; raises AssertionError where it refuses, OSError while it starts."""
        return self._asking.submit(self._ask, what, values).result()

    def _ask(self, what: str, values: Mapping[str, str]) -> Any:
        query = urllib.parse.urlencode(values)
        try:
            with urllib.request.urlopen(f"{self.url}{what}?{query}", timeout=60) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it listens before its storage is open
                raise
            raise AssertionError(f"{values}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        return found["data"]

    def over_time(self, expr: str) -> list[Series]:
        """The series of an expression, each second from the beginning until now."""
        now = time.time()
        data = self.ask("query_range", query=expr, start=str(now - int(now - self.began)), end=str(now), step="1")
        return list(data["result"])

    def until(self, expr: str, timeout_s: float = 300.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                if self.ask("query", query=expr)["result"]:
                    return
            except OSError:
                assert self._process.poll() is None, (self.folder / "prometheus.log").read_text()
            assert time.monotonic() < end, f"{expr} stays empty"
            time.sleep(0.3)


def numbers(series: list[Series]) -> Iterator[float]:
    for one in series:
        for _, text in one["values"]:
            if math.isfinite(value := float(text)):
                yield value


def check_panels(prometheus: Prometheus, left_out: Callable[[Query], bool] = lambda query: False) -> None:
    """Every panel shows something: a valid query, numbers in its answer, and none that cannot be."""
    for query in queries():
        if left_out(query):
            continue
        # What fills a gap with 0 would be something for nothing.
        until = time.monotonic() + 30
        # What comes and goes, such as a refusal, may not have been scraped yet.
        while not (values := list(numbers(prometheus.over_time(query.expr.removesuffix(" or vector(0)"))))):
            assert time.monotonic() < until, query
            time.sleep(0.5)
        assert min(values) >= 0, query


def check_rules(prometheus: Prometheus) -> None:
    """Every rule in the package is evaluated without an error."""
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == ALERTS.read_text().count("- alert:")
    assert [(rule["name"], rule["health"], rule.get("lastError")) for rule in rules] == [
        (rule["name"], "ok", None) for rule in rules
    ]
