"""The smallest version of the idea says what is true of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slurm_ones.examples import minimal
from slurm_ones.examples.minimal import (
    GPUS,
    Cluster,
    companion,
    decide,
    first_come_first_served,
    learn,
    simulate,
    workload,
)

SOURCE = Path(minimal.__file__)


def test_it_can_be_read_in_ten_minutes() -> None:
    """Under 200 lines, and nothing imported but the standard library and numpy."""
    text = SOURCE.read_text()
    assert len(text.splitlines()) < 200
    roots = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([one.name for one in node.names] if isinstance(node, ast.Import) else
                     [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }  # fmt: skip
    assert roots - set(sys.stdlib_module_names) == {"numpy"}


class Watched(Cluster):
    """Looks at every step."""

    def advance(self) -> None:
        held = [job.gpus for job in self.jobs]
        assert min(held) >= 0
        assert sum(held) <= GPUS
        ended = {id(job) for job in self.jobs if job.ended is not None}
        super().advance()
        assert ended <= {id(job) for job in self.jobs if job.ended is not None and not job.gpus}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_elastic_jobs_end_sooner_and_none_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints: the same jobs, all of them to their last sample, faster on average."""
    monkeypatch.setattr(minimal, "Cluster", Watched)
    rigid, elastic = workload(16, seed), workload(16, seed)
    jct_s = simulate(rigid, first_come_first_served, seed), simulate(elastic, companion, seed)
    assert [job.samples for job in rigid] == [job.samples for job in elastic]
    for job in [*rigid, *elastic]:
        assert job.ended is not None and job.ended > job.submitted
        assert job.progress >= job.samples
    assert sum(job.resizes for job in rigid) == 0 < sum(job.resizes for job in elastic)
    assert jct_s[1] < 0.9 * jct_s[0]


def test_it_learns_what_is_hidden() -> None:
    """From reports at two sizes: seconds per sample and per exchange, and the noise scale."""
    (job,) = workload(1, 3)
    cluster = Cluster([job], 3)
    for gpus in (1, 4):
        cluster.place(job, gpus, job.base)
        for _ in range(40):
            cluster.advance()
    assert np.allclose(learn(job), job.hidden, rtol=0.1)


def test_the_search_finds_the_best_schedule() -> None:
    """Two jobs, one of which gains nothing by a second GPU: the other one gets all the rest."""
    rates = np.array([np.minimum(np.arange(GPUS + 1), 1) * 1.0, np.arange(GPUS + 1) * 0.5])
    assert list(decide(rates, np.array([0, 0]), np.random.default_rng(0))) == [1, GPUS - 1]


@pytest.mark.slow
def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurm_ones.examples.minimal", "--seed", "4"], capture_output=True, text=True, check=True
    )
    rigid, elastic = (float(line.split()[3]) for line in done.stdout.splitlines())
    assert elastic < rigid
