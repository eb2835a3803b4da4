"""Studies whose parts run as jobs: same results, gone on with after a kill, failures bounded; on no Slurm here."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import submitit

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.study import parts as parts_module
from slurm_ones.simulate.study.elsewhere import TRIES, Call, Seen, Study, Task, Waits
from slurm_ones.simulate.study.parts import BadResult, StudyFolder, parts_of, run_part
from slurm_ones.simulate.study.plan import PolicySpec
from slurm_ones.simulate.study.present import as_json
from slurm_ones.simulate.study.runs import Run, RunProgress, run_all, summarize
from slurm_ones.simulate.study.slurm_site import SlurmSite, parse_sbatch
from slurm_ones.slurm.client import Refused, Unreachable
from slurm_ones.slurm.model import JobState
from tests.simulate import test_study
from tests.simulate.test_study import FIFO, STRICT, Crashing, crashing, unclocked

__all__ = ["crashing"]

PLAN = replace(test_study.PLAN, source=replace(test_study.PLAN.source, jobs=6))
SMALL = replace(PLAN, seeds=(0,))
QUICK = Waits(files_s=0.02, first_s=0.05, most_s=0.2, late_s=0.2)


class Processes:
    """submitit's local executor as a site: each part is a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.jobs: dict[Task, submitit.LocalJob[None]] = {}

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        executor = submitit.LocalExecutor(self._folder)
        for index, job in enumerate(executor.submit_array(calls)):
            self.jobs[Task(name, index)] = job  # type: ignore[assignment]
        return f"{len(calls)} processes"

    def states(self, names: Collection[str]) -> Mapping[Task, Seen]:
        words = {"RUNNING": JobState.RUNNING, "FINISHED": JobState.COMPLETED}
        return {
            task: Seen(words.get(job.state, JobState.FAILED), job.job_id, Path(job.paths.stderr))
            for task, job in self.jobs.items()
            if task.name in names
        }

    def cancelling(self, names: Collection[str]) -> str:
        return f"kill {','.join(names)}"


@dataclass
class Fake:
    """A site in this process. `does` says what becomes of a part, by its place and how often it was sent."""

    folder: Path
    does: Callable[[int, Call], JobState] = lambda sent, call: call() or JobState.COMPLETED  # type: ignore[func-returns-value]
    refuses: list[Exception] = field(default_factory=list)
    known: dict[Task, JobState] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    """How many parts each time."""

    def submit(self, name: str, calls: Sequence[Call]) -> str:
        if self.refuses:
            raise self.refuses.pop(0)
        self.sent.append(len(calls))
        for index, call in enumerate(calls):
            self.known[Task(name, index)] = self.does(len(self.sent), call)
        return "job 7"

    def states(self, names: Collection[str]) -> Mapping[Task, Seen]:
        (self.folder / "log").touch()
        return {task: Seen(state, "7", self.folder / "log") for task, state in self.known.items() if task.name in names}

    def cancelling(self, names: Collection[str]) -> str:
        return "scancel"


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    found = StudyFolder(tmp_path / "study")
    with found.locked():
        pass
    return found


