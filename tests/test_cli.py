"""The commands as people meet them: on a filled job database, without Slurm, and on real sites."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ones_db import BlockRecord, DecisionJobRecord, Store, migrate
from ones_db.reasons import reason
from ones_db.shape import Shape
from slurm_ones.cli import app, common
from slurm_ones.text import clock
from tests.cluster import Cluster
from tests.commands import call, printed
from tests.db.make import SPEC, decision, hello, job, report, resized_job, run, said, throughput
from tests.db.test_views import BEGAN, fill_blocks
from tests.marks import nightly

HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\n[red]x[/red]"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ones.sqlite'}"


@pytest.fixture
def filled(empty_url: str) -> str:
    """A database with a job that was resized, one that is refused, and one with a hostile name."""
    url = empty_url
    with Store.open(url, "gres") as store:
        resized_job(store, 7)
        store.record_jobs([job(8, elastic=False, refusal=said("it was submitted with task counts"), state="PENDING")])
        store.record_jobs(
            [job(9, name=HOSTILE, user=HOSTILE, comment=HOSTILE, refusal=said(HOSTILE), report_note=HOSTILE)]
        )
        store.add_decision(decision(2400.0, 7, 8))
    return url


def at_terminal(width: int, *arguments: str) -> str:
    """What the command prints on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "slurm_ones.cli", *arguments]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment | {"TERM": "xterm"})
        os.close(theirs)
        said = b""
        with suppress(OSError):  # EIO at its end
            while part := screen.read(4096):
                said += part
        assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", said.decode().replace("\r\n", "\n"))


class TestDatabase:
    def test_it_creates_and_then_has_nothing_to_do(self, url: str) -> None:
        first = call("db", "upgrade", "--database", url)
        assert (first.exit_code, "schema none → " in first.stdout) == (0, True)
        again = call("db", "upgrade", "--database", url)
        assert (again.exit_code, "nothing to do" in again.stdout) == (0, True)

    def test_a_path_that_cannot_be(self, tmp_path: Path) -> None:
        """One line, exit code 2, no traceback."""
        (tmp_path / "file").write_text("")
        done = call("db", "upgrade", "--database", f"sqlite:///{tmp_path}/file/ones.sqlite")
        assert done.exit_code == 2
        assert done.stderr.startswith("slurm-ones: ")
        assert "Traceback" not in done.output


