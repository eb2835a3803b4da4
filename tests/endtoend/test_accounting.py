"""A real accounting, imported and studied: slurmdbd over MariaDB, with jobs of every end."""

from __future__ import annotations

import json
import shlex
import time
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from ones_db import Store
from slurm_ones.simulate.workloads.formats import COMMAND, read_trace
from slurm_ones.simulate.workloads.trace import TraceJob
from tests.db.make import actions, node_changes
from tests.endtoend.harness import DATABASE, LOOK_S, WAIT_S, Harness
from tests.waiting import until

pytestmark = pytest.mark.cluster

LIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING")
NAME = "a|b\n99|gres|1|2|3|COMPLETED|0:0|1|x|x|n1|1|bob|lab|gpu|forged \x1b[2J 🧪"


def imported(harness: Harness, settings: str, since: str = "1h") -> dict[str, Any]:
    command = ["slurm-ones", "import", "sacct", "--since", since, "--config", settings, "--json"]
    done = harness.cluster.run(command, user="alice")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def accounted(harness: Harness, *job_ids: int) -> dict[int, list[list[str]]]:
    """What `sacct` itself says of each job: its runs with start, end, state, nodes, TRES, exit code."""
    fields = "JobIDRaw,Start,End,State,NNodes,AllocTRES,ExitCode,Submit"
    ids = ",".join(map(str, job_ids))
    command = ["sacct", "-nPDX", f"--jobs={ids}", f"--format={fields}"]
    told: dict[int, list[list[str]]] = {}
    for line in harness.cluster.run(command, user="root", env={"SLURM_TIME_FORMAT": "%s"}).stdout.splitlines():
        job_id, *values = line.split("|")
        told.setdefault(int(job_id), []).append(values)
    return told


def recorded(harness: Harness, *job_ids: int) -> None:
    """Wait until accounting has the ends of these jobs, which have run. Slurm tells it of all ends in their order, when
    there is time; of jobs that never could start `sacct` says nothing unless it is asked for their state."""

    def there() -> bool:
        last = {job_id: rows[-1] for job_id, rows in accounted(harness, *job_ids).items()}
        return {*last} >= {*job_ids} and all(row[1].isdecimal() and row[2] not in LIVE for row in last.values())

    until(there, lambda: accounted(harness, *job_ids), WAIT_S, LOOK_S)


def batch(harness: Harness, script: str, *options: str, user: str = "bob") -> int:
    command = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script]
    return int(harness.cluster.run(command, user=user).stdout)


