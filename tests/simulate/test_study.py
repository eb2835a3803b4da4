"""Studies: policies on the same work, in parallel or not, paired by seed; one that crashes costs itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from slurm_ones.policies import POLICIES
from slurm_ones.schedule.policy import ClusterView, JobView, Schedule
from slurm_ones.show.charts import Bar, Lane
from slurm_ones.show.page import StudyText, write_study
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.engines.outcome import Outcome
from slurm_ones.simulate.engines.spec import Part
from slurm_ones.simulate.study.plan import Plan, PolicySpec, Source
from slurm_ones.simulate.study.present import as_json, page, rows
from slurm_ones.simulate.study.runs import Run, run_all, summarize
from slurm_ones.simulate.training.network import Network


@dataclass(frozen=True)
class NoOptions:
    """Nothing to choose."""


class Crashing:
    """A policy with a fault."""

    name = "crashing"
    options_type = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def decide(self, cluster: ClusterView, jobs: Sequence[JobView], now: float, rng: np.random.Generator) -> Schedule:
        """Fail once there is some work."""
        raise ZeroDivisionError("a fault of its own")


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicySpec]:
    """The faulty policy, registered."""
    monkeypatch.setitem(POLICIES, Crashing.name, Crashing)
    yield PolicySpec("crashing", "crashing")


FIFO, STRICT = PolicySpec("fifo", "fifo"), PolicySpec("fifo:backfill=false", "fifo", {"backfill": False})
PLAN = Plan(Source("philly", jobs=12), (FIFO, STRICT), seeds=(0, 1), nodes=4, idealized=True)


def unclocked(run: Run) -> Run:
    """Without what depends on the machine."""
    assert run.outcome is not None
    return replace(run, outcome=replace(run.outcome, wall_s=0.0, decision_s=()))


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    """Two processes find what one finds, in the same order, and say when each run is done."""
    shares: dict[tuple[str, int], float] = {}
    apart = run_all(PLAN, 2, lambda progress: shares.update({(progress.policy, progress.seed): progress.share}))
    assert [unclocked(run) for run in run_all(PLAN, 1)] == [unclocked(run) for run in apart]
    assert shares == {(label, seed): 1.0 for label in ("fifo", "fifo:backfill=false") for seed in (0, 1)}


def test_all_contenders_get_the_same_work() -> None:
    """Comparisons are paired: a seed's jobs are submitted to every policy alike, and differ between seeds."""
    names = {
        (run.policy, run.seed): [(job.name, job.submitted) for job in run.outcome.jobs]
        for run in run_all(PLAN, 1)
        if run.outcome is not None
    }
    assert names["fifo", 0] == names["fifo:backfill=false", 0]
    assert names["fifo", 0] != names["fifo", 1]


def test_only_the_first_seed_keeps_what_is_drawn() -> None:
    """A study of many seeds fits in memory."""
    kept = {run.seed: bool(run.outcome and run.outcome.segments and run.outcome.goodput) for run in run_all(PLAN, 1)}
    assert kept == {0: True, 1: False}


def test_a_crash_costs_its_policy_alone(crashing: PolicySpec) -> None:
    """The others' figures stand, and the error says what went wrong and where."""
    plan = replace(PLAN, policies=(FIFO, crashing), seeds=(0,))
    good, bad = summarize(plan, run_all(plan, 1))
    assert good.metrics["mean_jct_s"].mean > 0 and not good.errors
    assert not bad.metrics and bad.against_first is None
    assert "ZeroDivisionError: a fault of its own" in bad.errors[0] and "test_study.py" in bad.errors[0]
    cells = dict(rows([good, bad]))
    assert cells["mean JCT, s"][1] == "–"


def test_seeds_that_one_lost_are_not_compared() -> None:
    """Where a policy came through one seed of two, it is held against the first on that seed alone."""
    runs = run_all(PLAN, 1)
    runs = [
        Run(run.policy, run.seed, error="lost") if (run.policy, run.seed) == (STRICT.label, 0) else run for run in runs
    ]
    first, second = summarize(PLAN, runs)
    by_seed = {run.seed: run.outcome for run in runs if run.policy == "fifo" and run.outcome}
    jct = np.mean([job.jct_s for job in by_seed[1].jobs])
    assert second.seeds == (1,)
    assert second.against_first is not None
    assert second.metrics["mean_jct_s"].mean - jct == pytest.approx(second.against_first.difference.mean)
    assert first.against_first is None and second.errors == ("seed 0: lost",)


