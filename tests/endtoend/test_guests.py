"""Who waits for growth on real Slurms: guests are preempted for anybody, and used again; without guests the companion
gives growth back. The jobs train nothing; `benchmarks/guests.py` is the same with real training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.conftest import start
from tests.endtoend.guest_rows import ROWS, VARIANTS, rows_of
from tests.endtoend.guest_site import GuestStage

pytestmark = pytest.mark.cluster
BY_DAY = {"old": ("b2",)}
"""The others run every night; how the companion gives growth back is simulated by day (tests/simulate/test_harm.py)."""
CASES = [
    pytest.param(
        VARIANTS[variant].site,
        variant,
        name,
        marks=() if name in BY_DAY.get(variant, ()) else pytest.mark.nightly,
        id=f"{variant}-{name}",
    )
    for variant in sorted(VARIANTS, key=lambda variant: VARIANTS[variant].site.name)
    for name in rows_of(VARIANTS[variant])
]


@pytest.fixture(scope="module")
def guests(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = start(request, request.param)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, guests: Cluster) -> Iterator[GuestStage]:
    stage = GuestStage(guests, VARIANTS[request.param], trains=False)
    yield stage
    stage.end()


@pytest.mark.parametrize(("guests", "stage", "name"), CASES, indirect=["guests", "stage"])
def test_who_waits_for_growth_is_served(stage: GuestStage, name: str) -> None:
    """The base is never taken, what went is used again, and a plain job is requeued once at most."""
    try:
        found = stage.judge(ROWS[name])
    except BaseException:
        stage.end()
        raise
    assert not found.wrong, f"{found}\n{stage.companion_log()}"
    assert not found.base_taken and found.requeues <= 1, found
