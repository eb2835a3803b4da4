"""`slurm-ones simulate` from its command line to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_ones.cli import app
from slurm_ones.cli.simulate import (
    ProgressLines,
    parse_cluster,
    parse_pairs,
    parse_policy,
    parse_resize_cost,
    parse_sbatch,
)
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.study.runs import RunProgress
from tests.simulate.profiles import EPOCHS, ITERATIONS, write_profile, write_workload


def call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `slurm-ones simulate …`."""
    found = CliRunner().invoke(app, ["simulate", *arguments])
    return found.exit_code, found.stdout, found.stderr


@pytest.mark.slow
def test_an_idealized_study_end_to_end(tmp_path: Path) -> None:
    code, out, err = call(
        "--idealized", "--jobs", "8", "--cluster", "4x4", "--policy", "fifo", "--policy", "fifo:backfill=false",
        "--seeds", "2", "--first-seed", "5", "--load", "2", "--processes", "1",
        "--figures", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html"),
    )  # fmt: skip
    assert code == 0
    assert "philly: 8 jobs, 4 nodes × 4 GPUs, seeds 5–6" in out and "Wilcoxon" in out
    found = json.loads((tmp_path / "s.json").read_text())
    assert set(found["policies"]) == {"fifo", "fifo:backfill=false"}
    assert found["policies"]["fifo"]["mean_jct_s"] > 0
    assert {job["seed"] for job in found["jobs"]} == {5, 6}
    assert found["run"]["load"] == 2.0 and found["run"]["cluster"] == "4x4"
    assert (tmp_path / "s.html").read_text().count("<figure") == 4, "two of GPUs, one of JCTs, one of goodput"
    lines = err.splitlines()
    # On a slow machine lines in between say how far a run is.
    assert len([line for line in lines if line.endswith(", done")]) == 4, "a line on stderr for each finished run"
    assert lines[-1].startswith("4 of 4 runs done after ") and "fifo:backfill=false, seed 6: 8 of 8 jobs" in lines[-1]
    assert "runs done" not in out


@pytest.mark.slow
def test_a_study_leaves_a_job_database(tmp_path: Path) -> None:
    """Each run is a cluster of its own, of which every view works; a database that is there stays as it is."""
    place = tmp_path / "study.sqlite"
    arguments = ("--workload", "ones-sc21", "--jobs", "2", "--cluster", "1x4", "--policy", "ones", "--policy", "fifo")
    arguments = (*arguments, "--processes", "1", "--database", f"sqlite:///{place}")
    code, _, err = call(*arguments)
    assert code == 0, err
    found = CliRunner().invoke(
        app,
        ["db", "query", "job_summary", "--database", f"sqlite:///{place}", "--format", "json", "--columns", "cluster"],
    )
    assert found.exit_code == 0, found.output
    assert {row["cluster"] for row in json.loads(found.stdout)} == {"ones, seed 0", "fifo, seed 0"}
    before = place.read_bytes()
    for more, why in (
        ((), "name a new one"),
        (("--idealized",), "runs without the companion"),
        (("--executor", "slurm"), "open no"),
    ):
        code, _, err = call(*arguments, *more)
        assert code == 2 and why in err
    assert place.read_bytes() == before


def test_progress_where_there_is_no_terminal() -> None:
    """A line now and then while runs go on, and one for each that ends: seed, jobs, simulated time and time left."""
    now, written = [0.0], list[str]()
    lines = ProgressLines(4, written.append, lambda: now[0])
    lines(RunProgress("ones", 3, 600.0, 2, 10))
    assert not written, "too soon"
    now[0] = ProgressLines.EVERY_S
    lines(RunProgress("ones", 3, 7200.0, 5, 10))
    assert written == [
        "0 of 4 runs done after 15 s, about 1 m 45 s left; "
        "ones, seed 3: 5 of 10 jobs ended in 2 h 00 m of simulated time"
    ]
    now[0] += 1.0
    lines(RunProgress("ones", 3, finished=True))
    lines(RunProgress("ones", 3, 9000.0, 9, 10))
    assert len(written) == 2, "what comes after its end says nothing"
    assert written[1].startswith("1 of 4 runs done after 16 s, about 48 s left; ones, seed 3: 5 of 10 jobs ended")
    assert written[1].endswith(", done")