class TestJobs:
    def test_json(self, filled: str) -> None:
        jobs = {j["job_id"]: j for j in printed("jobs", "--json", "--database", filled)}
        assert set(jobs) == {7, 8, 9}
        assert (jobs[7]["shape"], jobs[7]["batch"], jobs[7]["resizes"], jobs[7]["pause_s"]) == ("1x4", 256, 1, 410.0)
        assert (jobs[8]["shape"], jobs[8]["elastic"]) == (None, False)
        assert [j["job_id"] for j in printed("jobs", "8", "--json", "--database", filled)] == [8]

    def test_table(self, filled: str) -> None:
        done = call("jobs", "7", "8", "--database", filled)
        assert done.exit_code == 0
        assert "1x4" in done.stdout
        assert "job 8: it was submitted with task counts" in done.stdout

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [nightly(200), nightly(80), nightly(60), 40])
    def test_the_jobs_number_is_there_at_any_width(self, filled: str, width: int) -> None:
        """Protects the one thing by which all commands name a job: on a terminal other columns give way, whole."""
        with Store.open(filled, "gres") as store:
            resized_job(store, 123456789, "a-user-of-long-name")
        done = at_terminal(width, "jobs", "--database", filled)
        rows = done.split("per GPU" if width > 80 else "\n", 1)[1]
        assert all(re.search(rf"^{number}\b", rows, re.MULTILINE) for number in (7, 8, 9, 123456789)), done
        assert all(len(line) <= width for line in done.splitlines()[:5]), done
        assert ("the terminal is too narrow for" in done) == (width < 200)

    def test_piped_all_columns_are_there(self, filled: str) -> None:
        with Store.open(filled, "gres") as store:
            store.record_jobs([job(123456789, user="u" * 16, name="n" * 24, state="COMPLETING")])
        header, *rows = call("jobs", "--database", filled).stdout.splitlines()
        assert header.split()[0] == "job" and header.split()[-1] == "JCT"
        assert any(row.split()[:4] == ["123456789", "n" * 24, "u" * 16, "COMPLETING"] for row in rows)

    def test_a_job_that_nobody_knows(self, filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is said, with what is known of it, and the exit code is 1; those that are known are shown."""
        monkeypatch.setenv("PATH", "/nonexistent")
        done = call("jobs", "7", "99999", "--database", filled)
        assert done.exit_code == 1 and done.stdout.splitlines()[1].startswith("7 ")
        assert "job 99999 is not in the database" in done.stderr and "Slurm cannot be asked" in done.stderr
        done = call("jobs", "99999", "--json", "--database", filled)
        assert (done.exit_code, json.loads(done.stdout)) == (1, [])
        assert "No job has opted in" not in call("jobs", "99999", "--database", filled).stdout

    def test_jobs_are_named_or_chosen(self, filled: str) -> None:
        """Options that had no effect, and of a report a job that it said Slurm does not know."""
        for command in (("jobs", "7", "--user", "bob"), ("report", "7", "--user", "bob")):
            done = call(*command, "--database", filled)
            assert done.exit_code == 2 and "not both" in done.stderr

    def test_causes(self, filled: str) -> None:
        """Why jobs do not get another size is counted: by the newest outcome, or by the refusal."""
        cap = reason("account_cap", account="physics", gpus=16, setting="limits.gpus_per_account")
        with Store.open(filled, "gres") as store:
            store.record_jobs([job(10), job(11), job(12, refusal=reason("task_counts"))])
            store.record_jobs([job(13, state="COMPLETED", end_time=9.0, refusal=reason("task_counts"))])
            new = decision(2500.0, 10, 11)
            store.add_decision(replace(new, jobs=tuple(replace(one, outcome=cap) for one in new.jobs)))
        assert "2 jobs: capped by account; 1 job: submitted with" in call("jobs", "--database", filled).stdout
        found = {j["job_id"]: j["cause"] for j in printed("jobs", "--json", "--database", filled)}
        assert found == dict.fromkeys((7, 8, 9, 13)) | dict.fromkeys((10, 11), "account_cap") | {12: "task_counts"}

    def test_an_empty_database(self, empty_url: str) -> None:
        with Store.open(empty_url, "gres"):
            pass
        done = call("jobs", "--database", empty_url)
        assert (done.exit_code, "slurm-ones template" in done.stdout) == (0, True)


class TestWhy:
    def test_json(self, filled: str) -> None:
        told = printed("why", "7", "--json", "--database", filled)
        assert told["job"]["job_id"] == 7
        (decided,) = told["decisions"]
        assert (decided["reason"], decided["policy"], decided["nodes"], decided["batch"]) == (
            "gains (why=reason 7)",
            "ones",
            1,
            256,
        )
        (resized,) = told["resizes"]
        assert (resized["state"], resized["pause_s"], len(resized["steps"]) >= 2) == ("done", 410.0, True)

    def test_no_decision_is_shown_of_none_asked_for(self, filled: str) -> None:
        assert call("why", "7", "--last", "0", "--database", filled).exit_code == 2

    def test_words(self, filled: str) -> None:
        cap = said("capped")
        with Store.open(filled, "gres") as store:
            store.add_decision(replace(decision(2450.0), jobs=(DecisionJobRecord(7, None, None, cap, outcome=cap),)))
        done = call("why", "7", "--database", filled)
        assert "reason 7" in done.stdout and done.stdout.count("capped") == 1
        assert "training paused for 6 m 50 s" in done.stdout
        phases = "queue 1 m 45 s, launch 2.0 s (imports 1.5 s), process group 0.25 s, load 0.75 s, first step 0.5 s"
        assert f"the start after it: {phases}" in done.stdout
        assert "It is left alone: it was submitted with task counts" in call("why", "8", "--database", filled).stdout

    def test_what_its_owner_should_hear(self, filled: str) -> None:
        """A training that went wrong is said loudly, and how often its ranks died."""
        assert "Look at it" not in call("why", "7", "--database", filled).stdout
        with Store.open(filled, "gres") as store:
            odd = throughput(21, step=40, loss=None, nonfinite=12)
            report(store, 7, 1, hello=hello(20, attempt=2, batch=256, note="rank 3 died"), offset=90, number=20)
            report(store, 7, 1, spec=replace(SPEC, max_local_batch=32, max_passes=2), offset=90, number=20)
            report(store, 7, 1, throughput=[odd], offset=99, number=21)
            begun = clock(store.runs(7)[1].start_time)
        done = call("why", "7", "--database", filled)
        assert "not a finite number (NaN or infinite) in 12 steps, last near step 40" in done.stdout
        assert "Run 1 started its ranks 3 times." in done.stdout
        assert f"Run 1, begun {begun}: rank 3 died" in done.stdout
        assert "batch 256 (2 × 32 per GPU)" in done.stdout
        listed = call("jobs", "7", "--database", filled)
        assert "2 × 32" in listed.stdout and "job 7: the loss was not a finite number" in listed.stdout
        (found,) = printed("jobs", "7", "--json", "--database", filled)
        assert (found["passes"], found["local_batch"], found["nonfinite"], found["attempts"]) == (2, 32, 12, 2)

    @pytest.mark.slow
    def test_a_script_that_tells_no_samples(self, filled: str) -> None:
        """Its steps are told, and nothing that would be made up."""
        with Store.open(filled, "gres") as store:
            store.record_jobs([job(11, restart=0)])
            store.record_runs([run(11, gpus=2)])
            unsaid = {"batch": 0, "base_batch": 0, "max_batch": 0, "dataset": 0, "epochs": 0}
            steps = throughput(2, 2011.0, step=41, samples=0, batch=0, cursor=0, loss=None, seconds=10.0)
            report(store, 11, 0, hello=hello(world=2, step=1, **unsaid), steps=steps, offset=90, number=2)
            assert (store.histories([11])[11].throughput, store.histories([11])[11].spec) == ((), None)
        done = call("why", "11", "--database", filled)
        assert "Run 0 took 41 optimizer steps on 1x2, 4 a second, and has not called ones.init" in done.stdout
        assert "shape 1x2, batch unknown" in done.stdout and "epochs –" in done.stdout
        assert "optimizer steps" not in call("why", "7", "--database", filled).stdout
        with Store.open(filled, "gres") as store:
            again = hello(5, 5000.0, world=2, step=1, attempt=1, **unsaid)
            report(store, 11, 0, hello=again, steps=replace(steps, number=6, time=5010.0), offset=180, number=6)
        assert "optimizer steps" not in call("why", "11", "--database", filled).stdout

    @pytest.mark.slow
    def test_a_job_of_blocks(self, filled: str) -> None:
        """One job: who trains, where, how that came and what it cost. Its blocks' own names answer for it."""
        with Store.open(filled, "gres") as store:
            fill_blocks(store)
            store.record_jobs([job(10, user="carol", restart=1, submit_time=BEGAN - 50.0)])
            running = BlockRecord(10, 3, 0, 13, Shape(1, 4), ("n2",), "RUNNING", BEGAN + 90.0)
            store.record_blocks([running])
        done = call("why", "10", "--database", filled)
        assert "It trains on block 3: 1x4; last change 1.5 s, shrank from 5 to 4 GPUs (blocks were lost)" in done.stdout
        assert "block 3: 1x4 on n2, RUNNING since" in done.stdout
        assert "generation 2: 0.25 s, grew from 1 to 5 GPUs" in done.stdout
        assert "1x1 → 1x4 (adds 3 (1x4)): done, trains on 2 blocks, training paused for 0.25 s" in done.stdout
        assert "the start after it" not in done.stdout
        assert call("why", "10_3", "--database", filled).stdout == done.stdout
        told = printed("why", "10_0", "--json", "--database", filled)
        assert [block["task"] for block in told["blocks"]] == [0, 3]
        assert [member["report"]["blocks"] for member in told["memberships"]] == [[3], [0, 3], [0]]
        assert [j["job_id"] for j in printed("jobs", "10_3", "--json", "--database", filled)] == [10]

    def test_a_word_that_is_no_job(self, filled: str) -> None:
        for word in ("mine", "7_", "7_x", "-7", "7.batch", "7_3_1", "٧"):
            assert call("why", "--database", filled, "--", word).exit_code == 2


class TestSettings:
    """Every command that takes settings."""

    def test_a_wrong_key(self, tmp_path: Path) -> None:
        """Named with its neighbour, exit code 2."""
        config = tmp_path / "config.toml"
        config.write_text("tick = 5\n")
        for command in (("jobs",), ("why", "7"), ("run",), ("doctor",), ("db", "upgrade")):
            done = call(*command, "--config", str(config))
            assert done.exit_code == 2
            assert "unknown key tick (did you mean tick_s?)" in done.stderr


class TestWithoutSlurm:
    """A machine that has none, with real processes."""

    @pytest.mark.slow
    @pytest.mark.parametrize("command", [("run",), nightly(("run", "--act", "--own")), nightly(("doctor",))])
    def test_it_is_said_in_a_line(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        """What is missing and where to go, exit code 2, no database left behind."""
        done = subprocess.run(
            [Path(sys.executable).with_name("slurm-ones"), *command],
            env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "there is no Slurm on this machine" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.rglob("*.sqlite"))


@pytest.fixture(scope="module", params=["gres", nightly("old")])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    running: Cluster = request.getfixturevalue(request.param)
    yield running


@pytest.mark.cluster
class TestDoctor:
    """`doctor` on both real sites."""

    def findings(self, cluster: Cluster, user: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
        home = {"HOME": "/scratch"} if user == "slurm" else {}
        done = cluster.run(["slurm-ones", "doctor", "--json", *options], user=user, env=home, check=False)
        assert done.stdout, done.stderr
        return done.returncode, {f["what"]: f for f in json.loads(done.stdout)}

    def test_an_ordinary_user_with_their_own_jobs(self, cluster: Cluster) -> None:
        status, found = self.findings(cluster, "alice", "--own")
        assert (status, [f for f in found.values() if f["verdict"] == "bad"]) == (0, [])
        assert found["Slurm"]["found"].startswith("22.05" if cluster.site.name == "old" else "2")
        assert "PySlurm" in found["client"]["found"] if cluster.pyslurm else "command line" in found["client"]["found"]
        assert found["permission"]["found"] == "user mode: alice may resize alice's own jobs"
        assert found["partition gpu"]["found"].startswith("GRES, 4 GPUs a node")
        assert "whole_node_gpus" in found["partition whole"]["advice"]
        seconds = "6 s" if not cluster.site.requeue_delay else "0 s"
        assert found["requeue delay"]["found"].startswith(seconds)
        assert found["KillWait"]["found"].startswith("5 s")

    def test_an_ordinary_user_with_everybodys_jobs(self, cluster: Cluster) -> None:
        """It is said what to do, and the exit code says that something is bad."""
        (cluster.home("alice") / "all.toml").write_text('scope = "all"\n')
        status, found = self.findings(cluster, "alice", "--config", "/home/alice/all.toml")
        assert status == 1
        assert found["permission"]["verdict"] == "bad"
        assert 'scope = "own"' in found["permission"]["advice"]
        assert found["spool"]["verdict"] == "bad"

    def test_the_operator(self, cluster: Cluster) -> None:
        status, found = self.findings(cluster, "slurm")
        assert found["permission"]["found"] == "slurm may resize everybody's jobs"
        assert (found["spool"]["verdict"], "ONES_SPOOL" in found["spool"]["advice"]) == ("bad", True)
        assert status == 1
        spool = cluster.scratch / "spool"
        spool.mkdir(exist_ok=True)
        os.chown(spool, *cluster.box.ids("slurm"))
        (cluster.scratch / "operator.toml").write_text('spool = "/scratch/spool"\n[whole_node_gpus]\nwhole = 4\n')
        _, found = self.findings(cluster, "slurm", "--config", "/scratch/operator.toml")
        assert found["spool"]["verdict"] == "ok"
        assert found["partition whole"]["found"].startswith("whole nodes of 4 GPUs")

    def test_the_table(self, cluster: Cluster) -> None:
        program = Path(cluster.python).with_name("slurm-ones")
        done = cluster.run([str(program), "doctor", "--own"], user="bob", env={"COLUMNS": "60"}, check=False)
        assert done.returncode == 0
        assert "partition whole" in done.stdout.replace("\n", " ")


class TestTemplate:
    def test_they_are_listed_with_what_they_are_for(self) -> None:
        done = call("template")
        assert done.exit_code == 0
        lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
        assert {"ddp", "ddp-whole-node", "mpi", "slurm-ones.service", "config.toml"} <= set(lines)
        assert lines["mpi"].startswith("Elastic training on CPU nodes with MPI")

    @pytest.mark.parametrize("name", ["ddp", "ddp.sbatch"])
    def test_one_is_printed_as_it_is(self, name: str) -> None:
        """So that `slurm-ones template ddp > ddp.sbatch` makes the file."""
        done = call("template", name)
        assert (done.exit_code, done.stdout) == (
            0,
            (Path(__file__).parents[1] / "sbatch_templates/ddp.sbatch").read_text(),
        )


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("jobs --states RUNING", "RUNNING"),
        ("top --sort shap", "shape"),
        ("template ddpp", "ddp"),
        ("db query scalin", "scaling"),
        ("db query scaling --columns gpu", "gpus"),
        ("db query scaling --param job=7", "job_id"),
        ("simulate --policy Polux", "pollux"),
        ("simulate --policy gavel:objectiv=makespan", "objective"),
        ("simulate --workload filly", "philly"),
        ("simulate --arrivals poison", "poisson"),
        ("simulate --resize hot:lanch_s=1", "launch_s"),
    ],
)
def test_a_word_that_is_nearly_right_is_named(command: str, meant: str) -> None:
    done = call(*command.split())
    assert done.exit_code == 2 and f"(did you mean {meant}?)" in " ".join(done.output.replace("│", "").split())


def test_a_slip_of_the_finger_is_answered() -> None:
    done = call("jbos")
    assert done.exit_code == 2 and "(did you mean jobs?)" in done.output
    assert "did you mean" not in call("\x1b[2Jzzz").output and "\x1b" not in call("stat\x1bus").output
    for words in ((), ("why",), ("db",), ("db", "query"), ("plugin", "install")):
        assert call(*words, "-h").exit_code == 0
    text = call("-h").output
    assert all(group in text for group in ("Your jobs", "Before you submit", "A site", "Studies"))


def test_a_locale_without_a_names_letters(empty_url: str) -> None:
    """Protects whoever lists jobs where the encoding is not UTF-8 from a name that it cannot write."""
    with Store.open(empty_url, "gres") as store:
        store.record_jobs([job(7, name="gr\u00fcn\u2192\u6a5f")])
    command = [sys.executable, "-m", "slurm_ones.cli", "jobs", "--database", empty_url]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True)
    assert b"gr\xfcn\\u2192\\u6a5f" in done.stdout


