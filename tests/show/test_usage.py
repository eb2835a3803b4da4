"""`slurm-ones report`: figures of the database, advice that follows from them, and pages that no name can break."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store
from ones_db.reasons import reason
from slurm_ones.show.usage import (
    RULES,
    Allowed,
    JobUsage,
    Measured,
    Resized,
    SizeSpan,
    Usage,
    advice,
    allowed,
    gpus_over_time,
    of_job,
    of_jobs,
)
from tests.cluster import paths
from tests.commands import call, printed
from tests.db.make import job
from tests.db.test_accounting import past
from tests.db.test_views import fill, fill_blocks
from tests.test_cli import HOSTILE

PLAIN = JobUsage(
    7, "net", "alice", "lab", "gpu", "COMPLETED", 0.0, 8, 10.0, 1010.0, 1010.0, 10.0, 1000.0, 1, 8, 8, 2.2, 0, 0.0, 0.9
)


def measured(gpus: int, samples_per_s: float, batch: int = 256, **other: Any) -> Measured:
    values = {"gpu_efficiency": None, "statistical_efficiency": None, "goodput": None, "measured_s": 600.0} | other
    return Measured(1, gpus, batch, values.pop("measured_s"), samples_per_s, **values)


def requeued(pause_s: float, import_s: float = 1.0) -> Resized:
    return Resized(100.0, 4, 8, "done", "requeue", pause_s, import_s, "")


ADVICE = (
    (Usage(PLAIN, (measured(4, 500.0), measured(8, 540.0))), Allowed(), "_fewer"),
    (Usage(PLAIN, (measured(2, 200.0), measured(8, 700.0))), Allowed((2, 8)), "_more"),
    (
        Usage(PLAIN, (measured(4, 500.0), measured(8, 540.0), measured(8, 990.0, kind="h100", measured_s=90.0))),
        Allowed(), "_fewer",
    ),
    (
        Usage(PLAIN, (measured(8, 700.0, 512, statistical_efficiency=0.95, goodput=665.0),)), Allowed((1, 8), 512),
        "_batch",
    ),
    (Usage(replace(PLAIN, queueing_s=7200.0, running_s=600.0)), Allowed((8, 16)), "_waited"),
    (Usage(PLAIN, resized=(requeued(60.0), requeued(60.0))), Allowed(), "_pauses"),
    (Usage(PLAIN, resized=(requeued(1.0, 30.0), requeued(1.0, 20.0))), Allowed(), "_imports"),
    (Usage(replace(PLAIN, resizes=2), predicted_jct_s=700.0), Allowed(), "_repaid"),
)  # fmt: skip


@pytest.mark.parametrize(("usage", "may", "rule"), ADVICE)
def test_each_piece_of_advice_follows_from_one_rule(usage: Usage, may: Allowed, rule: str) -> None:
    """Protects users from advice out of nowhere; its words are in tests/golden."""
    assert [one.__name__ for one in RULES if one(usage, may) is not None] == [rule]
    assert {name for *_, name in ADVICE} == {one.__name__ for one in RULES}


@pytest.mark.parametrize(
    ("usage", "may"),
    [
        (Usage(PLAIN), Allowed((1, 8), 512)),
        (Usage(PLAIN, (measured(4, 300.0), measured(8, 540.0))), Allowed((1, 16))),  # 8 is worth it, and may have more
        (Usage(PLAIN, (measured(4, 500.0, measured_s=5.0), measured(8, 540.0))), Allowed()),  # measured too shortly
        (Usage(PLAIN, (measured(8, 700.0, 512, statistical_efficiency=0.4, goodput=280.0),)), Allowed((1, 8), 512)),
        (Usage(replace(PLAIN, queueing_s=7200.0, running_s=600.0)), Allowed((1, 16))),  # could not begin smaller
        (Usage(replace(PLAIN, queueing_s=7200.0, running_s=600.0)), Allowed((4, 16), step=4)),
        (Usage(replace(PLAIN, queueing_s=7200.0, running_s=600.0)), Allowed((4, 16), valid=frozenset({4, 8, 16}))),
        (Usage(PLAIN, (measured(2, 200.0), measured(8, 700.0))), Allowed((2, 8), valid=frozenset({2, 4, 8}))),
        (Usage(PLAIN, (measured(4, 530.0, 1024), measured(8, 540.0, 64))), Allowed()),  # throughput of other batches
        (Usage(PLAIN, (measured(4, 500.0), measured(8, 900.0, goodput=540.0))), Allowed()),  # goodput, and throughput
        (
            Usage(PLAIN, (measured(8, 700.0, 512, statistical_efficiency=0.95, goodput=665.0),)),
            Allowed((1, 8), 512, batch_fixed=True),
        ),
        (Usage(PLAIN, resized=(requeued(60.0), requeued(60.0))), Allowed(blocks=True)),
        (Usage(replace(PLAIN, resizes=2), predicted_jct_s=1200.0), Allowed()),
    ],
)
def test_no_advice_where_nothing_was_measured_or_all_is_well(usage: Usage, may: Allowed) -> None:
    assert advice(usage, may) == []


def test_gpus_over_time_are_drawn_to_scale() -> None:
    usage = Usage(PLAIN, stretches=(SizeSpan(0.0, 500.0, 2), SizeSpan(500.0, 500.0, 8)))
    assert gpus_over_time(usage, 10) == "▂▂▂▂▂█████"
    assert gpus_over_time(Usage(PLAIN)) == ""


@pytest.fixture
def url(empty_url: str) -> str:
    """The database of the views' tests, and a job of a hostile user."""
    url = empty_url
    with Store.open(url, "gres") as store:
        fill(store)
        fill_blocks(store)
        store.record_jobs([job(12, name=HOSTILE, user=HOSTILE, account="<script>")])
    return url


