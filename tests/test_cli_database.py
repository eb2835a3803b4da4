"""`db maintain` and `import sacct` as people meet them, without a Slurm."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from ones_db import AlternativeRecord, DecisionJobRecord, DecisionRecord, Store
from ones_db.shape import PARKED, Shape
from slurm_ones.slurm.sacct import FIELDS
from tests.commands import call, printed
from tests.db.make import actions, hello, job, report, run, said, throughput

HOSTILE = "evil\x1b[2J[red]x[/red]"

SACCT = """#!/usr/bin/python3
import sys
if "--helpformat" in sys.argv:
    print({fields!r})
    sys.exit()
(separator,) = [a.partition("=")[2] for a in sys.argv if a.startswith("--delimiter=")]
since, until = [int(a.partition("=uts")[2]) for a in sys.argv if "=uts" in a]
for row in open({rows!r}):
    fields = row.rstrip("\\n").split("|")
    if since <= int(fields[5]) <= until:
        print(separator.join(fields))
"""
SCONTROL = "#!/bin/sh\necho 'ClusterName             = here'\n"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ones.sqlite'}"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rows of accounting, and commands on the PATH that print those of a span."""
    found, folder = tmp_path / "rows", tmp_path / "bin"
    folder.mkdir()
    script = SACCT.format(fields=" ".join(FIELDS), rows=str(found))
    for name, text in (("sacct", script), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return found


def row(job_id: str, submit: int, end: str, state: str = "COMPLETED", name: str = "train") -> str:
    asked = "billing=4,cpu=4,gres/gpu=4,node=1"
    fields = [job_id, job_id, "here", str(submit), str(submit + 60), end, state, "0:0", "1", asked, asked, "n1"]
    return "|".join([*fields, "60", "alice", "lab", "gpu", "", name])


class TestImport:
    def test_a_site_and_again(self, rows: Path, url: str) -> None:
        """Protects counts, the figures that a new site gains, bad rows that are named, and the second import."""
        day = 1_760_000_000
        lines = [row(str(n), day + 3600 * n, str(day + 3600 * n + 1860), name=f"train-{n}") for n in range(48)]
        lines += [row("50", day, str(day + 5000), "REQUEUED"), row("50", day + 5000, str(day + 2 * 86400))]
        lines += [
            row("60", day, str(day + 86400), "REQUEUED"),
            row("x1", day, str(day + 100)),
            row("9" * 30, day, str(day + 100)),
        ]
        lines += [row("61", day, str(day + 100), name=HOSTILE)]
        rows.write_text("\n".join(lines))
        command = ("import", "sacct", "--since", "2025-10-08", "--until", "2025-10-14", "--database", url)
        done = call(*command)
        assert done.exit_code == 0, done.output
        assert "50 jobs new" in done.stdout and "1 were requeued and have not" in done.stdout
        assert "run time: median 30 m 00 s" in done.stdout and "alice's train: 49 jobs" in done.stdout
        assert "'x1' is no number" in done.stderr and "too large" in done.stderr and "Traceback" not in done.output
        assert "\x1b" not in done.output
        again = printed(*command, "--json")
        assert {name: again["imported"][name] for name in ("new", "changed", "same")} == {
            "new": 0,
            "changed": 0,
            "same": 50,
        }
        assert again["workload"]["gpu_jobs"] == 50 and again["workload"]["restarted"] == 1
        with Store.open(url, "here", read_only=True) as store:
            assert [run.end_reason for run in store.runs(50)] == ["REQUEUED", "COMPLETED"]
            assert [action.action for action in actions(store)] == ["import sacct"]

    def test_an_array_that_nobody_knows(self, rows: Path, url: str) -> None:
        """Protects a sweep from being taken for blocks, and the import from an array that is not in the database."""
        tasks = [row(str(n), 1_760_000_000, "1760000100").replace(f"{n}|{n}|", f"{n}|40_{n}|") for n in (41, 42)]
        rows.write_text("\n".join(tasks))
        span = ("--since", "2025-10-08", "--until", "2025-10-11")
        assert printed("import", "sacct", *span, "--database", url, "--json")["imported"]["new"] == 2

    def test_a_file_of_another_machine(self, rows: Path, url: str, tmp_path: Path) -> None:
        """Protects a file's jobs with their names, local times and other clusters' rows; spans are not for files."""
        path = tmp_path / "sacct.txt"
        head = "JobIDRaw|Cluster|Submit|Start|End|State|NNodes|AllocTRES|User|JobName"
        when = [datetime.fromtimestamp(1_760_000_000 + n).isoformat() for n in (0, 60, 3660)]
        cells = ["|".join(when), "COMPLETED|1|gres/gpu=4|alice|train"]
        lines = [f"{job}|{cluster}|{'|'.join(cells)}" for job, cluster in (("7", "here"), ("7.0", "here"), ("8", "x"))]
        path.write_text("\n".join([head, *lines]))
        command = ("import", "sacct", str(path), "--cluster", "here", "--database", url)
        done = call(*command, "--since", "3d")
        assert done.exit_code == 2 and "is read as a whole" in done.stderr
        mixed = call("import", "sacct", str(path), "--database", f"sqlite:///{tmp_path}/mixed.sqlite")
        assert mixed.exit_code == 2 and "line 4: is of cluster 'x', the line before of 'here'" in mixed.stderr
        done = call(*command)
        assert done.exit_code == 0 and "2 rows, 1 of them bad: 1 jobs new" in done.stdout, done.output
        assert "sacct.txt: line 4: it is of cluster 'x', not here" in done.stderr
        with Store.open(url, "here", read_only=True) as store:
            (job,), (run,) = store.past_jobs(0.0, 2e9), store.runs(7)
        assert (job.name, job.user, job.gpus, run.start_time) == ("train", "alice", 4, 1_760_000_060.0)

    def test_rows_of_another_cluster(self, rows: Path, url: str) -> None:
        rows.write_text(row("7", 1_760_000_000, "1760000100") + "\n")
        span = ("--since", "2025-10-08", "--until", "2025-10-11")
        done = call("import", "sacct", *span, "--cluster", "there", "--database", url)
        assert done.exit_code == 0 and "it is of cluster 'here', not there" in done.stderr, done.output
        assert "0 jobs new" in done.stdout

    @pytest.mark.parametrize("since", ["yesterday", "2999-01-01", "1e9", "-3d", "9999999999d"])
    def test_dates_that_are_none(self, rows: Path, url: str, since: str) -> None:
        """A line that says what to write, and exit code 2."""
        done = call("import", "sacct", f"--since={since}", "--database", url)
        assert done.exit_code == 2 and done.stderr.startswith("slurm-ones: --since: "), done.output

    def test_without_accounting(self, rows: Path, url: str, tmp_path: Path) -> None:
        (tmp_path / "bin/sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
        done = call("import", "sacct", "--database", url)
        assert done.exit_code == 2 and "accounting storage is disabled" in done.stderr


class TestMaintain:
    @pytest.fixture
    def old(self, empty_url: str) -> str:
        url = empty_url
        with Store.open(url, "here") as store:
            store.record_jobs([job(7)])
            report(store, 7, 0, hello=hello(), throughput=[throughput(n) for n in range(2, 302)], offset=9, number=301)
            store.record_jobs([job(7, state="COMPLETED", end_time=4000.0)])
        return url

    def test_what_is_promised_and_done(self, old: str) -> None:
        """A dry run says what a run then does; the next has nothing to do; who did it is written down."""
        promised = call("db", "maintain", "--dry-run", "--database", old)
        assert promised.exit_code == 0, promised.output
        done = call("db", "maintain", "--older-than", "2w", "--database", old)
        assert done.exit_code == 0 and "would be" in promised.stdout
        assert promised.stdout.replace("would be", "were") == done.stdout
        assert "nothing to do" in call("db", "maintain", "--database", old).stdout
        with Store.open(old, "here", read_only=True) as store:
            (action,) = actions(store)
            assert action.action == "db maintain" and action.user

    def test_ages_of_the_settings(self, old: str, tmp_path: Path) -> None:
        config = tmp_path / "ones.toml"
        config.write_text(f'database = "{old}"\n[retention]\nminutes_after_days = 36500\nhours_after_days = 36500\n')
        assert "nothing to do" in call("db", "maintain", "--config", str(config)).stdout
        assert "combined with others" in call("db", "maintain", "--config", str(config), "--older-than", "1h").stdout

    @pytest.mark.parametrize("text", ["7", "d", "7 days", "-1d", "1e3d", "٣d", "9" * 20 + "d"])
    def test_ages_that_are_none(self, old: str, text: str) -> None:
        """A line that says what to write, and exit code 2."""
        done = call("db", "maintain", f"--older-than={text}", "--database", old)
        assert done.exit_code == 2 and "is not a duration: write a number" in done.stderr, done.output


def test_why_tells_what_was_weighed(empty_url: str) -> None:
    url = empty_url
    weighed = (AlternativeRecord(Shape(1, 4), 256, 3.5), AlternativeRecord(PARKED, 0, 0.25))
    with Store.open(url, "here") as store:
        store.record_jobs([job(7)])
        one = DecisionJobRecord(7, Shape(1, 4), 256, said("it grows"), alternatives=weighed)
        store.add_decision(DecisionRecord(1.0, "ones", "act", 0.1, jobs=(one,)))
    (decided,) = printed("why", "7", "--json", "--database", url)["decisions"]
    assert decided["alternatives"][0] == {"shape": "1x4", "batch": 256, "worth": 3.5}
    assert "weighed: 1x4/256 (3.5), waiting (0.25)" in call("why", "7", "--database", url).stdout


@pytest.mark.slow
def test_slow_nodes_are_named(empty_url: str, tmp_path: Path) -> None:
    """Protects who asks why a job is slow: two owners' jobs ran on the node and elsewhere, one of them runs there
    still, and a third job runs on other nodes."""
    url = empty_url
    now = time.time() - 1000.0
    with Store.open(url, "here") as store:
        for job_id, user in ((7, "alice"), (8, "bob"), (9, "carol")):
            store.record_jobs([job(job_id, user=user)])
            for restart, (node, speed) in enumerate((("n2", 100), ("n1", 40 if user != "carol" else 100))):
                names = (node,) if user != "carol" else ("n3",)
                store.record_runs([run(job_id, restart, node_list=names, start_time=now + 100.0 * restart)])
                told = [throughput(n, now + 100.0 * restart + n, samples=speed, seconds=1.0) for n in (2, 3, 4)]
                report(store, job_id, restart, hello=hello(time=now + restart), throughput=told, offset=9, number=4)
    found = printed("why", "8", "--json", "--database", url)["slow_nodes"]
    assert [(node["name"], node["runs"], node["owners"]) for node in found] == [("n1", 2, 2)]
    assert 0.4 < found[0]["factor"] < 0.6
    shown = call("why", "8", "--database", url).stdout
    assert "% of its usual speed: node n1 is slow, as 2 runs of 2 owners showed." in shown
    assert "slow" not in call("why", "9", "--database", url).stdout
    config = tmp_path / "ones.toml"
    config.write_text(f'database = "{url}"\n')
    assert "slow node  n1: about 0." in call("status", "--no-slurm", "--config", str(config)).stdout
    told = json.loads(call("status", "--no-slurm", "--json", "--config", str(config)).stdout)
    assert told["slow_nodes"] == found
