"""What a user of an operator's site sees: `jobs`, `why` and `status` over what the companion published for them."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import Result

from ones_db import HealthRecord, ReportLine, Store
from ones_db.leader import LeaderLock
from ones_db.shape import Shape
from ones_wrapper.protocol import Checkpoint
from slurm_ones.cli import by_hand
from slurm_ones.cli.common import own_store
from slurm_ones.cli.doctor import _database, _permission, _plugin, _views
from slurm_ones.cli.jobs import unknown_job
from slurm_ones.config import ConfigError, Settings, load, parse
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.service.publisher import Publisher
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import Refused, UnknownJob, Unreachable
from slurm_ones.slurm.model import JobState, SlurmJob
from tests.commands import call
from tests.db.make import job, resize, resized_job, said
from tests.slurm.make import job_of

ALICE, BOB, EVE = 2001, 2002, 2003
USERS = {"alice": ALICE, "bob": BOB}


@pytest.fixture
def site(tmp_path: Path, empty_sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The settings of a site whose companion has published jobs of alice and bob, and leads."""
    shutil.copy(empty_sqlite, tmp_path / "ones.sqlite")
    url = f"sqlite:///{tmp_path / 'ones.sqlite'}"
    monkeypatch.setattr(
        pwd, "getpwnam", lambda name: pwd.struct_passwd((name, "x", USERS[name], USERS[name], "", "/", "/bin/sh"))
    )
    now = time.time()
    with Store.open(url, "gres") as store, LeaderLock(url, "gres") as lock:
        lock.take(now)
        resized_job(store, 7, "alice")
        store.record_jobs([job(8, user="bob", name="bobs-secret")])
        for number in (7, 8):
            store.begin_resize(resize(number, new_shape=Shape(1, 1), started=9000.0, state="draining"))
        store.record_health(HealthRecord(now, "act", 45.0, now, 0.5, 2, 0, 4))
        publisher = Publisher(url, "gres", tmp_path / "views")
        publisher.publish()
        publisher.close()
        # Root may read every file: what users cannot open is not there for these.
        closed = "sqlite:////nonexistent/ones.sqlite"
        file = tmp_path / "config.toml"
        file.write_text(f'database = "{closed}"\nviews = "{tmp_path / "views"}"\n')
        monkeypatch.setenv("PATH", "/nonexistent")
        yield file


def as_user(monkeypatch: pytest.MonkeyPatch, uid: int, *arguments: str) -> Result:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid)
        return call(*arguments)


def test_users_see_their_own_jobs_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ("--config", str(site))
    done = as_user(monkeypatch, ALICE, "jobs", "--json", *config)
    assert [job["job_id"] for job in json.loads(done.stdout)] == [7]
    shown = as_user(monkeypatch, ALICE, "why", "7", *config)
    assert shown.exit_code == 0 and "resize 1x1, batch 64 → 256: draining" in shown.stdout
    other = as_user(monkeypatch, ALICE, "why", "8", *config)
    assert other.exit_code == 2 and "job 8 is not among your jobs" in other.stderr and "secret" not in other.output
    assert [one["job_id"] for one in json.loads(as_user(monkeypatch, BOB, "jobs", "--json", *config).stdout)] == [8]