def test_streams_that_are_closed(filled: str) -> None:
    """A script of cron's may have closed them: the answer is still the exit code."""
    command = f"{sys.executable} -m slurm_ones.cli jobs --database {filled}"
    for closed in ("<&- >&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{command} {closed}", shell=True, stderr=subprocess.PIPE, check=True).stderr == b""


def test_a_shell_completes_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are those of the commands themselves; without a database nothing is completed, and nothing is said."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert common.job_ids() == []
    url = f"sqlite:///{tmp_path}/ones.sqlite"
    settings = tmp_path / ".config/slurm-ones/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'scope = "own"\ndatabase = "{url}"\n')
    migrate.upgrade(url)
    with Store.open(url, "here") as store:
        store.record_jobs([job(71, name="train"), job(72, name=HOSTILE), job(80)])
    found = dict(common.job_ids())
    assert found.keys() == {"71", "72", "80"} and found["71"] == "train" and found["72"].isprintable()
    for words, wanted in (
        ("jobs 7", {"71", "72"}),
        ("simulate --policy ones", {"ones", "ones-sc21"}),
        ("db query gpu_hours", {"gpu_hours", "gpu_hours_by_user"}),
        ("template slurm-ones.", {"slurm-ones.service"}),
    ):
        asked = {"_SLURM_ONES_COMPLETE": "complete_bash", "COMP_WORDS": f"slurm-ones {words}"}
        done = CliRunner().invoke(app, prog_name="slurm-ones", env=asked | {"COMP_CWORD": str(len(words.split()))})
        assert {*done.stdout.split()} == wanted
