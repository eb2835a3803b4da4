"""What elasticity would bring: which curves a job gets, what is simulated of a trace, and the page."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slurm_ones.cli import app
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.outcome import Outcome
from slurm_ones.simulate.slurm.timeline import EPOCH, ClusterSettings
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.study.present import ElasticityStudy, as_csv, rows
from slurm_ones.simulate.study.runs import StudyRun, parts_of, run_all, summarize
from slurm_ones.simulate.study.stretch import (
    INTERVAL_S,
    KINDS,
    LEAST_S,
    Stretch,
    _there,
    catalogue,
    fitted,
    interval_of,
    measured,
    node_gpus,
    picked,
    plan_of,
    recorded,
    rigid,
    stretch_of,
)
from slurm_ones.simulate.training.application import Requeue
from slurm_ones.simulate.workloads.trace import Trace, TraceJob
from slurm_ones.simulate.world import World

CURVES = catalogue()


def trace_of(*jobs: tuple[float, float, float, int]) -> Trace:
    """A trace of jobs by submission, start, run time and GPUs, on nodes of four."""
    made = [
        TraceJob(f"j{i}", at, start, run, gpus, -(-gpus // 4), 0.0) for i, (at, start, run, gpus) in enumerate(jobs)
    ]
    return Trace("t", "test", tuple(made), (), gpus_per_node=4)


def job(run_s: float, gpus: int, name: str = "1") -> TraceJob:
    """A job of that length and size."""
    return TraceJob(name, 0.0, None, run_s, gpus, 0, 0.0)


@given(st.sampled_from(sorted(KINDS)), st.floats(LEAST_S, 1e6), st.sampled_from([1, 2, 4, 8]))
def test_a_job_takes_as_long_as_recorded(kind: str, run_s: float, gpus: int) -> None:
    """At the GPUs that it asked for and its batch, whatever curves it gets."""
    made, batch = fitted(CURVES.applications[kind], "x", job(run_s, gpus), 4)
    assert made.seconds(-(-gpus // 4), gpus, float(batch), 0.0) == pytest.approx(run_s, rel=1e-6)
    assert made.base_batch <= batch <= made.max_batch and 1 <= made.max_gpus <= made.max_batch


@given(st.floats(1, 1e6), st.integers(1, 200), st.text(max_size=10))
def test_the_rule(run_s: float, gpus: int, name: str) -> None:
    """The same job gets the same curves, of its size where there are some; short and very wide ones stay rigid."""
    one = job(run_s, gpus, name)
    pick = CURVES.pick(one, 1, 4)
    assert pick == CURVES.pick(one, 1, 4)
    if run_s < LEAST_S or gpus > max(kind.max_gpus for kind in KINDS.values()):
        assert pick is None
    if pick is not None:
        assert CURVES.applications[pick].max_gpus >= gpus
    if run_s >= LEAST_S and gpus == 1:
        hours = run_s / 3600
        size = "small" if hours <= 1.5 else "medium" if hours <= 12 else "large" if hours <= 60 else "extra-large"
        assert pick is not None and KINDS[pick].size == size


def test_another_seed_assigns_otherwise() -> None:
    """By the seed alone; a larger share has the same jobs and more, with the same curves."""
    stretch = stretch_of(trace_of(*((i, i, 600.0, 1) for i in range(40))), 100, (2, 4))
    all_, other = picked(stretch, CURVES, 1.0, 1), picked(stretch, CURVES, 1.0, 2)
    assert all_ == picked(stretch, CURVES, 1.0, 1) and 10 < sum(a != b for a, b in zip(all_, other, strict=True)) < 40
    few = picked(stretch, CURVES, 0.2, 1)
    assert sum(one is not None for one in few) == 8
    more = picked(stretch, CURVES, 0.5, 1)
    assert all(one is None or one == other for one, other in zip(few, more, strict=True))
    assert all(one is None or one == other for one, other in zip(more, all_, strict=True))


def test_measured_profiles_are_taken_as_they_are() -> None:
    """In place of the catalogue, each as large as it is on one GPU."""
    found = measured({name: CURVES.applications[name] for name in ("recommender", "resnet50-imagenet")})
    assert found.measured and dict(found.sizes) == {"recommender": "small", "resnet50-imagenet": "extra-large"}
    assert found.pick(job(600, 1), 0, 4) == "recommender"


def test_the_stretch_of_median_load() -> None:
    """It begins with who was there: what ran has the rest to run, what waited all of it."""
    busy = [(float(i), float(i), 1000.0, 1) for i in range(4)]
    light = [(5000.0 + 1000 * i, 5000.0 + 1000 * i, 10.0, 1) for i in range(4)]
    usual = [(10000.0 + 100 * i, 10000.0 + 100 * i, 200.0, 2) for i in range(4)]
    there = [(9000.0, 9500.0, 1000.0, 3), (9400.0, 10050.0, 100.0, 1)]
    found = stretch_of(trace_of(*busy, *light[:2], *there, *usual), 4)
    assert [one.submitted for one in found.jobs] == [10000.0, 10100.0, 10200.0, 10300.0]
    assert [(one.run_s, one.gpus, one.submitted) for one in found.before] == [(500.0, 3, 10000.0), (100.0, 1, 10000.0)]
    assert (found.nodes, found.gpus_per_node) == (2, 4), "eight GPUs were held at once at most"
    endless = stretch_of(trace_of((0.0, 0.0, 1e7, 1), *busy[1:], *light, *usual), 4)
    assert [one.run_s for one in endless.before] == [1000.0], "twice what the others take: 300 s and then 200 s"
    named = stretch_of(trace_of(*busy, (9000.0, 9000.0, 10.0, 9)), 4, (1, 4))
    assert named.given and named.left_out == 1 and named.most_held == 9


def test_a_sample_is_a_part_of_the_trace() -> None:
    trace = trace_of(*((i, i, 600.0, 1) for i in range(200)))
    few, more = (set(stretch_of(trace, 1000, (9, 4), share).jobs) for share in (0.2, 0.5))
    assert few < more and 20 < len(few) < 60 and 70 < len(more) < 130
    with pytest.raises(BadInput, match="leaves none"):
        stretch_of(trace, 1000, None, 1e-9)


def test_the_node_of_a_trace() -> None:
    """As its header says, or as its jobs were spread, or as nodes usually are."""
    assert node_gpus(Trace("t", "", (job(1, 12)._replace(nodes=2),), ())) == 6
    assert node_gpus(Trace("t", "", (job(1, 12),), ())) == 8


def test_decisions_are_further_apart_in_a_long_stretch() -> None:
    short = stretch_of(trace_of((0, 0, 600, 1)), 10, (1, 4))
    month = stretch_of(trace_of((0, 0, 600, 1), (2.6e6, 2.6e6, 600, 1)), 10, (1, 4))
    assert (interval_of(short), interval_of(month)) == INTERVAL_S


RIGID = [(0, 0, 900, 4), (10, 10, 500, 2), (20, 20, 800, 8), (30, 30, 300, 1), (40, 40, 400, 4), (900, 900, 61, 1)]


def alone(stretch: Stretch) -> dict[str, tuple[float, float]]:
    """Start and seconds of each job if Slurm runs without any companion."""
    work = plan_of("t", stretch, CURVES, (0,)).workload(0)
    world = World(work, ClusterSpec(2, 4), Path(), ClusterSettings(), mechanism=Requeue(None))
    while not world.done:
        world.pass_time(1e4)
    records = {one.name: world.cluster.records.of(world.job_ids[one.name])[0] for one in work.submissions}
    return {
        name: (one.allocations[0].start - EPOCH, one.allocations[0].end - one.allocations[0].start)
        for name, one in records.items()
    }


def studied(trace: Trace, outcomes: dict[str, Outcome] | None = None) -> ElasticityStudy:
    """None and all of a trace's jobs elastic; run, unless their outcomes are given."""
    stretch = stretch_of(trace, 10, (2, 4))
    plan = plan_of("t", stretch, CURVES, (1,), shares=(0.0, 1.0))
    runs = run_all(plan, 1) if outcomes is None else [StudyRun(name, 1, one) for name, one in outcomes.items()]
    return ElasticityStudy(trace, stretch, CURVES, plan, summarize(plan, runs), runs)


