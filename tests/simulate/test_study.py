"""Studies: contenders on the same work, in parallel or not, paired by seed; one that crashes costs itself alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from slurm_ones.policies import POLICIES
from slurm_ones.policy.contract import ClusterView, JobView, Schedule
from slurm_ones.show.pages import write
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.outcome import JobOutcome, Outcome, Segment
from slurm_ones.simulate.spec import ClusterSpec, Network, Part
from slurm_ones.simulate.study.plan import Contender, Source, StudyPlan
from slurm_ones.simulate.study.present import TableRow, as_json, page, pictures, rows
from slurm_ones.simulate.study.runs import StudyRun, run_all, summarize


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
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Contender]:
    """The faulty policy, registered."""
    monkeypatch.setitem(POLICIES, Crashing.name, Crashing)
    yield Contender("crashing", "crashing")


FIFO, STRICT = Contender("fifo", "fifo"), Contender("fifo:backfill=false", "fifo", {"backfill": False})
PLAN = StudyPlan(Source("ones-sc21", jobs=6), (FIFO, STRICT), (0, 1), ClusterSpec(4, 4), idealized=True)


@pytest.fixture(scope="module")
def runs() -> list[StudyRun]:
    return run_all(PLAN, 1)


def unclocked(run: StudyRun) -> StudyRun:
    """Without what depends on the machine."""
    assert run.outcome is not None
    return replace(run, outcome=replace(run.outcome, wall_s=0.0, decision_s=()))


@pytest.mark.slow
def test_processes_change_nothing(runs: list[StudyRun]) -> None:
    """Two processes find what one finds, in the same order, and report when each run is done."""
    shares: dict[tuple[str, int], float] = {}
    apart = run_all(PLAN, 2, lambda progress: shares.update({(progress.label, progress.seed): progress.share}))
    assert [unclocked(run) for run in runs] == [unclocked(run) for run in apart]
    assert shares == {(label, seed): 1.0 for label in ("fifo", "fifo:backfill=false") for seed in (0, 1)}


def test_contenders_get_the_same_work_and_the_first_seed_is_drawn(runs: list[StudyRun]) -> None:
    """Comparisons are paired by seed; a study of many seeds fits in memory."""
    found = {(run.label, run.seed): run.outcome for run in runs if run.outcome is not None}
    work = {key: [(job.name, job.submitted) for job in outcome.jobs] for key, outcome in found.items()}
    assert work["fifo", 0] == work["fifo:backfill=false", 0] != work["fifo", 1]
    assert {seed: bool(one.segments and one.goodput) for (_, seed), one in found.items()} == {0: True, 1: False}
    drawn = pictures(PLAN, runs)
    named = {re.sub(r"^job \d+ ", "", text) for text in re.findall("<title>(.*?): ", drawn["gpus"]["fifo"])}
    assert named == {job.name for job in found["fifo", 0].jobs}
    points = re.findall(r'points="([^"]*)"', drawn["jct"])
    assert [len(line.split()) for line in points] == [2 * 12 - 1, 2 * 12 - 1], "the distribution is of all seeds"


@pytest.mark.slow
def test_a_crash_costs_its_policy_alone(tmp_path: Path, crashing: Contender) -> None:
    """The others' figures stand, also on the page, and the error names its place."""
    plan = replace(PLAN, contenders=(FIFO, crashing), seeds=(0,))
    runs = run_all(plan, 1)
    good, bad = found = summarize(plan, runs)
    assert good.metrics["mean_jct_s"].mean > 0 and not good.errors
    assert not bad.metrics and bad.against_first is None
    assert "ZeroDivisionError: a fault of its own" in bad.errors[0] and "test_study.py" in bad.errors[0]
    assert {row.title: row.cells for row in rows(plan, found)}["mean JCT, s"][1] == ("–", "")
    write(tmp_path / "page.html", "study.html", pictures=pictures(plan, runs), **page(plan, found))
    html = (tmp_path / "page.html").read_text()
    assert "Policies compared: ones-sc21" in html and "a fault of its own" in html and "resnet" in html