@pytest.mark.slow
def test_the_companion_on_a_simulated_slurm(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    code, out, err = call(
        "--workload", "ones-sc21", "--jobs", "3", "--cluster", "4x4", "--policy", "fifo", "--processes", "1",
        "--set", "resize.max_open=2", "--figures", str(path),
    )  # fmt: skip
    assert code == 0, err
    assert "a decision every 10 s" in out
    found = json.loads(path.read_text())
    assert found["policies"]["fifo"]["unfinished"] == 0
    assert all(job["ended"] is not None for job in found["jobs"])
    assert found["run"]["settings"] == {"resize.max_open": 2}


def test_a_workload_from_a_file(tmp_path: Path) -> None:
    """Researchers' files work as they are: a job alone takes what its profile says. A bad line is named."""
    write_profile(tmp_path / "profiles" / "net")
    work, path = tmp_path / "work.csv", tmp_path / "s.json"
    options = ["--workload", str(work), "--profiles", str(tmp_path / "profiles"), "--policy", "fifo", "--idealized"]
    write_workload(work, ["a,0,net,1,64", "b,20000,net,4,256"])
    code, _, err = call(*options, "--cluster", "1x4", "--processes", "1", "--figures", str(path), "--resize-cost", "0")
    assert code == 0, err
    first, second = json.loads(path.read_text())["jobs"]
    assert first["jct_s"] == pytest.approx(EPOCHS * ITERATIONS * 1.04, rel=1e-6)
    assert second["jct_s"] < first["jct_s"] / 2 and first["metric"] == pytest.approx(EPOCHS / 10)
    write_workload(work, ["a,0,huge,1,32"])
    code, _, err = call(*options)
    assert code == 2 and "Traceback" not in err
    assert f"{work}: line 2: column application: 'huge' has no profile; there are net" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "no.csv"], "neither a file nor one of ones-sc21, philly, uniform"),
        (["--workload", "setup.cfg"], "--profiles"),
        (["--policy", "best"], "'best' is none of"),
        (["--policy", "fifo:speed=1"], "no option 'speed'"),
        (["--policy", "fifo:speed"], "'speed' is not key=value"),
        (["--policy", f"ones:population={10**400}"], "must be a whole number"),
        (["--cluster", "16"], "16x4"),
        (["--cluster", "0x4"], "16x4"),
        (["--resize-cost", "dear"], "neither seconds nor the word measured"),
        (["--resize", "warm"], "neither requeue nor hot"),
        (["--resize", "hot:speed=1"], "there are pause_s, shrink_pause_s, bytes_per_s, launch_s"),
        (["--resize", "hot:launch_s=-1"], "launch_s: -1.0"),
        (["--resize", "hot", "--resize-cost", "9"], "--resize-cost is for requeues"),
        (["--arrivals", "never"], "poisson, uniform, diurnal"),
        (["--load", "0"], "load: 0.0"),
        (["--load", "2", "--hours", "3"], "load 2 and hours 3"),
        (["--profiles", "."], "only for a workload from a file"),
        (["--interval", "0"], "--interval: 0.0"),
        (["--html", "/nowhere/page.html"], "--html: /nowhere/page.html cannot be written"),
        (["--set", "resize.dwel_s=1"], "resize.dwel_s"),
        (["--idealized", "--set", "resize.dwell_s=1"], "--idealized does not use"),
    ],
)
def test_bad_options_end_in_a_line(arguments: list[str], named: str) -> None:
    """Exit code 2 and what is accepted, before anything is run."""
    chosen = [] if "--policy" in arguments else ["--policy", "fifo"]
    code, _, err = call(*chosen, *arguments)
    assert code == 2
    assert named in err and "Traceback" not in err