@pytest.mark.nightly
def test_a_site_starts_with_its_own_past(harness: Harness) -> None:
    """Jobs that completed, failed, were cancelled in the queue, requeued, and held while they ran, as `sacct` has them;
    twice the same. Any user asks `sacct`, or a file by the command that the documentation names, what elasticity would
    bring."""
    if not harness.cluster.accounting:
        pytest.skip("this cluster keeps no accounting")
    # Other tests' jobs of before, on the same cluster, may have rows that cannot be believed: they kill what they can.
    since = datetime.now().isoformat(timespec="seconds")
    fine = batch(harness, "sleep 1", "--nodes=2", "--gres=gpu:2", "--time=10")
    failed = batch(harness, "exit 3", "--gres=gpu:1", f"--job-name={NAME}")
    cancelled = batch(harness, "sleep 600", "--hold", "--gres=gpu:1")
    harness.cluster.run(["scancel", str(cancelled)], user="bob")
    again = batch(harness, 'test "$SLURM_RESTART_COUNT" && exec sleep 2; exec sleep 600', "--requeue", "--gres=gpu:1")
    held = batch(harness, "sleep 600", "--gres=gpu:1")
    running = harness.rigid("--gres=gpu:1")
    harness.wait(again, lambda job: job.running, "running")
    harness.cluster.run(["scontrol", "requeue", str(again)], user="root")
    harness.wait(held, lambda job: job.running, "running")
    harness.cluster.run(["scontrol", "hold", str(held)], user="root")
    time.sleep(1.1)  # a run of no whole second counts as none
    harness.cluster.run(["scancel", str(held)], user="bob")
    for job_id in (fine, failed, cancelled, again, held):
        harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    harness.wait(running, lambda job: job.running, "running")
    recorded(harness, fine, failed, again, held)

    settings = harness.settings()
    first = imported(harness, settings, since)["imported"]
    path = harness.cluster.scratch / settings.split("/")[2] / DATABASE
    with Store.open(f"sqlite:///{path}", "here", read_only=True) as store:
        stored = store.jobs([fine, failed, cancelled, again, held, running])
        assert set(stored) == {fine, failed, cancelled, again, held}
        assert first["new"] >= 5 and (first["bad_rows"], first["requeued"]) == (0, 0)
        for job_id, rows in accounted(harness, *stored).items():
            job, runs = stored[job_id], store.runs(job_id)
            started = [row for row in rows if "node=" in row[4]]
            assert [(r.start_time, r.end_time) for r in runs] == [(float(s), float(e)) for s, e, *_ in started]
            assert [r.end_reason for r in runs] == [row[2].split()[0] for row in started]
            assert (job.state, job.end_time) == (rows[-1][2].split()[0], float(rows[-1][1]))
            assert job.submit_time == float(rows[0][6])
        assert [(r.shape.nodes, r.shape.gpus_per_node, len(r.node_list)) for r in store.runs(fine)] == [(2, 2, 2)]
        assert [r.end_reason for r in store.runs(again)] == ["REQUEUED", "COMPLETED"] and stored[again].restart == 1
        assert (stored[failed].exit_code, stored[failed].name, stored[cancelled].state) == (3, NAME, "CANCELLED")
        assert store.runs(cancelled) == [] and stored[fine].user == "bob" and stored[fine].account == "lab"
    second = imported(harness, settings, since)
    assert (second["imported"]["new"], second["imported"]["changed"]) == (0, 0)
    assert second["imported"]["same"] == first["new"] and second["workload"]["gpu_jobs"] >= 3

    # The companion of the same database: it finds the past as it is, and writes down nodes and who started it.
    harness.cluster.run(["slurm-ones", "run", "--own", "--ticks", "1", "--config", settings], user="alice")
    with Store.open(f"sqlite:///{path}", "here", read_only=True) as store:
        assert store.jobs(list(stored)) == stored and store.live_jobs() == set()
        # What other tests have left at this cluster is not looked at.
        assert not [job for job in store.job_summaries() if job.job_id in stored]
        nodes = {node.name: node for _, node in node_changes(store)}
        assert (nodes["n1"].state, nodes["n1"].gpus, nodes["w4"].partitions) == ("UP", 4, "whole")
        done = [(action.user, action.action) for action in reversed(actions(store))]
        assert done == [("alice", "import sacct"), ("alice", "run --advise"), ("alice", "run ends")]

    scratch = harness.folder("study")
    inside = f"/scratch/{scratch.name}"
    zone, *sacct = [word for word in shlex.split(COMMAND) if not word.startswith("--starttime")]
    key, _, value = zone.partition("=")

    def written() -> dict[str, TraceJob]:
        """The jobs of a file that `sacct` writes now."""
        done = harness.cluster.run([*sacct, "--starttime=now-1hours"], user="bob", env={key: value})
        (scratch / "sacct.txt").write_text(done.stdout)
        return {job.name: job for job in read_trace(scratch / "sacct.txt").jobs}

    def study(*source: str) -> Any:
        command = ["slurm-ones", "study", *source, "--jobs", "5", "--seeds", "1", "--processes", "1"]
        outputs = ["--html", f"{inside}/page.html", "--figures", f"{inside}/figures.json"]
        done = harness.cluster.run([*command, *outputs], user="bob")
        assert "mean JCT" in done.stdout and "runs done" in done.stderr
        return json.loads((scratch / "figures.json").read_text())

    # Jobs of other tests end meanwhile, and accounting hears of it later.
    deadline, jobs, live = time.monotonic() + 2 * WAIT_S, written(), study("--since", "1h")
    while (after := written()).keys() != jobs.keys():
        assert time.monotonic() < deadline, after.keys() ^ jobs.keys()
        jobs, live = after, study("--since", "1h")
    assert (jobs[str(fine)].gpus, jobs[str(fine)].nodes, jobs[str(fine)].limit_s) == (4, 2, 600.0)
    assert jobs[str(again)].run_s >= 2 and jobs[str(again)].gpus == 1
    assert str(held) in jobs and str(cancelled) not in jobs
    assert all(job.started is not None and job.run_s > 0 for job in jobs.values())
    file = study(f"{inside}/sacct.txt")
    assert live["trace"]["format"] == file["trace"]["format"] == "sacct"
    assert live["trace"]["jobs"] == file["trace"]["jobs"] == len(jobs)
    assert live["curves"] == file["curves"] and live["recorded"] == file["recorded"]
    assert "What would elasticity bring?" in (scratch / "page.html").read_text()


