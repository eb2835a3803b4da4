"""Whether the companion and a job find each other: files that are not there, and orders that would not be read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_wrapper.protocol import Hello, encode_report
from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.jobs.reports import TICKS, JobDirectories
from slurm_ones.slurm.model import JobState
from tests.act.make import changed
from tests.jobs.make import HELLO
from tests.slurm.make import job_of


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elastic:
    """It runs since 1000; this process may not write into its directory."""
    monkeypatch.setattr("slurm_ones.jobs.reports.foreign", lambda job: True)
    one = replace(job_of(Shape(1, 1)), uid=os.geteuid(), work_dir=str(tmp_path), restart=0)
    one = replace(one, state=JobState.RUNNING, start_time=1000.0)
    return Elastic(WholeJob.of(one), parse_comment("ones: gpus=1-4"), 4, False)


def refusal(places: JobDirectories, job: Elastic, *, read: bool = False) -> Reason | None:
    return places.refusal(job.job, read=read)


def report(job: Elastic, hello: Hello, restart: int = 0) -> Path:
    folder = Path(job.job.work_dir) / f"ones-{job.job.job_id}"
    folder.mkdir(exist_ok=True)
    (folder / f"reports-{restart}.jsonl").write_bytes(encode_report(1, 1000.0, hello))
    return folder


def test_a_job_whose_directory_is_not_found(job: Elastic, tmp_path: Path) -> None:
    """A reason with the path that was tried, not silence; nothing of a job that has just begun, or was read before."""
    places = JobDirectories(None)
    assert [refusal(places, job) for _ in range(TICKS)] == [None] * TICKS
    found = str(refusal(places, job))
    assert f"{tmp_path}/ones-{job.job.job_id}: no such directory" in found and "ONES_JOB_ROOT" in found
    assert refusal(places, job, read=True) is None
    assert refusal(places, changed(job, state=JobState.PENDING)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to somebody else takes root")
def test_a_pointer_to_somebody_elses_directory(job: Elastic, tmp_path: Path) -> None:
    (pointer := tmp_path / f"ones-{job.job.job_id}.where").write_text("/proc\n")
    os.chown(pointer, 12345, -1)
    job = changed(job, uid=12345)
    places = JobDirectories(None)
    assert "names no directory of the job's user" in str([refusal(places, job) for _ in range(TICKS + 1)][-1])


@pytest.mark.parametrize(
    ("directory", "spool", "refused"),
    [
        ("/ones-7", "", True),
        ("/ones-7", "/shared/other", True),
        ("/ones-7", "/shared/spool", False),
        ("/ones-7", "/shared//spool/", False),
        ("", "", False),  # of an older wrapper, which does not say
    ],
)
def test_a_job_that_does_not_read_the_spool(job: Elastic, directory: str, spool: str, refused: bool) -> None:
    """It would drain for minutes, again and again, for orders that it never sees."""
    report(job, replace(HELLO, directory=directory, spool=spool))
    found = refusal(JobDirectories(Path("/shared/spool")), job)
    assert (found is not None and found.code == "spool_not_read") is refused
    assert not refused or "ONES_SPOOL=/shared/spool" in str(found)
    assert refusal(JobDirectories(None), job) is None


def test_each_run_tells_anew(job: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits is judged by its last run, and a spool that was published since is seen at the next start."""
    places = JobDirectories(Path("/shared/spool"))
    assert refusal(places, job) is None  # it has not said anything yet
    folder = report(job, replace(HELLO, directory="/ones-7"))
    assert refusal(places, job) is not None
    again = changed(job, restart=1, state=JobState.PENDING)
    assert refusal(places, again) is not None
    report(job, replace(HELLO, directory="/ones-7", spool="/shared/spool"), restart=1)
    assert refusal(places, again) is None
    (folder / "reports-1.jsonl").unlink()
    assert refusal(places, again) is None  # looked up once a run
    monkeypatch.setattr("slurm_ones.jobs.reports.foreign", lambda job: False)
    assert refusal(places, job) is None
