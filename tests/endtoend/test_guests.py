"""Who waits for growth on real Slurms: guests are preempted for anybody, and used again; without guests the companion
gives growth back. The jobs train nothing; `benchmarks/guests.py` is the same with real training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import start
from tests.endtoend.guest_rows import ROWS, VARIANTS, rows_of
from tests.endtoend.guest_site import GuestStage

pytestmark = pytest.mark.cluster
BY_DAY = {"old": ("b2",), "old-blocks": ("a1",)}
"""The others run every night."""
CASES = [
    pytest.param(variant, name, marks=() if name in BY_DAY.get(variant, ()) else pytest.mark.nightly)
    for variant, where in VARIANTS.items()
    for name in rows_of(where)
]


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[GuestStage]:
    variant = VARIANTS[request.param]
    cluster = start(request, variant.site)
    stage = GuestStage(cluster, variant, trains=False)
    yield stage
    stage.end()
    cluster.stop()


@pytest.mark.parametrize(("stage", "name"), CASES, indirect=["stage"])
def test_who_waits_for_growth_is_served(stage: GuestStage, name: str) -> None:
    """The base is never taken, what went is used again, and a plain job is requeued once at most."""
    try:
        found = stage.judge(ROWS[name])
    except BaseException:
        stage.end()
        raise
    assert not found.wrong, f"{found}\n{stage.companion_log()}"
    assert not found.base_taken and found.requeues <= 1, found