@pytest.fixture(scope="module")
def small() -> ElasticityStudy:
    """Six jobs, none and all of them elastic."""
    return studied(trace_of(*RIGID))


@pytest.mark.slow
def test_rigid_jobs_stay_as_they_were(small: ElasticityStudy) -> None:
    """Without elastic jobs the schedule is Slurm's alone, backfill included, and each job holds its GPUs for as long as
    it did, until its last process is gone a second later."""
    schedule, outcome = alone(small.stretch), small.runs[0].outcome
    assert outcome is not None and not any(one.elastic for one in outcome.jobs)
    for one, (_, _, run_s, gpus) in zip(outcome.jobs, RIGID, strict=True):
        assert one.started is not None
        assert (one.started, one.running_s) == pytest.approx(schedule[one.name], abs=1e-6)
        assert one.running_s == pytest.approx(run_s + ClusterSettings().ending_s)
        assert one.gpu_s == pytest.approx(gpus * one.running_s)
    starts = {one.name: one.started or 0.0 for one in outcome.jobs}
    assert starts["4"] < starts["3"] <= 905 and starts["5"] > starts["3"], "the fourth overtakes, and delays nobody"


def test_all_elastic(small: ElasticityStudy) -> None:
    """All but the short one; none is lost, and table and verdict say so."""
    none, found = (summary.each[1] for summary in small.summaries)
    assert found["elastic_jobs"] == pytest.approx(5 / 6) and found["unfinished"] == 0
    assert found["gpu_hours"] > 0 and found["rigid_jct"] > 0 and found["elastic_jct"] > 0
    shown = {row.title: row for row in rows(small.plan, small.summaries, recorded(small.stretch))}
    assert shown["elastic jobs"].cells == [("0 %", ""), ("83 %", "")] and shown["mean JCT"].recorded != "–"
    assert "unfinished" not in shown
    (said,) = small.verdict()
    less, more = (100 * (found[key] / none[key] - 1) for key in ("mean_jct_s", "gpu_hours"))
    assert f"mean JCT changes by {less:+.0f} %" in said and f"jobs hold by {more:+.0f} %; one seed only" in said


