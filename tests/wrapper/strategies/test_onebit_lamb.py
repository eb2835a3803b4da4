"""1-bit LAMB in a job: its two phases as the companion sees them, and a batch that changes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ones_wrapper.protocol import SPEC, Hello, Order, Throughput, decode_spec
from ones_wrapper.protocol.limits import StrategyLimits
from tests.cluster.paths import REPOSITORY
from tests.waiting import until
from tests.wrapper.runs import TIMEOUT_S, Run, write_order
from tests.wrapper.strategies.onebit_script import BATCH, WARMUP
from tests.wrapper.strategies.rows import HERE
from tests.wrapper.strategies.script import HOLD, HURRY, PACE_MS

pytestmark = pytest.mark.nightly

N = 64 * 64 + 64 + 64 * 10 + 10


def limits_of(job: Path, fixed: bool) -> StrategyLimits:
    """The limits, once they say that the batch is fixed, or free."""

    def found() -> StrategyLimits | None:
        limits = decode_spec((job / SPEC).read_bytes()).limits if (job / SPEC).exists() else None
        return limits if limits is not None and limits.batch_fixed == fixed and limits.sizes else None

    return until(found, f"limits with batch_fixed={fixed}", TIMEOUT_S)


def test_a_batch_that_changes_begins_the_warm_up_anew(tmp_path: Path) -> None:
    """Protects the frozen variance: while it is frozen an order of another batch is refused with a line in the log; at
    the next start it holds, and the warm-up begins anew, which hello and limits say."""
    hurry, hold = tmp_path / "hurry", tmp_path / "hold"
    env = {"PYTHONPATH": str(REPOSITORY), PACE_MS: "40", HURRY: str(hurry), HOLD: str(hold)}
    hold.touch()
    run = Run(tmp_path, ranks=2, script=HERE / "onebit_script.py", **env)
    free = limits_of(tmp_path, False).at(2)
    hold.unlink()
    fixed = limits_of(tmp_path, True).at(2)
    assert free is not None and fixed is not None
    assert free.data_bytes == 4 * N
    assert abs(fixed.data_bytes - N / 8) < 0.02 * N / 8
    write_order(tmp_path, Order(1, 0, batch=2 * BATCH))
    begun = run.wait_for(Throughput).step
    run.wait_for(Throughput, lambda report: report.step > begun + 40)
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.errors
    assert f"the batch stays {BATCH}" in run.errors
    assert {report.batch for report in run.of(Throughput)} == {BATCH}
    hold.touch()
    again = Run(tmp_path, ranks=2, restart=1, script=HERE / "onebit_script.py", **env)
    limits_of(tmp_path, False)
    hold.unlink()
    hello = again.wait_for(Hello)
    assert hello.batch == 2 * BATCH
    assert f"was {BATCH} and is {2 * BATCH}, so the warm-up of {WARMUP} steps begins again" in hello.note
    limits_of(tmp_path, True)
    hurry.touch()
    assert again.end() == 0, again.errors
    assert again.errors.count("one bit for each of") == 1
    assert again.of(Throughput)[-1].batch == 2 * BATCH
