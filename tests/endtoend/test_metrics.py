"""Our figures and Slurm's own, in one Prometheus, while jobs of a real Slurm are resized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import prometheus
from tests.endtoend.harness import Harness
from tests.prometheus import Prometheus, Query, check_panels, check_rules

pytestmark = pytest.mark.cluster
PORT = 9754
PAUSED = 'count(rate(slurm_ones_resize_phase_seconds_count{phase="pause"}[30s]) > 0)'


@pytest.fixture
def scraping(harness: Harness, tmp_path: Path) -> Iterator[Prometheus]:
    why = prometheus.missing()
    if why:
        pytest.skip(why)
    if not harness.cluster.site.metrics:
        pytest.skip("this Slurm has no OpenMetrics")
    targets = {"slurm-ones": (f"127.0.0.1:{PORT}", "/metrics"), "slurm": ("127.0.0.1:6817", "/metrics/jobs")}
    there = Prometheus(tmp_path, targets, harness.cluster.box.init)
    yield there
    there.close()


def _elsewhere(query: Query) -> bool:
    """What these jobs do not do: they are not of blocks, and every resize takes effect."""
    return 'way="blocks"' in query.expr or query.panel == "Resizes without effect"


@pytest.mark.nightly
def test_the_dashboard_over_a_real_slurm(harness: Harness, scraping: Prometheus) -> None:
    """Protects an operator's dashboard: every panel shows something, Slurm's own figures beside ours, by account."""
    pytest.importorskip("prometheus_client")
    job_id = harness.light("--comment=ones: gpus=1-8 batch=16-64", ONES_REPORT_EVERY_S="0.3")
    harness.trains(job_id)
    settings = harness.settings(scope='"own"', metrics_port=str(PORT))
    with harness.running(settings, "--act"):
        scraping.until("sum(slurm_ones_running_jobs) > 0 and sum(slurm_jobs_running) > 0")
        # What begins now is seen to begin.
        harness.light("--comment=ones: gpus=1-2 resize=off")
        harness.light("--comment=ones: gpus=1-2", "--begin=now+1hour")
        scraping.until("sum(slurm_ones_waiting_jobs) > 0")
        scraping.until('sum(rate(slurm_ones_refusals_total{reason="resize_off"}[30s])) >= 0')
        scraping.until(PAUSED)
        scraping.until("sum(rate(slurm_ones_throughput_ratio_count[30s])) > 0")
        check_panels(scraping, _elsewhere)
        check_rules(scraping)
    accounts = scraping.ask("label/account/values", **{"match[]": "slurm_ones_gpus"})
    assert accounts == ["lab" if harness.cluster.accounting else "none"]
