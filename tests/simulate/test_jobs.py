"""Studies whose parts run as jobs: same results, gone on with after a kill, failures bounded; on no Slurm here."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import submitit

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.spec import ClusterSpec
from slurm_ones.simulate.study import runs as kept
from slurm_ones.simulate.study.jobs import TRIES, SeenJob, SentAs, StudyJobs, StudyQueue, Waits
from slurm_ones.simulate.study.plan import Contender, StudyPlan
from slurm_ones.simulate.study.present import as_json
from slurm_ones.simulate.study.runs import RunProgress, StudyFolder, StudyRun, parts_of, run_all, run_part, summarize
from slurm_ones.slurm.client import Refused, SlurmError, Unreachable
from slurm_ones.slurm.model import JobState
from tests.simulate import test_study
from tests.simulate.test_study import FIFO, STRICT, crashing, unclocked

__all__ = ["crashing"]

PLAN = test_study.PLAN
SMALL = replace(PLAN, seeds=(0,))
QUICK = Waits(files_s=0.02, first_s=0.05, most_s=0.2, late_s=0.2)

Call = Callable[[], None]


class Processes(StudyJobs):
    """submitit's local executor as a site: each part is a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.jobs: dict[SentAs, submitit.LocalJob[None]] = {}

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        executor = submitit.LocalExecutor(self._folder)
        for index, job in enumerate(executor.submit_array(calls)):
            self.jobs[name, index] = job  # type: ignore[assignment]
        return f"{len(calls)} processes"

    def states(self, names: Collection[str]) -> Mapping[SentAs, SeenJob]:
        words = {"RUNNING": JobState.RUNNING, "FINISHED": JobState.COMPLETED}
        return {
            task: SeenJob(words.get(job.state, JobState.FAILED), job.job_id, Path(job.paths.stderr))
            for task, job in self.jobs.items()
            if task[0] in names
        }


class Scripted(StudyJobs):
    """A site in this process. `ends` are the states to which the parts of each submission come (by default all are
    run), the second part's alone in `second`; `refuses` are raised first."""

    def __init__(
        self, folder: Path, ends: Sequence[str] = (), second: Sequence[str] = (), refuses: Sequence[SlurmError] = ()
    ) -> None:
        self.folder, self.ends, self.second, self.refuses = folder, ends, second, list(refuses)
        self.known: dict[SentAs, JobState] = {}
        self.sent: list[int] = []
        """Parts of each submission."""
        self.lost: list[Call] = []
        """Calls of jobs that did not complete."""
        self.forgets = False

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        if self.refuses:
            raise self.refuses.pop(0)
        number = len(self.sent)
        self.sent.append(len(calls))
        for index, call in enumerate(calls):
            script = self.second if self.second and call.args[1] == parts_of(SMALL)[1].key else self.ends  # type: ignore[attr-defined]
            state = JobState(script[number]) if number < len(script) else JobState.COMPLETED
            self.known[name, index] = state
            if state is JobState.COMPLETED:
                call()
            else:
                self.lost.append(call)
        return "job 7"

    def states(self, names: Collection[str]) -> Mapping[SentAs, SeenJob]:
        (self.folder / "log").touch()
        found = {task: SeenJob(state, "7", self.folder / "log") for task, state in self.known.items()}
        if self.forgets:
            self.known.clear()
        return {task: seen for task, seen in found.items() if task[0] in names}

    def cancelling(self, names: Collection[str]) -> str:
        return "scancel"


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    found = StudyFolder(tmp_path / "study")
    with found.locked():
        pass
    return found


def study(
    site: Scripted, folder: StudyFolder, plan: StudyPlan = SMALL, said: list[str] | None = None
) -> list[StudyRun]:
    queue = StudyQueue(plan, folder, site, [].append if said is None else said.append, QUICK)
    return queue.run(lambda progress: None)