def same(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Bit for bit, but for what a clock measured."""
    words = [repr([unclocked(run) for run in found]) for found in (runs, others)]
    return words[0] == words[1]


def test_processes_find_what_this_one_finds_also_after_a_kill(folder: StudyFolder) -> None:
    """Same runs, JSON and order; what was there when the command was stopped is neither run nor written again."""
    said: list[str] = []
    site = Processes(folder.jobs)
    waits = replace(QUICK, late_s=20.0)

    def stop(progress: RunProgress) -> None:
        if progress.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), folder.locked():
        Study(PLAN, folder, site, said.append, waits).run(stop)
    assert "4 parts sent as 4 processes" in said[0]
    assert "still wait or run; the same command goes on with them. To cancel them: kill ones-study-" in said[-1]
    there = {path: path.stat().st_mtime_ns for path in (folder.root / "results").glob("*.json")}
    assert there

    seen: dict[tuple[str, int], RunProgress] = {}
    with folder.locked():
        study = Study(PLAN, folder, site, said.append, waits)
        assert study.left < 4
        runs = study.run(lambda progress: seen.update({(progress.policy, progress.seed): progress}))
    assert len(site.jobs) == 4, "each part was one job"
    assert there == {path: path.stat().st_mtime_ns for path in there}
    here = run_all(PLAN, 1)
    assert same(runs, here)
    jsons = [json.dumps(as_json(PLAN, summarize(PLAN, found), found)["jobs"]) for found in (runs, here)]
    assert jsons[0] == jsons[1]
    assert all(progress.finished for progress in seen.values())
    with folder.locked():
        assert Study(PLAN, folder, site, said.append, waits).left == 0


def test_a_job_that_dies_is_repeated_a_few_times(folder: StudyFolder) -> None:
    """Its log is named each time; the others go on, and a new command tries again."""
    said: list[str] = []

    def dies(sent: int, call: Call) -> JobState:
        part = {p.key: p for p in parts_of(SMALL)}[call.args[1]]  # type: ignore[attr-defined]
        if part.policy == STRICT and sent <= TRIES:
            return JobState.FAILED
        call()
        return JobState.COMPLETED

    site = Fake(folder.root, dies)
    good, bad = Study(SMALL, folder, site, said.append, QUICK).run(lambda progress: None)
    assert good.outcome is not None and bad.outcome is None
    assert "ended without a result (FAILED); log: " in bad.error and str(folder.root / "log") in bad.error
    assert site.sent == [2, 1, 1] and len([line for line in said if "sent again, try" in line]) == TRIES - 1
    _, mended = Study(SMALL, folder, site, said.append, QUICK).run(lambda progress: None)
    assert site.sent == [2, 1, 1, 1] and mended.outcome is not None


@pytest.mark.parametrize(("state", "named"), [("TIMEOUT", "--time="), ("OUT_OF_MEMORY", "--mem="), ("CANCELLED", "")])
def test_what_would_end_the_same_way_is_not_repeated(folder: StudyFolder, state: str, named: str) -> None:
    """A job that ran into a limit says which option gives it more."""
    site = Fake(folder.root, lambda sent, call: JobState(state))
    runs = Study(SMALL, folder, site, lambda line: None, QUICK).run(lambda progress: None)
    assert site.sent == [2] and all(named in run.error and state in run.error for run in runs)


def test_a_waiting_task_that_is_gone_was_cancelled(folder: StudyFolder) -> None:
    """Of an array's waiting tasks Slurm forgets those that are cancelled; sending them again would help nobody."""
    said: list[str] = []

    class Forgetful(Fake):
        def states(self, names: Collection[str]) -> Mapping[Task, Seen]:
            found = super().states(names)
            self.known.clear()
            return found

    site = Forgetful(folder.root, lambda sent, call: JobState.PENDING)
    runs = Study(SMALL, folder, site, said.append, QUICK).run(lambda progress: None)
    assert site.sent == [2] and all("somebody cancelled it; Slurm knows job 7 no more" in run.error for run in runs)


def test_a_crash_is_a_result_of_this_command_alone(folder: StudyFolder, crashing: PolicySpec) -> None:
    """As where it runs in this process, with its log named; it is not repeated, but the next command tries again."""
    plan = replace(SMALL, policies=(FIFO, crashing))
    said: list[str] = []
    site = Fake(folder.root)
    for times in (1, 2):
        runs = Study(plan, folder, site, said.append, QUICK).run(lambda progress: None)
        assert same(runs[:1], run_all(plan, 1)[:1]) and runs[1] == run_all(plan, 1)[1]
        assert Crashing.name in runs[1].policy and "ZeroDivisionError" in runs[1].error
        assert len(site.sent) == times
    assert site.sent == [2, 1]


def test_damaged_and_foreign_results_are_not_believed(folder: StudyFolder) -> None:
    """Half a file, a changed figure and another part's result are run again."""
    site = Fake(folder.root)
    runs = Study(SMALL, folder, site, lambda line: None, QUICK).run(lambda progress: None)
    first, second = parts_of(SMALL)
    path = folder.root / "results" / f"{first.key}.json"
    whole = path.read_text()
    other = (folder.root / "results" / f"{second.key}.json").read_text()
    for text, why in ((whole[:1000], "checksum"), (whole.replace("1", "2"), "checksum"), (other, "another part's")):
        path.write_text(text)
        with pytest.raises(BadResult, match=why):
            folder.result(first)
        again = Study(SMALL, folder, site, lambda line: None, QUICK).run(lambda progress: None)
        assert same(again, runs)
    assert site.sent == [2, 1, 1, 1]


def test_a_result_that_cannot_be_read_now_is_kept(folder: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects hours of a cluster from a file server that does not answer for a moment."""
    site = Fake(folder.root)
    Study(SMALL, folder, site, lambda line: None, QUICK).run(lambda progress: None)
    first, _ = parts_of(SMALL)

    def fails(path: Path, **options: object) -> str:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", fails)
        assert folder.result(first) is None
    assert folder.result(first) is not None


def test_what_has_changed_is_run_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result's name follows from seed, options, settings, files and code; its place among others does not matter."""
    one = {part.key for part in parts_of(SMALL)}
    assert one < {part.key for part in parts_of(replace(PLAN, policies=(STRICT, FIFO)))}
    for plan in (replace(SMALL, interval_s=30.0), replace(SMALL, nodes=5), replace(SMALL, seeds=(1,))):
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
    monkeypatch.setattr(parts_module, "_code", lambda: "other code")
    with pytest.raises(RuntimeError, match="another version"):
        run_part(SMALL, sent.key, tmp_path)


def test_jobs_of_a_killed_command_are_found_by_name(folder: StudyFolder) -> None:
    """Those that wait or run are not sent a second time; those of which Slurm knows nothing are."""
    first, second = parts_of(SMALL)
    folder.put_sent("ones-study-1", [second, first])
    folder.put_sent("ones-study-2", [first])
    site = Fake(folder.root, known={Task("ones-study-1", 0): JobState.PENDING})
    said: list[str] = []
    study = Study(SMALL, folder, site, said.append, QUICK)
    assert "0 of 2 runs were done before, 1 wait or run as jobs, 1 are sent now" in said[0]
    run_part(SMALL, second.key, folder.root)
    assert same(study.run(lambda progress: None), run_all(SMALL, 1)) and site.sent == [1]


def test_refusals(folder: StudyFolder) -> None:
    """Fewer at a time are tried; what Slurm takes none of ends the command; an answer that is lost is looked for."""
    site = Fake(folder.root, refuses=[Refused("too many")])
    Study(SMALL, folder, site, lambda line: None, QUICK).run(lambda progress: None)
    assert site.sent == [1, 1]
    plan = replace(SMALL, interval_s=30.0)
    site = Fake(folder.root, refuses=[Refused("invalid partition")] * 2)
    with pytest.raises(Refused, match="invalid partition"):
        Study(plan, folder, site, lambda line: None, QUICK).run(lambda progress: None)
    said: list[str] = []
    site = Fake(folder.root, refuses=[Unreachable("no answer")])
    Study(plan, folder, site, said.append, QUICK).run(lambda progress: None)
    assert site.sent == [2] and "no answer; looking whether" in said[0]


def test_one_command_at_a_time(folder: StudyFolder, tmp_path: Path) -> None:
    """The second says so. Locks are those of processes, so the first is another one."""
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
    with pytest.raises(BadInput, match=r"others may write .*chmod go-w"), folder.locked():
        pass
    (folder.root / place).chmod(0o755)
    with folder.locked():
        pass
    monkeypatch.setattr(parts_module.os, "geteuid", lambda: folder.root.stat().st_uid + 1)
    with pytest.raises(BadInput, match="belongs to uid"), folder.locked():
        pass


def test_a_late_result_is_not_sent_for_again(folder: StudyFolder) -> None:
    """It comes after its job was given up, while the site takes no others."""
    first, second = parts_of(SMALL)
    parts = {part.key: part for part in (first, second)}
    lost: list[Call] = []

    class Late(Fake):
        def submit(self, name: str, calls: Sequence[Call]) -> str:
            if len(self.sent) == 1 and lost:
                lost.pop()()
                raise Refused("not now")
            return super().submit(name, calls)

    def dies(sent: int, call: Call) -> JobState:
        if parts[call.args[1]] == second and sent == 1:  # type: ignore[attr-defined]
            lost.append(call)
            return JobState.FAILED
        return JobState.RUNNING

    site = Late(folder.root, dies)
    seen: list[RunProgress] = []

    def on_progress(progress: RunProgress) -> None:
        seen.append(progress)
        if progress.finished:
            run_part(SMALL, first.key, folder.root)

    runs = Study(SMALL, folder, site, lambda line: None, QUICK).run(on_progress)
    assert all(run.outcome is not None for run in runs) and site.sent == [2]


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
    site = SlurmSite(tmp_path / "jobs", {})
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert site.states({"x"}) == {}
    with pytest.raises(Unreachable, match="taken"):
        site.submit("x", [print])
    lines = said.read_text().splitlines()
    assert f"--user={user} " in lines[0] and lines[0].endswith(" none") and lines[1] == "sbatch none"
    assert f"--user={user} " in site.cancelling({"x"})


def test_options_of_sbatch() -> None:
    """Long and short ones, with and without `=`; none that a study's jobs need as they are."""
    found = parse_sbatch("--partition=cpu -t 2:00:00 -Aproject --exclusive --mem 4G --constraint='a|b'")
    assert found == {
        "partition": "cpu", "time": "2:00:00", "account": "project", "exclusive": True, "mem": "4G",
        "constraint": "a|b",
    }  # fmt: skip
    assert parse_sbatch("") == {} and parse_sbatch("--wait-all-nodes=1") == {"wait-all-nodes": "1"}
    for wrong, named in (
        ("--quiet", "--quiet is the study's own"),
        ("--comment=ones:", "--comment is the study's own"), ("-J name", "-J"), ("cpu", "'cpu' is no option"),
        ("--time=", "no value"), ("--qos='a\nb'", "no value"), ("'", "No closing quotation"),
        ("--array=1-3", "--array is the study's own"), ("--commen=ones:gpus=1-4", "--comment, which .* --commen for"),
        ("--wra=true", "--wrap, which"), ("--elastic-g=1-4", "--elastic-gpus, which"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=named):
            parse_sbatch(wrong)
