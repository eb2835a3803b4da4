"""The figures in a real Prometheus: every panel of the dashboard, every alert, over a companion's process at work."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import prometheus
from tests.marks import nightly
from tests.prometheus import ALERTS, Prometheus, check_panels, check_rules, free_port, promtool

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
BOTH_WAYS = 'count(rate(slurm_ones_resize_phase_seconds_count{phase="pause",way="%s"}[30s]) > 0)'


@pytest.fixture(scope="module", autouse=True)
def _there() -> None:
    pytest.importorskip("prometheus_client")
    why = prometheus.missing()
    if why:
        pytest.skip(why)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, int]]:
    """A Prometheus over a companion that resizes jobs, and the companion's port."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    with (folder / "companion.log").open("w") as log:
        work = subprocess.Popen(
            [sys.executable, "-m", "tests.service.measured", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        there = Prometheus(folder, {"slurm-ones": (f"127.0.0.1:{port}", "/metrics")})
        try:
            for way in ("requeue", "blocks"):
                there.until(BOTH_WAYS % way)
            assert work.poll() is None, (folder / "companion.log").read_text()
            yield there, port
        finally:
            there.close()
            work.kill()
            work.wait()


@pytest.mark.nightly
def test_every_panel_and_rule(scraped: tuple[Prometheus, int]) -> None:
    """Protects a dashboard and alerts that a site installs unread: no query is empty, no rule in error.

    What the dashboard shows of Slurm itself is asked of a real Slurm (`tests/endtoend/test_metrics.py`).
    """
    there, _ = scraped
    check_panels(there, lambda query: "slurm_jobs" in query.expr)
    check_rules(there)
    for label in ("partition", "account"):
        assert there.ask(f"label/{label}/values", **{"match[]": "slurm_ones_gpu_seconds_total"})


@pytest.mark.parametrize("at_work", [False, nightly(True)])
def test_lint(request: pytest.FixtureRequest, at_work: bool) -> None:
    from prometheus_client import generate_latest

    from slurm_ones.service.metrics import Metrics

    text = generate_latest(Metrics().registry).decode()
    if at_work:
        _, port = request.getfixturevalue("scraped")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    assert text.count("# TYPE slurm_ones_") > 20
    checked = promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr


def test_each_alert_comes_and_does_not_come(tmp_path: Path) -> None:
    """Each where it is to come, and not where it is not; one without a test is a mistake."""
    assert promtool("check", "rules", str(ALERTS)).returncode == 0
    tests = sorted(HERE.glob("alerts*.yml"))
    for file in (ALERTS, *tests):
        shutil.copy(file, tmp_path)
    done = promtool("test", "rules", *(str(tmp_path / file.name) for file in tests))
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    text = "".join(file.read_text() for file in tests)
    assert alerts == set(re.findall(r"alertname: (\w+)\n *exp_alerts:\n", text))