def test_the_state_is_slurms_where_it_can_be_asked(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call for all jobs. Another user's job by the same id is of another cluster; no answer leaves the stored
    states."""
    calls, squeue = site.parent / "calls", site.parent / "squeue"
    squeue.write_text(
        f"""#!/bin/sh
echo "$@" >>{calls}
printf '{{"jobs":[{{"job_id":7,"user_name":"%s","job_state":["%s"],"node_count":{{"number":2}},
"tres_alloc_str":"gres/gpu=4","tres_per_node":"gres/gpu:2"}}]}}' $OWNER ${{STATE:-CANCELLED}}
exit ${{FAILS:-0}}
"""
    )
    squeue.chmod(0o755)
    config = ("--config", str(site))

    def shown_now() -> dict[str, Any]:
        return json.loads(as_user(monkeypatch, ALICE, "jobs", "--json", *config).stdout)[0]

    def state() -> str:
        return str(shown_now()["state"])

    def shape() -> str | None:
        return shown_now()["shape"]

    stored = state()
    monkeypatch.setenv("PATH", f"{site.parent}:/usr/bin:/bin")
    assert stored != "CANCELLED" and (state(), calls.read_text().count("--jobs=7\n")) == (stored, 1)
    monkeypatch.setenv("OWNER", "alice")
    assert state() == "CANCELLED"
    shown = as_user(monkeypatch, ALICE, "jobs", *config).stdout
    assert "CA" in shown and "states as Slurm has them now" in shown
    assert as_user(monkeypatch, ALICE, "jobs", "-t", stored, *config).stdout == ""
    told = as_user(monkeypatch, ALICE, "report", "7", *config).stdout
    assert ": CANCELLED\n" in told and told.endswith("states as Slurm has them now\n")
    shown = as_user(monkeypatch, ALICE, "top", "--once", *config).stdout
    assert "states from Slurm" in shown and " CA " in shown
    assert "of alice: CANCELLED, " in as_user(monkeypatch, ALICE, "why", "7", *config).stdout
    # Between a requeue and the next tick it trains at a shape that no tick has seen.
    with Store.open(f"sqlite:///{site.parent / 'ones.sqlite'}", "gres") as store:
        store.record_jobs([job(7, user="alice", state="PENDING", restart=2)])
    publisher = Publisher(f"sqlite:///{site.parent / 'ones.sqlite'}", "gres", site.parent / "views")
    publisher.publish()
    publisher.close()
    assert shape() is None
    monkeypatch.setenv("STATE", "RUNNING")
    assert (state(), shape()) == ("RUNNING", "2x2")
    assert "RUNNING, shape 2x2, " in as_user(monkeypatch, ALICE, "why", "7", *config).stdout
    monkeypatch.setenv("FAILS", "1")
    assert (state(), shape()) == ("PENDING", None)
    for command in (("jobs",), ("report", "7"), ("top", "--once")):
        said = as_user(monkeypatch, ALICE, *command, *config).stdout
        assert said and "CANCELLED" not in said and "Slurm has" not in said and "from Slurm" not in said


def test_who_waits_for_a_size_reads_why(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tick that saw the wish; nothing if none has, or if the database cannot be read."""
    why = "beyond 1 GPU it would cost too much"
    with Store.open(f"sqlite:///{site.parent / 'ones.sqlite'}", "gres") as store:
        store.record_jobs([job(7, user="alice", refusal=said(why))])
    monkeypatch.setattr(
        by_hand, "settings_of", lambda config: Settings(database=f"sqlite:///{site.parent}/ones.sqlite")
    )
    tick = time.time()
    assert [by_hand._why(7, tick + after) for after in (-3600.0, 3600.0)] == [why, ""]
    monkeypatch.setattr(by_hand, "settings_of", lambda config: Settings(database="sqlite:////nonexistent/ones.sqlite"))
    assert by_hand._why(7, 0.0) == ""


def test_a_size_by_hand_counts_whole_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where Slurm knows of no GPUs: a job that has the size is not waited for until the wish is taken back."""
    whole = replace(job_of(Shape(2, 0)), state=JobState.RUNNING, held=False, node_list=("n1", "n2"))
    asked: list[int | None] = []
    monkeypatch.setattr(by_hand, "settings_of", lambda config: Settings(whole_node_gpus={"gpu": 4}))
    monkeypatch.setattr(by_hand, "look", lambda client, job_id: WholeJob.of(whole))
    monkeypatch.setattr(by_hand, "ask", lambda client, job, gpus: asked.append(gpus))
    by_hand.resize(7, "2x4", timeout=0.0)
    by_hand.pin(7)
    assert asked == [8, None, 8] and "job 7: stays at 8 GPUs" in capsys.readouterr().out


def test_a_wish_that_cannot_be_taken_back_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job would keep that size for ever, though its owner was told otherwise."""
    looks = [WholeJob.of(job_of(Shape(1, 1)))]

    def look(client: object, job_id: int) -> WholeJob:
        if not looks:
            raise Unreachable("squeue: no answer")
        return looks.pop()

    monkeypatch.setattr(by_hand, "look", look)
    monkeypatch.setattr(by_hand, "ask", lambda client, job, gpus: None)
    with pytest.raises(typer.Exit):
        by_hand.resize(7, "8", timeout=0.0)
    assert "slurm-ones release 7" in capsys.readouterr().err