@pytest.mark.slow
def test_seeds_that_one_lost_are_not_compared(runs: list[StudyRun]) -> None:
    """A policy that came through one seed of two is compared with the first on that seed alone."""
    lost = [StudyRun(run.label, 0, error="lost") if (run.label, run.seed) == (STRICT.label, 0) else run for run in runs]
    first, second = summarize(PLAN, lost)
    jct = first.each[1]["mean_jct_s"]
    assert set(second.each) == {1} and second.against_first is not None
    assert second.metrics["mean_jct_s"].mean - jct == pytest.approx(second.against_first.difference.mean)
    assert first.against_first is None and second.errors == ("seed 0: lost",)


def test_json(runs: list[StudyRun]) -> None:
    found = as_json(PLAN, summarize(PLAN, runs), runs)
    assert {
        "mean_jct_s", "median_jct_s", "p90_jct_s", "p99_jct_s", "makespan_s", "gpu_use", "resizes_per_job",
        "missed_accuracy", "decision_s", "intervals", "against_first",
    } <= set(found["policies"]["fifo"])  # fmt: skip
    assert len(found["jobs"]) == 2 * 2 * 6 and {"policy", "seed", "name", "jct_s", "missed"} <= set(found["jobs"][0])
    run = found["run"]
    assert (run["workload"], run["engine"], run["network"], run["slow_nodes"]) == ("ones-sc21", "idealized", None, [])
    parts = (Part(6, 4, "t4"), Part(2, 8, "a100"))
    plan = replace(PLAN, contenders=(), cluster=ClusterSpec(slow_nodes=(0.7,), network=Network(4, 2, 3.0), parts=parts))
    run = as_json(plan, [], [])["run"]
    assert run["cluster"] == "6x4:t4+2x8:a100"
    assert run["network"] == {"leaves": 4, "nodes": 2, "taper": 3.0} and run["slow_nodes"] == [0.7]


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (replace(PLAN, contenders=(FIFO, FIFO)), "'fifo' is given twice"),
        (replace(PLAN, contenders=(Contender("x", "none"),)), "fifo"),
        (replace(PLAN, contenders=(Contender("x", "fifo", {"speed": 1}),)), "backfill"),
        (replace(PLAN, source=Source("missing.csv")), "missing.csv"),
        (replace(PLAN, settings={"resize.dwel_s": 1}), "resize.dwel_s"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(plan: StudyPlan, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        plan.check()


@pytest.mark.slow
def test_page_escapes_and_holds_all_pictures(tmp_path: Path) -> None:
    """One file with three pictures that needs nothing else, and no job's or policy's name acts on it."""
    evil = "<script>alert(1)</script>"
    outcome = Outcome(
        evil, evil, 0, 4,
        (JobOutcome(evil, evil, 0.0, 0.0, 60.0, 60.0, 120.0, 0.0, 0, 60.0, 1.0, 1.0),),
        (Segment(evil, 0.0, 60.0, 2, 1, 64),), goodput=((0.0, 0.5), (60.0, 0.7)),
    )  # fmt: skip
    plan = replace(PLAN, contenders=(Contender(evil, "fifo"), Contender("crashed", "fifo")))
    drawn = pictures(plan, [StudyRun(evil, 0, outcome), StudyRun("crashed", 0, error="it crashed")])
    text = {
        "title": evil, "run": {"work": evil}, "columns": [evil], "rows": [TableRow("mean JCT", [("60", evil)], evil)],
        "meanings": [("mean JCT", "…")], "errors": [evil],
    }  # fmt: skip
    write(tmp_path / "page.html", "study.html", pictures=drawn, **text)
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert html.count("<figure") == 3 and html.count("<svg") == html.count("</svg>")
    assert 'src="http' not in html and "<link" not in html