def test_a_job(url: str) -> None:
    told = call("report", "7", "--database", url).stdout
    assert "trained on 1 to 4" in told and "1 by requeue while it ran" in told and "measured" in told
    blocks = call("report", "10", "--database", url).stdout
    assert "by blocks" in blocks and "▂" in blocks
    (one,) = printed("report", "10", "--json", "--database", url)
    assert [stretch["gpus"] for stretch in one["gpus_over_time"]] == [1, 5, 4]
    (summed,) = [row for row in printed("report", "--json", "--database", url) if row["job"]["job_id"] == 10]
    assert summed["job"]["gpu_hours"] == one["job"]["gpu_hours"]


def test_imported_jobs_are_not_elastic(url: str) -> None:
    """Protects the sum of elastic jobs from a year of accounting; each is still shown by its id."""
    before = call("report", "--database", url).stdout.splitlines()[:3]
    with Store.open(url, "gres") as store:
        store.add_accounting([past(77, refusal=reason("accounting_only"))])
    assert call("report", "--database", url).stdout.splitlines()[:3] == before
    assert "Job 77 rigid" in call("report", "77", "--database", url).stdout


def test_the_median_of_two_waits() -> None:
    jobs = [Usage(replace(PLAIN, queueing_s=waited)) for waited in (10.0, 30.0)]
    assert "median 20 s, longest 30 s" in "\n".join(of_jobs(jobs, "All jobs"))


def test_jobs_of_a_user_and_a_span(url: str) -> None:
    assert {row["job"]["user_name"] for row in printed("report", "--json", "-u", "bob", "--database", url)} == {"bob"}
    span = printed("report", "--json", "--since", "1999-01-01", "--until", "1999-01-02", "--database", url)
    assert {row["job"]["job_id"] for row in span} == {8, 9, 12}  # the others had ended
    assert printed("report", "--json", "--until", "1969-01-01", "--database", url) == []
    text = call("report", "--database", url).stdout
    assert text.startswith("All jobs: 5 elastic jobs") and "user" in text
    done = call("report", "--since", "yesterday", "--database", url)
    assert done.exit_code == 2 and "yesterday" in done.stderr
    missing = call("report", "4711", "--database", url)
    assert missing.exit_code == 2 and "4711" in missing.stderr