def test_values_are_what_they_look_like() -> None:
    assert parse_pairs("", ["a=1", "b=2.5", "c=true", "d=x", "e=1e3"]) == {
        "a": 1, "b": 2.5, "c": True, "d": "x", "e": 1000.0,
    }  # fmt: skip
    found = parse_policy("ones:population=8,goodput=false")
    assert (found.policy, found.options) == ("ones", {"population": 8, "goodput": False})
    for text, options in (("mine.policies:Mine", {}), ("mine.policies:Mine:speed=2", {"speed": 2})):
        assert (parse_policy(text).policy, parse_policy(text).options) == ("mine.policies:Mine", options)
    assert parse_cluster("16x4") == ((16, 4, ""),)
    assert parse_cluster("8x4:a100+2x8:t4") == ((8, 4, "a100"), (2, 8, "t4"))
    for wrong in ("8x4:a100+8x4", "8x4:a100+8x4:a100", "8x4:abacus", "8x4+", "0x4:t4"):
        with pytest.raises(BadInput, match="--cluster"):
            parse_cluster(wrong)
    assert parse_resize_cost("measured") is None and parse_resize_cost("15") == 15.0
    for cost in ("-1", "nan", "inf", "true"):
        with pytest.raises(BadInput):
            parse_resize_cost(cost)


@pytest.mark.slow
def test_hot_resizes_are_named_in_what_is_written(tmp_path: Path) -> None:
    """The file says how jobs were resized and at which costs; decisions come every 15 s unless it is said."""
    path = tmp_path / "hot.json"
    code, out, err = call(
        "--policy", "ones", "--jobs", "4", "--idealized", "--resize", "hot:launch_s=9", "--figures", str(path),
        "--processes", "1",
    )  # fmt: skip
    assert code == 0, err
    run = json.loads(path.read_text())["run"]
    assert run["resize"] == "hot" and run["hot"]["launch_s"] == 9.0 and run["hot"]["pause_s"] == 0.3
    assert run["interval_s"] == 15.0 and "resize_cost_s" not in run
    assert "(hot)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--executor", "cloud"), "'cloud' is neither local nor slurm"),
        (("--sbatch", "--partition=cpu"), "only with --executor slurm"),
        (("--directory", "here"), "only with --executor slurm"),
        (("--executor", "slurm", "--sbatch", "--comment=ones:"), "--comment is set by the study itself"),
    ],
)
def test_how_jobs_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], named: str
) -> None:
    """What is wrong with how a study is sent is said before anything is sent or written."""
    monkeypatch.chdir(tmp_path)
    code, _, err = call("--idealized", "--jobs", "4", "--policy", "fifo", *options)
    assert code == 2 and named in err and not list(tmp_path.iterdir())


def test_options_of_sbatch() -> None:
    """Long and short ones, with and without `=`; none that a study's jobs need as they are."""
    found = parse_sbatch("--partition=cpu -t 2:00:00 -Aproject --exclusive --mem 4G --constraint='a|b'")
    assert found == {
        "partition": "cpu", "time": "2:00:00", "account": "project", "exclusive": True, "mem": "4G",
        "constraint": "a|b",
    }  # fmt: skip
    assert parse_sbatch("") == {} and parse_sbatch("--wait-all-nodes=1") == {"wait-all-nodes": "1"}
    for wrong, named in (
        ("--quiet", "--quiet is set by the study itself"),
        ("--comment=ones:", "--comment is set by the study itself"), ("-J name", "-J"), ("cpu", "'cpu' is no option"),
        ("--time=", "no value"), ("--qos='a\nb'", "no value"), ("'", "No closing quotation"),
        ("--array=1-3", "--array is set by the study itself"),
        ("--commen=ones:gpus=1-4", "--comment, which .* --commen for"),
        ("--wra=true", "--wrap, which"), ("--elastic-g=1-4", "--elastic-gpus, which"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=named):
            parse_sbatch(wrong)