def same(runs: Sequence[StudyRun], others: Sequence[StudyRun]) -> bool:
    """Equal to the bit, except for what a clock measured."""
    words = [repr([unclocked(run) for run in found]) for found in (runs, others)]
    return words[0] == words[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_processes_find_what_this_one_finds_also_after_a_kill(folder: StudyFolder) -> None:
    """Same runs, JSON and order; what was there when the command was stopped is neither run nor written again."""
    said: list[str] = []
    site, waits = Processes(folder.jobs), replace(QUICK, late_s=20.0)

    def stop(progress: RunProgress) -> None:
        if progress.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), folder.locked():
        StudyQueue(SMALL, folder, site, said.append, waits).run(stop)
    assert "2 parts sent as 2 processes" in said[0] and "scancel --user=" in said[-1]
    there = {path: path.stat().st_mtime_ns for path in (folder.root / "results").glob("*.pkl")}
    assert there

    seen: dict[tuple[str, int], RunProgress] = {}
    with folder.locked():
        queue = StudyQueue(SMALL, folder, site, said.append, waits)
        assert queue.left < 2
        runs = queue.run(lambda progress: seen.update({(progress.label, progress.seed): progress}))
    assert len(site.jobs) == 2, "each part was one job"
    assert there == {path: path.stat().st_mtime_ns for path in there}
    here = run_all(SMALL, 1)
    assert same(runs, here)
    jsons = [json.dumps(as_json(SMALL, summarize(SMALL, found), found)["jobs"]) for found in (runs, here)]
    assert jsons[0] == jsons[1]
    assert all(progress.finished for progress in seen.values())
    with folder.locked():
        assert StudyQueue(SMALL, folder, site, said.append, waits).left == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "second", "sent", "error"),
    [
        ([], ["FAILED"] * TRIES, [2, 1, 1], "ended without a result (FAILED); log: "),
        (["TIMEOUT"], [], [2], "--time="),
        (["OUT_OF_MEMORY"], [], [2], "--mem="),
        (["CANCELLED"], [], [2], "somebody cancelled it"),
        (["FAILED", "FAILED"], [], [2, 2, 2], ""),
    ],
)
def test_a_job_that_dies(folder: StudyFolder, ends: list[str], second: list[str], sent: list[int], error: str) -> None:
    """It is sent again, three times in all, unless it would end in the same way; a new command tries again."""
    said: list[str] = []
    site = Scripted(folder.root, ends, second)
    first, last = study(site, folder, said=said)
    assert site.sent == sent and len([line for line in said if "sent again, try" in line]) == sum(sent[1:])
    assert (
        error in last.error
        and (last.outcome is None) == bool(error)
        and (first.outcome is None) == ("-" in error or "some" in error)
    )
    if error:
        site.ends = site.second = ()
        assert all(run.outcome is not None for run in study(site, folder))


def test_a_waiting_task_that_is_gone_was_cancelled(folder: StudyFolder) -> None:
    """Slurm forgets an array's waiting tasks that are cancelled; sending them again would help nobody."""
    site = Scripted(folder.root, ["PENDING"])
    site.forgets = True
    runs = study(site, folder)
    assert site.sent == [2] and all("somebody cancelled it; Slurm no longer knows job 7" in run.error for run in runs)


def test_a_crash_is_a_result_of_this_command_alone(folder: StudyFolder, crashing: Contender) -> None:
    """As in this process; it is not repeated, but the next command tries again."""
    plan = replace(SMALL, contenders=(FIFO, crashing))
    here, site = run_all(plan, 1), Scripted(folder.root)
    for times in (1, 2):
        runs = study(site, folder, plan)
        assert same(runs[:1], here[:1]) and runs[1] == here[1] and "ZeroDivisionError" in runs[1].error
        assert site.sent == [2, 1][:times]


@pytest.mark.slow
def test_damaged_and_foreign_results_are_run_again(folder: StudyFolder) -> None:
    site = Scripted(folder.root)
    runs = study(site, folder)
    first, second = ((folder.root / "results" / f"{part.key}.pkl") for part in parts_of(SMALL))
    for data in (first.read_bytes()[:1000], b"", b"garbage", second.read_bytes()):
        first.write_bytes(data)
        assert folder.result(parts_of(SMALL)[0]) is None
        assert same(study(site, folder), runs)
    assert site.sent == [2, 1, 1, 1, 1]


def test_what_has_changed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result's name follows from seed, options, settings, files and code; its place among others does not matter."""
    one = {part.key for part in parts_of(SMALL)}
    assert one < {part.key for part in parts_of(replace(PLAN, contenders=(STRICT, FIFO)))}
    changes = (replace(SMALL, interval_s=30.0), replace(SMALL, cluster=ClusterSpec(5, 4)), replace(SMALL, seeds=(1,)))
    for plan in changes:
        assert not one & {part.key for part in parts_of(plan)}
    file = tmp_path / "jobs.csv"
    of_file = replace(SMALL, source=replace(SMALL.source, workload=str(file), profiles=tmp_path))
    keys = []
    for text in ("a", "b"):
        file.write_text(text)
        keys.append(parts_of(of_file)[0].key)
    for application in ("x", "y"):
        (tmp_path / application).mkdir()
        (tmp_path / application / "placements.csv").write_text(application)
        keys.append(parts_of(of_file)[0].key)
    (tmp_path / "x").rename(tmp_path / "w")
    keys.append(parts_of(of_file)[0].key)
    assert len({*keys}) == len(keys), "the name of a profile's folder counts as well"
    sent = parts_of(SMALL)[0]
    monkeypatch.setattr(kept, "_code", lambda: "other code")
    with pytest.raises(RuntimeError, match="another version"):
        run_part(SMALL, sent.key, tmp_path)