def test_a_closed_terminal_takes_the_wish_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though it sends SIGHUP several times; under nohup none counts, and the job is waited for."""
    asked: list[int | None] = []
    nohup = False

    def look(client: object, job_id: int) -> WholeJob:
        if asked:
            signal.raise_signal(signal.SIGHUP)
        shape = Shape(1, 8 if asked and nohup else 1)
        return WholeJob.of(replace(job_of(shape), state=JobState.RUNNING, held=False, node_list=("n1",)))

    def unheeded(*_: object) -> None:
        raise AssertionError("the terminal's signal is not handled")

    monkeypatch.setattr(by_hand, "look", look)
    monkeypatch.setattr(by_hand, "ask", lambda client, job, gpus: asked.append(gpus))
    monkeypatch.setattr(by_hand, "POLL_S", 0.0)
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, unheeded)
        with pytest.raises(typer.Exit):
            by_hand.resize(7, "8")
        assert asked == [8, None] and "the request was withdrawn" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGHUP) is unheeded
        asked.clear()
        nohup = True
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        by_hand.resize(7, "8")
        assert asked == [8, None] and "8 GPUs after" in capsys.readouterr().out
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_estimate_is_of_a_job_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue and type of GPU; of GPUs that fit into one node it asks for one."""
    its = {"kind": "a100", "qos": "long", "account": "lab", "reservation": "course", "partitions": ("gpu", "more")}
    running = replace(job_of(Shape(1, 1), **its), state=JobState.RUNNING, held=False, node_list=("n1",))
    asked: list[str] = []
    client = SimpleNamespace(
        snapshot=lambda: SimpleNamespace(gpus_of_node={"gpu": 8}), run=lambda argv, said: asked.extend(argv) or ""
    )
    monkeypatch.setattr(by_hand, "CommandClient", lambda: client)
    monkeypatch.setattr(by_hand, "look", lambda client, job_id: WholeJob.of(running))
    monkeypatch.setattr(by_hand, "settings_of", lambda config: Settings())
    by_hand.estimate(7, ["8"])
    queue = {"--qos=long", "--account=lab", "--reservation=course", "--partition=gpu,more"}
    assert {"--nodes=1", "--gres=gpu:a100:8", *queue} <= {*asked}


def test_a_rehearsal_revives_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm requeues an ended job too: one that its user cancelled meanwhile, or that came to its end."""
    line = ReportLine(1, 1.0, Checkpoint("c", 0, 0, 1, 8, 0.1, order=5))
    orders = SimpleNamespace(next_number=lambda job: 5, write=lambda job, order: None)
    asked: list[list[str]] = []

    def run(argv: list[str]) -> None:
        asked.append(argv)
        raise UnknownJob("it has ended")

    monkeypatch.setattr(by_hand, "OrderWriter", lambda *_: orders)
    monkeypatch.setattr(by_hand, "OwnReports", lambda: SimpleNamespace(of=lambda job, restart: [line]))
    client: Any = SimpleNamespace(signal=lambda key, name: None, run=run)
    with pytest.raises(UnknownJob):
        by_hand.rehearsed(client, WholeJob.of(job_of(Shape(1, 1))), 1.0, lambda text: None)
    assert asked == [["scontrol", "requeue", "Incomplete", "7"]]


def test_a_rehearsal_ends_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a user whose script fails in the restart: nothing more comes, and the user does not wait for minutes."""
    line = ReportLine(1, 1.0, Checkpoint("c", 0, 0, 1, 8, 0.1, order=5))
    orders = SimpleNamespace(next_number=lambda job: 5, write=lambda job, order: None)
    failed = replace(job_of(Shape(1, 1)), state=JobState.FAILED, restart=1)
    monkeypatch.setattr(by_hand, "OrderWriter", lambda *_: orders)
    monkeypatch.setattr(by_hand, "OwnReports", lambda: SimpleNamespace(of=lambda job, restart: [line]))
    client: Any = SimpleNamespace(signal=lambda key, name: None, run=lambda argv: "", job=lambda key: failed)
    with pytest.raises(BadInput, match=r"job 7 has ended \(FAILED\): see slurm-ones why 7"):
        by_hand.rehearsed(client, WholeJob.of(job_of(Shape(1, 1))), 1.0, lambda text: None)