@pytest.mark.parametrize(
    ("wait_s", "starts", "said"),
    [(450.0, True, "close to your"), (5.0, True, "far from your"), (500.0, False, "records no starts")],
)
def test_how_far_the_simulation_is(small: ElasticityStudy, wait_s: float, starts: bool, said: str) -> None:
    jobs = [(at, at + 500, run, gpus) for at, _, run, gpus in RIGID]
    trace = trace_of(*jobs)
    if not starts:
        trace = replace(trace, jobs=tuple(one._replace(started=None) for one in trace.jobs))
    stretch = stretch_of(trace, 10, (2, 4))
    assert recorded(stretch).get("mean_wait_s") == (500 if starts else None)
    summary = replace(small.summaries[0], each={1: {"mean_wait_s": wait_s}})
    assert said in replace(small, stretch=stretch, summaries=[summary]).fidelity()


def test_figures_of_nothing(small: ElasticityStudy) -> None:
    """A run in which no job ended has none, breaks nothing, and is named with the verdict."""
    empty = Outcome("ones", "t", 0, 8, ())
    broken = studied(small.trace, {"0 %": empty, "100 %": empty})
    found = broken.summaries[0].each[1]
    assert found["unfinished"] == 6 and math.isnan(found["mean_jct_s"])
    assert rows(broken.plan, broken.summaries)[-1].title == "unfinished" and broken.verdict() == []
    assert broken.fidelity().startswith("No job had ended")
    some = replace(small.summaries[0], each={1: small.summaries[0].each[1] | {"unfinished": 2.0}})
    (said,) = replace(small, summaries=[some, small.summaries[1]]).verdict()
    assert "up to 2 jobs had not ended" in said and "not ended" not in small.verdict()[0]


def test_figures_as_csv(small: ElasticityStudy) -> None:
    """A spreadsheet gets what the table has: a line for each policy and figure."""
    lines = [*csv.DictReader(as_csv(small.summaries).splitlines())]
    summary = small.summaries[0]
    found = {one["figure"]: float(one["mean"]) for one in lines if one["policy"] == summary.label}
    assert found == {key: pytest.approx(one.mean, nan_ok=True) for key, one in summary.metrics.items()}
    assert len(lines) == sum(len(one.metrics) for one in small.summaries) > 0


def test_who_is_there_when_the_stretch_begins() -> None:
    """Those that ran come before those that waited, with what was left of their time limits."""
    runs, waits, ended = (
        TraceJob("runs", 100.0, 200.0, 1000.0, 1, 1, 3600.0), TraceJob("waits", 50.0, 900.0, 100.0, 8, 1, 600.0),
        TraceJob("ended", 0.0, 0.0, 300.0, 1, 1, 0.0),
    )  # fmt: skip
    found = _there([ended, waits, runs], 800.0, 1e9)
    assert found == [
        runs._replace(submitted=800.0, run_s=400.0, limit_s=3000.0), waits._replace(submitted=800.0),
    ]  # fmt: skip
    (cut,) = _there([runs._replace(limit_s=0.0)], 800.0, 60.0)
    assert cut.run_s == 60.0 and cut.limit_s == 0.0


