"""The contract of every strategy: through resizes and a killed rank its result is the reference's; its limits are true.

Each row trains under `ones-run`: at the first size, stopped by a signal; at the second, where a rank is killed after a
checkpoint and `ones-run` starts the ranks again; at the third to the end.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ones_wrapper.protocol import Bye, Checkpoint, Hello, Throughput, decode_spec, encode
from ones_wrapper.protocol.fields import MAX_ROWS
from ones_wrapper.protocol.limits import MOST_GPUS
from tests.cluster.paths import REPOSITORY
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.launch.test_restart_policy import ranks_of
from tests.wrapper.runs import Run, assert_exactly_once
from tests.wrapper.strategies.rows import Row, rows
from tests.wrapper.strategies.script import HURRY, LATER_MS, OUT, PACE_MS

pytestmark = pytest.mark.slow

ROWS = rows()
BY_NIGHT = ("optimus2d", "decentlam", "onebit_lamb", "lsgd", "ring", "coreset", "uneven", "fused", "paired")
"""By day `tests/wrapper/membership`, and `tests/wrapper/layouts` the rings, have most change their size as blocks, and
`tests/wrapper/test_strategy.py` resizes the pairs."""
every = pytest.mark.parametrize(
    "row", [(nightly if row.name in BY_NIGHT else pytest.param)(row, id=row.name) for row in ROWS]
)
STRATEGIES = [row for row in ROWS if row.make is not None]


def start(row: Row, job: Path, restart: int) -> Run:
    env = {
        **row.env,
        "PYTHONPATH": str(REPOSITORY),
        OUT: str(job.parent / "out.json"),
        PACE_MS: "60",
        LATER_MS: "480",
        HURRY: str(job / "hurry"),
    }
    return Run(job, *row.arguments, ranks=row.sizes[restart], restart=restart, script=row.script, **env)


def stop(run: Run, trained: int = 0) -> int:
    """Stop it by a signal once it has trained; the step that it came to."""
    run.wait_for(Throughput, lambda report: report.step > trained)
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.errors
    return run.of(Bye)[-1].step


@every
def test_resizes_and_a_killed_rank_change_nothing(row: Row, tmp_path: Path, teams: dict[int, Team]) -> None:
    """The reference's result, each sample of each epoch once, and limits that the companion can read."""
    job = tmp_path / "job"
    job.mkdir()
    reached = stop(start(row, job, 0))
    second = start(row, job, 1)
    second.wait_for(Hello, lambda hello: (hello.world, hello.step) == (row.sizes[1], reached))
    second.wait_for(Throughput)
    second.signal(signal.SIGUSR1)
    passing = second.wait_for(Checkpoint, lambda report: report.step > reached)
    os.kill(ranks_of(second)[-1], signal.SIGKILL)
    second.wait_for(Hello, lambda hello: (hello.attempt, hello.step) == (1, passing.step))
    reached = stop(second, passing.step)
    (job / "hurry").touch()
    last = start(row, job, 2)
    assert last.end() == 0, last.errors
    hello = last.of(Hello)[0]
    assert (hello.world, hello.step) == (row.sizes[2], reached), "training was over before the last resize"
    if row.once is not None:
        row.once(job)
    else:
        assert_exactly_once(job, row.epochs, row.samples)
    found = json.loads((tmp_path / "out.json").read_text())
    (wanted,) = teams[1].run(row.expected)
    row.check(found, wanted)
    limits = decode_spec((job / "spec.json").read_bytes()).limits
    if row.make is None:
        assert limits is None
        return
    assert limits is not None and limits.strategy == row.name
    assert all(limits.at(size) is not None for size in row.sizes)


@pytest.mark.parametrize("row", STRATEGIES, ids=[row.name for row in STRATEGIES])
def test_what_it_says_of_every_number_of_gpus(row: Row) -> None:
    """Its limits and the strategy agree; a number that it cannot use gets a sentence with what would fit."""
    assert row.make is not None
    strategy = row.make()
    limits = strategy.limits(row.spec, MOST_GPUS, 4)
    assert limits.strategy == row.name
    assert decode_spec(encode(replace(row.spec, limits=limits))).limits == limits
    valid = [gpus for gpus in range(1, 33) if limits.at(gpus) is not None]
    assert valid
    for gpus in range(1, 33):
        size = limits.at(gpus)
        if size is not None:
            assert strategy.replicas(gpus) == size.replicas
        else:
            with pytest.raises(ValueError, match=rf"^{row.name}: .*\b{gpus}\b.* would fit"):
                strategy.replicas(gpus)


ANY_NUMBER = [row for row in STRATEGIES if row.name in ("decentlam", "fused", "lsgd", "onebit_lamb")]


@pytest.mark.parametrize("row", ANY_NUMBER, ids=[row.name for row in ANY_NUMBER])
def test_more_gpus_than_rows_where_any_number_fits(row: Row) -> None:
    assert row.make is not None
    assert len(row.make().limits(row.spec, MAX_ROWS, 8).sizes) == MAX_ROWS
    found = row.make().limits(row.spec, MAX_ROWS + 44, 8)
    assert not found.sizes and not found.refusal(MAX_ROWS + 44)


MEASURED = [(row, world) for row in STRATEGIES if row.measure for world in row.measured_at]


@pytest.mark.parametrize(
    ("row", "world"),
    [
        (nightly if row.name in BY_NIGHT and world > 2 else pytest.param)(row, world, id=f"{row.name}-{world}")
        for row, world in MEASURED
    ],
)
def test_limits_are_true(row: Row, world: int, teams: dict[int, Team]) -> None:
    """Memory and bytes as a rank measures them, against what the limits say."""
    assert row.make is not None
    size = row.make().limits(row.spec, MOST_GPUS, world).at(world)
    for measured in teams[world].run(row.measure):  # type: ignore[arg-type]
        assert measured
        for name, value in measured.items():
            said = getattr(size, name)
            assert abs(value - said) <= row.within.get(name, 0.02) * said, f"{name}: {value} measured, {said} said"
