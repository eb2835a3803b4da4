"""The commands as people run them: what they print, what they refuse, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ones_db import (
    DecisionJobRecord,
    DecisionRecord,
    HelloRecord,
    JobRecord,
    ResizeRecord,
    RunRecord,
    SpecRecord,
    Store,
    migrate,
)
from slurm_ones.cli import app
from tests.cluster import Cluster

RUNNER = CliRunner()
EVIL = "\x1b[2Jevil[red]"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A database with one resized job, whose user chose its name with care."""
    url = f"sqlite:///{tmp_path / 'ones.sqlite'}"
    migrate.upgrade(url)
    with Store.open(url, "here") as store:
        store.see_jobs([JobRecord(7, EVIL, "alice", 100.0, 1, 1, elastic=True, state="RUNNING")])
        store.set_spec(7, SpecRecord(32, 256, 64, 1000, 10))
        store.see_runs([RunRecord(7, 0, 1, 1, ("n1",), 110.0)])
        hello = HelloRecord(1, 111.0, 1, 1, 32, 1.0, 0, 0, 0, note="checkpoint step-9 is damaged, step-8 was loaded")
        store.add_reports(7, 0, offset=10, number=1, hello=hello)
        grow = DecisionJobRecord(7, 1, 4, 128, "grows 1 → 4 GPUs", 1, 1, 32, acted=True, outcome="begins")
        decision = store.add_decision(DecisionRecord(150.0, "ones", "act", 0.1, jobs=(grow,)))
        resize = store.begin_resize(ResizeRecord(7, 0, 1, 1, 32, 1, 4, 128, "draining", 150.0, decision))
        store.step_resize(resize.id, "requeuing", time=151.0)
        store.end_resize(resize.id, "done", "it runs at its new shape", 160.0, pause_s=9.0)
        store.see_jobs([JobRecord(8, "odd", "bob", 120.0, 1, 1, refusal="'gpu=2': expected gpus=", state="PENDING")])
    yield url


def told(*arguments: str, code: int = 0) -> str:
    """What a command prints, on both streams, after it ended with that code."""
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_jobs_says_where_each_job_stands(url: str) -> None:
    """State, shape, batch and resizes of each job, and why one is left alone."""
    shown = told("jobs", "--database", url)
    assert all(word in shown for word in ("alice", "RUNNING", "1x1", "32", "0/10", "'gpu=2'"))
    listed = json.loads(told("jobs", "--json", "--database", url))
    assert [(j["job_id"], j["state"], j["shape"], j["resizes"]) for j in listed] == [
        (7, "RUNNING", "1x1", 1),
        (8, "PENDING", None, 0),
    ]


def test_why_tells_decisions_resizes_and_what_the_run_said(url: str) -> None:
    """The owner of a job finds what was decided, why, how it went, and what was odd."""
    shown = told("why", "7", "--database", url)
    for word in ("grows 1 → 4 GPUs", "begins", "requeuing", "it runs at its new shape", "9.0 s", "step-9 is damaged"):
        assert word in shown
    assert "expected gpus=" in told("why", "8", "--database", url)
    as_json = json.loads(told("why", "7", "--json", "--database", url))
    assert as_json["resizes"][0]["steps"][1]["state"] == "requeuing"


def test_no_name_steers_the_terminal(url: str) -> None:
    """Escape characters and markup in a job's name are shown, not obeyed."""
    for shown in (told("jobs", "--database", url), told("why", "7", "--database", url)):
        assert "\x1b" not in shown
        assert "?[2Jevil[red]" in shown


def test_an_unknown_job_is_said_to_be_unknown(url: str) -> None:
    """With how a job comes to be known."""
    assert "ones: gpus=1-16" in told("why", "4711", "--database", url, code=2)


def test_a_missing_database_names_the_command_that_makes_it(tmp_path: Path) -> None:
    """And that command makes it."""
    url = f"sqlite:///{tmp_path / 'new.sqlite'}"
    assert "slurm-ones db upgrade" in told("jobs", "--database", url, code=2)
    assert "none → 0001" in told("db", "upgrade", "--database", url)
    assert "nothing to do" in told("db", "upgrade", "--database", url)


def test_a_wrong_settings_file_is_refused(tmp_path: Path) -> None:
    """No command runs on settings that were misunderstood."""
    path = tmp_path / "ones.toml"
    path.write_text("tik_s = 3\n")
    for command in (["run"], ["jobs"], ["doctor"]):
        assert "did you mean tick_s?" in told(*command, "--config", str(path), code=2)


def _without_slurm(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "slurm_ones.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_no_slurm_on_the_machine(tmp_path: Path, command: str) -> None:
    """Said in one line, with what to do, and no traceback."""
    done = _without_slurm(tmp_path, command)
    assert done.returncode == 2
    assert "there is no Slurm on this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cluster
def test_a_policy_that_does_not_exist_is_refused(gres: Cluster) -> None:
    """Before anything is looked at, with the names that exist."""
    (gres.home("alice") / "wrong.toml").write_text('policy = "best"\n')
    done = gres.run(["slurm-ones", "run", "-c", "wrong.toml"], check=False)
    assert done.returncode == 2
    assert "'best' is none of ones" in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("site", "version", "client"), [("gres", "26.05", "PySlurm"), ("old", "22.05", "command line")]
)
def test_doctor_knows_the_site(site: str, version: str, client: str, request: pytest.FixtureRequest) -> None:
    """Version, client, permission, GRES or whole nodes, requeue delay and directories, each with its verdict."""
    cluster: Cluster = request.getfixturevalue(site)
    done = cluster.run(["slurm-ones", "doctor", "--own", "--json"], check=False)
    found = {entry["what"]: entry for entry in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["Slurm"]["found"] == version
    assert client in found["client"]["found"] or (site == "gres" and not cluster.pyslurm)
    assert "own jobs" in found["permission"]["found"]
    assert "GRES, 4 GPUs" in found["partition gpu"]["found"]
    assert "whole_node_gpus" in found["partition whole"]["advice"]
    assert "StartTime=now" in found["requeue delay"]["found"]


@pytest.mark.cluster
def test_doctor_says_what_stands_in_the_way(gres: Cluster) -> None:
    """An ordinary user who means to look after everybody is told that it cannot be, and how it could."""
    (gres.home("alice") / "all.toml").write_text('scope = "all"\n')
    done = gres.run(["slurm-ones", "doctor", "-c", "all.toml", "--json"], check=False)
    found = {entry["what"]: entry for entry in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["permission"]["verdict"] == "bad"
    assert "adminlevel=operator" in found["permission"]["advice"]
    assert "ONES_SPOOL" in found["spool"]["advice"]