def test_json_has_what_was_promised() -> None:
    """Every metric under its name, every job, what was run; nothing that JSON does not know."""
    runs = run_all(PLAN, 1)
    found = as_json(PLAN, summarize(PLAN, runs), runs)
    assert {
        "mean_jct_s", "median_jct_s", "p90_jct_s", "p99_jct_s", "makespan_s", "gpu_use", "resizes_per_job",
        "missed_accuracy", "decision_s", "intervals", "against_first",
    } <= set(found["policies"]["fifo"])  # fmt: skip
    assert len(found["jobs"]) == 2 * 2 * 12
    assert {"policy", "seed", "name", "jct_s", "missed"} <= set(found["jobs"][0])
    assert found["run"]["workload"] == "philly" and found["run"]["engine"] == "idealized"
    assert found["run"]["network"] is None and found["run"]["slow_nodes"] == []


def test_json_names_the_whole_cluster() -> None:
    """Parts of several kinds, leaf switches and slow nodes change every figure, so they stand beside them."""
    parts = (Part(6, 4, "t4"), Part(2, 8, "a100"))
    plan = replace(PLAN, parts=parts, network=Network(4, 2, 3.0), slow_nodes=(0.7,))
    run = as_json(plan, [], [])["run"]
    assert run["cluster"] == "6x4:t4+2x8:a100"
    assert run["network"] == {"leaves": 4, "nodes": 2, "taper": 3.0} and run["slow_nodes"] == [0.7]


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (replace(PLAN, policies=(FIFO, FIFO)), "'fifo' is given twice"),
        (replace(PLAN, policies=(PolicySpec("x", "none"),)), "fifo"),
        (replace(PLAN, policies=(PolicySpec("x", "fifo", {"speed": 1}),)), "backfill"),
        (replace(PLAN, source=Source("missing.csv")), "missing.csv"),
        (replace(PLAN, settings={"resize.dwel_s": 1}), "resize.dwel_s"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(plan: Plan, named: str) -> None:
    """Nobody waits an hour to hear of a spelling mistake."""
    with pytest.raises(BadInput, match=named):
        plan.check()


def test_page_escapes_and_holds_all_pictures(tmp_path: Path) -> None:
    """One file with three pictures that needs nothing else, and no job's or policy's name acts on it."""
    evil = "<script>alert(1)</script>"
    lane = Lane(evil, [60.0, 3600.0], [Bar(evil, 0, 100, 2)], [(0.0, 0.5), (60.0, 0.7)], 4)
    empty = Lane("crashed", [], [], [], 4)
    text = StudyText(evil, [("work", evil)], [("mean JCT, s", ["60", "–"])], [("mean JCT", "…")], [evil])
    write_study(tmp_path / "page.html", text, [lane, empty], {evil: evil})
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert html.count("<svg") == html.count("</svg>") == 3
    assert 'src="http' not in html and "<link" not in html


def test_page_of_a_study(tmp_path: Path, crashing: PolicySpec) -> None:
    """What a study found becomes a page, a crashed policy's empty lane included."""
    plan = replace(PLAN, policies=(FIFO, crashing), seeds=(0,))
    runs = run_all(plan, 1)
    write_study(tmp_path / "page.html", *page(plan, summarize(plan, runs), runs))
    html = (tmp_path / "page.html").read_text()
    assert "Policies compared: philly" in html and "a fault of its own" in html
    assert "resnet18-cifar10" in html


def test_outcomes_reach_the_page_by_seed() -> None:
    """The pictures are of the first seed, the distribution of all."""
    runs = run_all(PLAN, 1)
    _, lanes, groups = page(PLAN, summarize(PLAN, runs), runs)
    first = next(run.outcome for run in runs if (run.policy, run.seed) == ("fifo", 0))
    assert isinstance(first, Outcome)
    assert {bar.job for bar in lanes[0].bars} == {job.name for job in first.jobs} == set(groups)
    assert len(lanes[0].jct_s) == 24