def test_a_rigid_job_is_whole_seconds() -> None:
    made = rigid("r", 3, 61.4)
    assert made.total == 3 * 61 and float(made.placed_speed((2, 1), 3.0)) == 3.0
    assert float(np.asarray(made.efficiency(0.0, [3]))[0]) == 1.0


def call(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["study", *arguments])
    return found.exit_code, found.stdout, found.stderr


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """One file to one page, progress on the way; a hostile name is text."""
    path, page, figures = tmp_path / "log.csv", tmp_path / "p.html", tmp_path / "f.json"
    head = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
    times = "2020-06-09 18:41:01,2020-06-09 18:42:01,2020-06-09 18:51:01"
    path.write_text(f"{head}\n<script>x()</script>,u,v,2,1,1,COMPLETED,{times},0,0\n2,u,v,1,1,1,FAILED,{times},0,0\n")
    code, out, err = call(str(path), "--seeds", "1", "--processes", "1", "--html", str(page), "--figures", str(figures))
    assert code == 0, err
    assert "mean JCT" in out and "With 100 % of the jobs elastic" in out and "waited for 1 m 00 s" in out
    assert "4 of 4 runs done" in err and "2 jobs with GPUs" in err
    text = page.read_text()
    assert "<script>x()" not in text and "&lt;script&gt;" in text
    assert "Another assignment" in text and "Simulated." in text and text.count("<figure") == 1 + 4
    found = json.loads(figures.read_text())
    del found["run"]["wall_s"]
    assert list(found["policies"]) == ["0 %", "20 %", "50 %", "100 %"] and len(found["curves"]) == 2
    assert found["run"]["cluster"] == "2x2"
    # As if it had been killed: of its runs one is missing and one is damaged; a failed attempt is none.
    same = (str(path), "--seeds", "1", "--processes", "1", "--html", str(page), "--figures", str(figures))
    first, second, *others = sorted((tmp_path / "p.runs" / "results").iterdir())
    times = {other: other.stat().st_mtime_ns for other in others}
    first.unlink()
    second.write_text("damaged")
    code, _, err = call(*same)
    assert code == 0 and "2 of 4 runs were done before" in err and "2 of 2 runs done" in err
    now = json.loads(figures.read_text())
    del now["run"]["wall_s"]
    assert now == found and first.exists()
    assert {other: other.stat().st_mtime_ns for other in others} == times


@pytest.mark.slow
def test_what_a_kept_run_stands_for(small: ElasticityStudy, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")

    def key(stretch: Stretch, share: float = 0.5, profiles: Path | None = None) -> str:
        (part,) = parts_of(plan_of("t", stretch, CURVES, [0], [share], profiles))
        return part.key

    stretch = small.stretch
    found = [key(stretch), key(stretch, 1.0), key(replace(stretch, nodes=9)), key(stretch, 0.5, tmp_path)]
    found.append(key(replace(stretch, jobs=(stretch.jobs[0]._replace(run_s=1.0), *stretch.jobs[1:]))))
    (tmp_path / "x.json").write_text("[]")
    found.append(key(stretch, 0.5, tmp_path))
    assert len(set(found)) == 6 and key(stretch) == found[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.swf"], "no such file"),
        (["{file}", "--cluster", "8x4:a100"], "has no kinds of GPU"),
        (["{file}", "--cluster", "1x1"], "too small for every job"),
        (["{file}", "--sample", "2"], "--sample: 2 is not above 0"),
        (["{file}", "--html", "/nowhere/x.html"], "cannot be written"),
        (["{file}", "--profiles", "/nowhere"], "no such directory"),
        (["--since", "soon"], "--since"),
        (["{file}", "--since", "7d"], "is read as a whole"),
        (["{file}", "--until", "2020-01-31"], "is read as a whole"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path: Path, arguments: list[str], said: str) -> None:
    path = tmp_path / "x.swf"
    path.write_text("1 0 5 100 4 -1 -1 4 200 -1 1 1 1 -1 1 1 -1 -1\n")
    given = ["--html", str(tmp_path / "p.html")] + [one.format(file=path) for one in arguments]
    code, _, err = call(*given)
    assert code == 2 and said in err.replace("\n", " ")