def test_no_job(url: str) -> None:
    assert of_jobs([], "Jobs of eve") == ["Jobs of eve: no elastic job"]
    assert of_job(Usage(replace(PLAIN, running_s=None, gpu_hours=None, smallest_gpus=None, largest_gpus=None)), [])


def test_a_job_that_never_changed_has_no_gain() -> None:
    """Protects readers from a gain, or a loss, of what resizing did not touch."""
    same = Usage(PLAIN, resized=(requeued(1.0),), predicted_jct_s=800.0)
    changed = replace(same, job=replace(PLAIN, job_id=8, resizes=1), predicted_jct_s=2020.0)
    assert not [line for line in of_job(same, []) + of_jobs([same], "All") if line.startswith("  gain")]
    for lines in (of_job(changed, []), of_jobs([same, changed], "All")):
        (gain,) = [line for line in lines if line.startswith("  gain")]
        assert gain.endswith(": 2.00 times as fast")


def test_what_growth_cost() -> None:
    """Protects accounts: GPU hours next to those of the size that was asked for, of jobs that were resized."""
    resized = Usage(replace(PLAIN, resizes=1), resized=(requeued(1.0),), asked_gpu_hours=2.0)
    (cost,) = [line for line in of_job(resized, []) if line.startswith("  cost")]
    assert cost == "  cost       2.2 GPU hours in all, against 2.0 at the size asked for: 1.10 times as many"
    for other in (replace(resized, job=PLAIN), replace(resized, asked_gpu_hours=None)):
        assert not [line for line in of_job(other, []) if line.startswith("  cost")]


def test_what_a_comment_allows() -> None:
    assert allowed("ones: gpus=2-8 batch=32-512 array=blocks") == Allowed((2, 8), 512, True)
    assert allowed("ones: gpus=4-16:4 batch=64") == Allowed((4, 16), None, step=4)
    assert allowed("ones: gpus=x") == allowed("") == Allowed()


@pytest.mark.parametrize("works", [True, False])
def test_mail_goes_out_with_the_report_and_without(tmp_path: Path, works: bool) -> None:
    sent, called = tmp_path / "sent", tmp_path / "called"
    mailer, reporter = tmp_path / "mail", tmp_path / "reporter"
    mailer.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {sent}\ncat >> {sent}\n')
    reporter.write_text(f'#!/bin/sh\necho "$@" > {called}\n{"echo the report" if works else "exit 3"}\n')
    for file in (mailer, reporter):
        file.chmod(stat.S_IRWXU)
    hook = paths.REPOSITORY / "slurm_ones/service/units/slurm-ones-mail"
    environment = {**os.environ, "SLURM_ONES_MAILER": str(mailer), "SLURM_ONES": str(reporter)}
    subject = "Slurm Job_id=4711 Name=x; rm -rf / Ended, Run time 00:01:00, COMPLETED, ExitCode 0"
    subprocess.run(["sh", str(hook), "-s", subject, "alice"], env=environment, check=True, stdin=subprocess.DEVNULL)
    assert called.read_text() == "report 4711\n"
    assert sent.read_text() == f"-s|{subject}|alice|" + ("the report\n" if works else "")


def test_a_name_asks_for_no_other_jobs_report(tmp_path: Path) -> None:
    """Protects users from each other: what a mail reports on is the job that Slurm names, not one in a job's name."""
    called, hook = tmp_path / "called", paths.REPOSITORY / "slurm_ones/service/units/slurm-ones-mail"
    reporter = tmp_path / "reporter"
    reporter.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    reporter.chmod(stat.S_IRWXU)
    environment = {**os.environ, "SLURM_ONES_MAILER": "cat", "SLURM_ONES": str(reporter)}
    for subject in (
        "Slurm Job_id=4711 Name=Job_id=99 Ended, COMPLETED",
        "Slurm Job_id=4711 Name=x\nJob_id=99 Ended, COMPLETED",
        "Slurm Array Summary Job_id=4711_* (4711) Name=Job_id=99_1 Ended",
        "Slurm Name=Job_id=99 Ended",
    ):
        subprocess.run(["sh", str(hook), "-s", subject, "alice"], env=environment, check=False, capture_output=True)
    assert called.read_text() == "report 4711\n" * 3