@pytest.mark.slow
def test_jobs_of_a_killed_command_are_found_by_name(folder: StudyFolder) -> None:
    """Those that wait or run are not sent a second time; those that Slurm does not know are."""
    first, second = parts_of(SMALL)
    folder.put_sent("ones-study-1", [second, first])
    folder.put_sent("ones-study-2", [first])
    site, said = Scripted(folder.root), list[str]()
    site.known["ones-study-1", 0] = JobState.PENDING
    queue = StudyQueue(SMALL, folder, site, said.append, QUICK)
    assert "0 of 2 runs were done before, 1 wait or run as jobs, 1 are sent now" in said[0]
    run_part(SMALL, second.key, folder.root)
    assert same(queue.run(lambda progress: None), run_all(SMALL, 1)) and site.sent == [1]


@pytest.mark.slow
def test_refusals(folder: StudyFolder) -> None:
    """Fewer at a time are tried; what Slurm takes none of ends the command; an answer that is lost is looked for."""
    site = Scripted(folder.root, refuses=[Refused("too many")])
    study(site, folder)
    assert site.sent == [1, 1]
    plan = replace(SMALL, interval_s=30.0)
    with pytest.raises(Refused, match="invalid partition"):
        study(Scripted(folder.root, refuses=[Refused("invalid partition")] * 2), folder, plan)
    site, said = Scripted(folder.root, refuses=[Unreachable("no answer")]), list[str]()
    study(site, folder, plan, said)
    assert site.sent == [2] and "no answer; checking whether" in said[0]


def test_a_late_result_is_not_sent_for_again(folder: StudyFolder) -> None:
    """It comes after its job was given up, while the site takes no others."""
    site = Scripted(folder.root, ["RUNNING"], ["FAILED"])

    class Late(Scripted):
        def submit(self, name: str, calls: Sequence[Call]) -> str:
            if self.sent:
                for call in self.lost:
                    call()
                raise Refused("not now")
            return super().submit(name, calls)

    site.__class__ = Late
    assert all(run.outcome is not None for run in study(site, folder)) and site.sent == [2]


def test_one_command_at_a_time(folder: StudyFolder, tmp_path: Path) -> None:
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(folder.root / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(BadInput, match="another study works in"), folder.locked():
            pass
        other.kill()
    with folder.locked():
        pass
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"), StudyFolder(tmp_path / "file").locked():
        pass


@pytest.mark.parametrize("place", ["", "jobs"])
def test_a_folder_of_others_is_refused(folder: StudyFolder, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whoever may write there decides what our jobs run: they unpickle what they find."""
    (folder.root / place).chmod(0o770)
    with pytest.raises(BadInput, match=r"other users can write to .*chmod go-w"), folder.locked():
        pass
    (folder.root / place).chmod(0o755)
    with folder.locked():
        pass
    monkeypatch.setattr(kept.os, "geteuid", lambda: folder.root.stat().st_uid + 1)
    with pytest.raises(BadInput, match="belongs to uid"), folder.locked():
        pass


def test_the_site_is_asked_as_the_one_that_is_sent_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment names as user or cluster; an answer of sbatch's without a number is no refusal."""
    said = tmp_path / "said"
    for name, text in {
        "squeue": f'echo "$@ ${{SLURM_CLUSTERS-none}}" >> {said}',
        "sbatch": f'echo "sbatch ${{SLURM_CLUSTERS-none}}" >> {said}; echo taken',
        "srun": "exit 1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for variable in ("LOGNAME", "USER", "SLURM_CLUSTERS"):
        monkeypatch.setenv(variable, "another")
    site = StudyJobs(tmp_path / "jobs", {})
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert site.states({"x"}) == {}
    with pytest.raises(Unreachable, match="taken"):
        site.submit("x", [print])
    lines = said.read_text().splitlines()
    assert f"--user={user} " in lines[0] and lines[0].endswith(" none") and lines[1] == "sbatch none"
    assert f"--user={user} " in site.cancelling({"x"})