def test_status_is_for_everybody(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    for uid in (ALICE, BOB, EVE):
        done = as_user(monkeypatch, uid, "status", "--no-slurm", "--json", "--config", str(site))
        told[uid] = json.loads(done.stdout)
        assert done.exit_code == 0 and told[uid]["healthy"] and told[uid]["last"]["running"] == 2
    assert {uid: [one["job_id"] for one in found["resizes"]] for uid, found in told.items()} == {
        ALICE: [7],
        BOB: [8],
        EVE: [],
    }


def test_who_has_no_jobs_yet_is_told_when_they_will_show(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No permission error, and exit code 1; nothing published at all is said as such."""
    for command in (("jobs",), ("why", "7"), ("jobs", "--json")):
        done = as_user(monkeypatch, EVE, *command, "--config", str(site))
        assert done.exit_code == 1 and "have not been seen yet: the companion looks every 45 s" in done.stderr
    assert json.loads(as_user(monkeypatch, EVE, "jobs", "--json", "--config", str(site)).stdout) == []
    shutil.rmtree(site.parent / "views")
    (site.parent / "views").mkdir()
    done = as_user(monkeypatch, EVE, "jobs", "--config", str(site))
    assert done.exit_code == 1 and "is it running?" in done.stderr
    done = as_user(monkeypatch, EVE, "status", "--no-slurm", "--config", str(site))
    assert done.exit_code == 1 and "has published nothing yet" in done.stdout


def test_a_report_on_others_says_that_they_are_not_shown(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = as_user(monkeypatch, ALICE, "report", "-u", "bob", "--config", str(site))
    assert "jobs of bob cannot be seen here" in done.stderr and done.exit_code != 0


def test_a_users_own_database_is_theirs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first byte, since who has it open reads on. A site's is as its account's umask says, since it may let
    others read."""
    before, connect = os.umask(0o022), sqlite3.connect

    def connected(address: str, **options: Any) -> sqlite3.Connection:
        assert scope == "all" or (tmp_path / scope).stat().st_mode & 0o777 == 0o600
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", connected)
    try:
        modes = []
        for scope in ("own", "all"):
            settings = Settings(scope=scope, database=f"sqlite:///{tmp_path / scope}")
            own_store(settings, "here").close()
            modes.append((tmp_path / scope).stat().st_mode & 0o777)
    finally:
        os.umask(before)
    assert modes == [0o600, 0o644]


def test_doctor_tells_of_a_script_that_slurm_would_miss(tmp_path: Path) -> None:
    config = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "JobSubmitPlugins": "all_partitions,lua"}
    client = SimpleNamespace(config=lambda: config)
    (found,) = _plugin(client, Settings())  # type: ignore[arg-type]
    assert (
        f"{tmp_path}/job_submit.lua does not exist here" in found.found and "scontrol reconfigure fails" in found.advice
    )
    (tmp_path / "job_submit.lua").touch()
    assert not [*_plugin(client, Settings())]  # type: ignore[arg-type]
    config["JobSubmitPlugins"] = "(null)"
    (tmp_path / "job_submit.lua").unlink()
    assert not [*_plugin(client, Settings())]  # type: ignore[arg-type]


def test_doctor_asks_a_user_for_nothing_of_an_operators(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, nobody = load(site), None
    for uid, what in ((ALICE, "without other users' jobs"), (EVE, "the companion has seen none of them yet")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda uid=uid: uid)
            found = [one for check in (_permission, _views, _database) for one in check(nobody, settings)]  # type: ignore[arg-type]
        assert [one.what for one in found] == ["permission", "your jobs"] and what in found[1].found
        assert "bad" not in {one.verdict for one in found}
    assert "the companion looks every 45 s" in found[1].advice


def test_doctor_tells_an_operator_of_a_folder_without_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(views=tmp_path)
    assert [one.verdict for one in _views(None, settings)] == ["ok"]  # type: ignore[arg-type]

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    (found,) = _views(None, settings)  # type: ignore[arg-type]
    assert found.verdict == "bad" and "POSIX ACLs" in found.advice
    (found,) = _views(None, Settings())  # type: ignore[arg-type]
    assert found.verdict == "note" and "users cannot see their jobs" in found.found


@pytest.mark.parametrize(
    ("known", "own_only", "words"),
    [
        (None, False, "Slurm does not know it"),
        (None, True, "or it is another user's"),
        ({"comment": ""}, False, "it has not opted in: it has no comment"),
        ({"comment": "my run"}, False, "it has not opted in: its comment is 'my run'"),
        ({"comment": "ones: gpus=1-4"}, False, "the companion has not seen it yet, and looks every 30 s"),
        (
            {"comment": "ones: gpus=1-4", "user": "bob"},
            True,
            "it belongs to bob, and each user sees only their own jobs",
        ),
    ],
)
def test_what_is_known_of_an_unknown_job(
    known: dict[str, str] | None, own_only: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = HealthRecord(1000.0, "act", 30.0)
    store: Any = SimpleNamespace(place="/views/2001.sqlite" if own_only else "/db", health=lambda: health)
    settings = Settings(views=Path("/views"))

    class Client:
        def details(self, ids: list[int]) -> dict[int, SlurmJob]:
            return {} if known is None else {9: job_of(Shape(1, 1), **{"job_id": 9, "user": "alice", **known})}

    monkeypatch.setattr("slurm_ones.cli.jobs.connect", lambda settings: Client())
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert words in unknown_job(settings, 9, store)

    def broken(settings: Settings) -> None:
        raise Refused("no")

    monkeypatch.setattr("slurm_ones.cli.jobs.connect", broken)
    assert "Slurm cannot be asked" in unknown_job(settings, 9, store)


class TestSecrets:
    """The settings are for everybody, and what is secret is in a file of its own."""

    def test_a_url_in_a_file(self, tmp_path: Path) -> None:
        """Read only by whoever opens the database; refused where others may read it; never shown."""
        secret, file = tmp_path / "secret", tmp_path / "config.toml"
        file.write_text(f'database_url_file = "{secret}"\n')
        file.chmod(0o644)
        settings = load(file)
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            _ = settings.database_url
        secret.write_text("postgresql://me:s3same@host/ones\n")
        secret.chmod(0o640)
        with pytest.raises(ConfigError, match="others may read it; chmod 600") as caught:
            _ = settings.database_url
        assert "s3same" not in str(caught.value)
        secret.chmod(0o600)
        assert settings.database_url == "postgresql://me:s3same@host/ones"
        assert "s3same" not in repr(settings)
        secret.write_text("a\nb\n")
        with pytest.raises(ConfigError, match="write one line"):
            _ = settings.database_url

    def test_two_databases_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="both name a database") as caught:
            parse('database = "postgresql://me:s3same@host/a"\ndatabase_url_file = "/b"')
        assert "s3same" not in str(caught.value)

    def test_a_settings_file_that_is_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "config.toml"
        file.write_text("")

        def refuse(*_: object, **__: object) -> str:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_text", refuse)
        with pytest.raises(ConfigError, match=r"closed to you.*chmod 644"):
            load(file)