@pytest.mark.nightly
def test_an_array_of_blocks_is_one_job_of_the_past(harness: Harness) -> None:
    """With the time in which any of its blocks ran, the GPU-seconds of all, and nothing of those that never started."""
    if not harness.cluster.accounting:
        pytest.skip("this cluster keeps no accounting")
    comment = "--comment=ones: gpus=1-4 array=blocks"
    folder = harness.folder("gate")
    script = f"until [ -e /scratch/{folder.name}/go ]; do sleep 0.1; done; sleep $((1 + 3 * SLURM_ARRAY_TASK_ID))"
    array = batch(harness, script, "--array=0-3%2", "--gres=gpu:1", "--nodes=1", comment)
    sweep = batch(harness, "sleep 1", "--array=0-1", "--gres=gpu:1", "--nodes=1", "--comment=ones: gpus=1-4")

    def shown(*options: str) -> list[str]:
        return sorted(harness.cluster.run(["squeue", "-h", *options], user="bob", check=False).stdout.split())

    tasks = ("-r", "-tR", f"-j{array}", "-o%K")
    until(lambda: shown(*tasks) == ["0", "1"], lambda: shown(*tasks), WAIT_S, LOOK_S)
    harness.cluster.run(["scancel", "--state=PENDING", str(array)], user="bob")
    (folder / "go").touch()
    until(lambda: not shown(f"-j{array},{sweep}"), "the end of both arrays", WAIT_S, LOOK_S)
    command = ["sacct", "-nPDX", f"-j{array},{sweep}", "-oJobIDRaw"]
    recorded(harness, *map(int, harness.cluster.run(command, user="root").stdout.split()))

    settings = harness.settings()
    command = ["sacct", "-nPDX", f"-j{array},{sweep}", "-oJobID,JobIDRaw,ElapsedRaw,AllocTRES,Start,End"]
    rows = [line.split("|") for line in harness.cluster.run(command, user="root").stdout.splitlines()]
    ran = [row for row in rows if "node=" in row[3] and row[0].startswith(f"{array}_")]
    assert len(ran) == 2, rows
    imported(harness, settings)
    path = harness.cluster.scratch / settings.split("/")[2] / DATABASE
    with Store.open(f"sqlite:///{path}", "here", read_only=True) as store:
        job, runs = store.jobs([array])[array], store.runs(array)
        tasks = {int(row[1]) for row in rows if row[0].startswith(f"{array}_")} - {array}
        assert store.jobs(list(tasks)) == {}
        assert sum((r.end_time - r.start_time) * r.shape.gpus for r in runs) == sum(int(r[2]) for r in ran)
        assert all(a.end_time == b.start_time for a, b in pairwise(runs)) and len(runs) >= 2
        assert (job.user, job.state, job.requested_shape.gpus_per_node) == ("bob", "COMPLETED", 1)
        assert len(store.jobs([int(row[1]) for row in rows if row[0].startswith(f"{sweep}_")])) == 2


def test_the_oldest_release_is_asked_for_what_it_has(old_harness: Harness) -> None:
    """22.05 knows every field and option, and says itself that it keeps no accounting here."""
    settings = old_harness.settings()
    command = ["slurm-ones", "import", "sacct", "--config", settings]
    done = old_harness.cluster.run(command, user="alice", check=False)
    assert done.returncode == 2 and "accounting storage is disabled" in done.stderr, done.stderr
