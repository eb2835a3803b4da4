"""Reading what jobs report: a bad line costs itself alone, and nothing a job writes stops a tick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import ReportLine, RunReports
from ones_db.shape import Shape
from ones_wrapper.protocol import (
    MAX_LINE,
    Bye,
    Epoch,
    Hello,
    ProtocolError,
    Report,
    Spec,
    Throughput,
    decode_spec,
    encode,
    encode_report,
)
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.jobs.reports import LENGTHS, MAX_BYTES, SKEW_S, confirmed, last_measured, read_reports
from slurm_ones.slurm.model import JobState, SlurmJob
from slurm_ones.untrusted_files import job_directory
from tests.slurm.make import job_of

NOW = 2000.0
SPEC = Spec(32, 256, 64, 1000, 5)


def line(number: int, *, at: float = NOW, **changes: object) -> bytes:
    """A good report line, or one with other fields."""
    text = encode_report(number, at, Epoch(number, number, 1000, 0.5, 0.9))
    return json.dumps({**json.loads(text), **changes}).encode() + b"\n" if changes else text


Write = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path) -> SlurmJob:
    return replace(job_of(Shape(1, 1)), uid=os.geteuid(), work_dir=str(tmp_path), restart=0, submit_time=NOW - 10_000)


@pytest.fixture
def write(job: SlurmJob) -> Write:
    directory = job_directory(job)
    directory.mkdir()

    def append(*lines: bytes) -> Path:
        path = directory / "reports-0.jsonl"
        with path.open("ab") as file:
            file.write(b"".join(lines))
        return path

    return append


def read(job: SlurmJob, offset: int = 0, after: int = 0) -> tuple[RunReports, str]:
    return read_reports(WholeJob.of(job), 0, offset, after, now=NOW)


def numbers(piece: RunReports) -> list[int]:
    return [x.number for x in piece.lines]


def test_no_directory_yet(job: SlurmJob) -> None:
    """A job that has not started its wrapper is no news."""
    assert read(job) == (RunReports(job.job_id, 0, 0, 0, lines=[]), "")


def test_lines_and_spec(job: SlurmJob, write: Write) -> None:
    path = write(line(1), line(2))
    (job_directory(job) / "spec.json").write_bytes(encode(SPEC))
    piece, problem = read(job)
    assert (numbers(piece), piece.spec, problem) == ([1, 2], SPEC, "")
    assert piece.offset == path.stat().st_size
    write(line(3))
    assert numbers(read(job, piece.offset, 2)[0]) == [3]


def test_a_line_that_is_being_written_waits(job: SlurmJob, write: Write) -> None:
    """It is read when its newline is there, and not before, and not twice."""
    text = line(2)
    write(line(1), text[:20])
    piece, problem = read(job)
    assert (numbers(piece), problem) == ([1], "")
    write(text[20:])
    assert numbers(read(job, piece.offset, 1)[0]) == [2]


def test_a_spec_as_deep_as_can_be_parsed() -> None:
    """Protects everybody's tick: to complain of such a value may take more stack than to parse it did."""
    deepest = sys.getrecursionlimit()
    for n in range(deepest - 300, deepest):
        with pytest.raises(ProtocolError):
            decode_spec(b'{"limits": {"strategy": "x", "min_steps": ' + b"[" * n + b"]" * n + b"}}")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (line(2, kind="secret"), "kind: 'secret'"),
        (line(2, kind=["epoch"]), "kind:"),
        (line(2, n="2"), "n: '2' is not a number"),
        (line(2, n=2.5), "n: 2.5 is not an integer"),
        (line(2, n=True), "n: True"),
        (line(2, n=-1), "n: -1 is negative"),
        (line(2, samples=-5), "samples: -5 is negative"),
        (line(2, samples=10**30), "samples: 1000000"),
        (line(2, loss=float("nan")), "loss: nan is not finite"),
        (line(2, loss=float("inf")), "loss: inf is not finite"),
        (b'{"n":2,"t":1e999,"kind":"epoch"}\n', "t: inf"),
        (b'{"n":2,"t":' + b"9" * 5000 + b',"kind":"epoch"}\n', "not JSON"),
        (line(2, epoch=None), "epoch: None"),
        (b'{"n":2,"t":1,"kind":"epoch"}\n', "epoch: missing"),
        (line(2, at=NOW + 301), "is in the future"),
        (b"[1, 2]\n", "not a JSON object"),
        (b"\n", "not JSON"),
        (b"\xff\xfe\x00\n", "not JSON"),
        (b"[" * 10_000 + b"\n", "not JSON"),
        (line(2)[:25] + b"\n", "1 unreadable line, the first: not JSON"),  # of a crashed rank, or a full disk
        (line(2, kind="bye", reason="x" * 2000), "reason: not a text"),
        (b'{"n":2,"x":"' + b"a" * MAX_LINE + b'"}\n', f"longer than {MAX_LINE} bytes"),
        (line(1), "n: 1 is not above 1"),
    ],
)
def test_a_bad_line_is_named(job: SlurmJob, write: Write, bad: bytes, words: str) -> None:
    """Wrong kinds, numbers that are none, not finite, out of order, far too large: dropped, with the reason."""
    write(line(1), bad, line(3))
    piece, problem = read(job)
    assert numbers(piece) == [1, 3]
    assert words in problem


def test_a_report_from_the_future_was_made(job: SlurmJob, write: Write) -> None:
    """It is not believed, and counts as said: a job that talks is not waiting. A number that no job can have come to
    does not count."""
    write(line(1), line(2, at=NOW + 7200))
    piece, _ = read(job)
    assert (numbers(piece), piece.number) == ([1], 2)
    write(line(10**9, at=NOW + 7200), line(3))
    piece, _ = read(job, piece.offset, piece.number)
    assert (numbers(piece), piece.number) == ([3], 3)


def test_numbers_out_of_order(job: SlurmJob, write: Write) -> None:
    """What was believed once is not told again, in one look or over two."""
    write(line(1), line(5), line(3), line(5), line(6))
    piece, problem = read(job)
    assert numbers(piece) == [1, 5, 6]
    assert "2 unreadable lines, the first: n: 3 is not above 5" in problem
    write(line(6), line(7))
    assert numbers(read(job, piece.offset, 6)[0]) == [7]


def test_a_huge_line_is_stepped_over(job: SlurmJob, write: Write) -> None:
    write(b"x" * (MAX_BYTES + 10), b"\n", line(1))
    piece, _ = read(job)
    assert (len(piece.lines), piece.offset) == (0, MAX_BYTES)
    piece, _ = read(job, piece.offset)
    assert numbers(piece) == [1]


def test_a_file_that_shrank(job: SlurmJob, write: Write) -> None:
    """Somebody cut or replaced it: it is said, and nothing is read from its middle."""
    path = write(line(1), line(2))
    offset = read(job)[0].offset
    path.write_bytes(line(9))
    piece, problem = read(job, offset, 2)
    assert (len(piece.lines), piece.offset) == (0, offset)
    assert "shorter than before" in problem


TRAINED = Throughput(0, 10, 320, 320, 2.0, 32, 1.0, 2.0)


def of_run(job: SlurmJob, write: Write, *reports: tuple[float, Report]) -> tuple[RunReports, str]:
    """What is read of a run that began at 1000 and ended at 1900, by Slurm's clock."""
    write(*(encode_report(number, at, report) for number, (at, report) in enumerate(reports, 1)))
    return read(replace(job, state=JobState.FAILED, start_time=1000.0, end_time=1900.0))


@given(st.lists(st.tuples(st.integers(700, 2200), st.sampled_from([0.0, 0.5, 1.0])), max_size=30))
def test_an_honest_run_is_accepted_whatever_its_clock(reports: list[tuple[int, float]]) -> None:
    """Times within the run, by clocks that differ as they may, and lengths as long as they were measured in."""
    with TemporaryDirectory() as directory:
        mine = replace(job_of(Shape(1, 1)), uid=os.geteuid(), work_dir=directory, restart=0, submit_time=NOW - 10_000)
        job_directory(mine).mkdir()
        path = job_directory(mine) / "reports-0.jsonl"

        def write(*lines: bytes) -> Path:
            path.write_bytes(b"".join(lines))
            return path

        said = [(float(at), replace(TRAINED, seconds=share * LENGTHS * max(at - 1000, 0))) for at, share in reports]
        found, problem = of_run(mine, write, *said)
    assert problem == ""
    assert [(x.time, x.report) for x in found.lines] == said


@pytest.mark.parametrize(
    ("at", "report", "words"),
    [
        (600.0, TRAINED, "100 s before its run"),
        (2210.0, TRAINED, "10 s after its run"),
        (600.0, Epoch(0, 10, 1000), "100 s before its run"),
        (1100.0, replace(TRAINED, seconds=500.0), "500 s of training"),
    ],
)
def test_a_measurement_outside_its_run_is_dropped(
    job: SlurmJob, write: Write, at: float, report: Report, words: str
) -> None:
    """From before the run, from after its end, or of more seconds than it had lasted: it teaches nothing, and its owner
    reads why. The reports around it stay."""
    found, problem = of_run(job, write, (1100.0, TRAINED), (at, report), (1200.0, TRAINED))
    assert numbers(found) == [1, 3]
    assert (found.number, words in problem) == (3, True)
    assert problem.startswith("1 of its reports not believed")


def test_last_words_count_at_the_end_of_the_run(job: SlurmJob, write: Write) -> None:
    """A farewell that comes late by its node's clock is stored with the last time that the run can have."""
    found, _ = of_run(job, write, (2250.0, Bye("drained", 0)))
    assert [x.time for x in found.lines] == [1900.0 + SKEW_S]


HELLO = Hello(1, 4, 4, 32, 1.0, 32, 256, 1000, 10, 2, 600, 50, "")
BELIEVED = [
    pytest.param({}, {}, 320, id="as it is"),
    pytest.param({"samples": 335, "cursor": 935}, {}, 335, id="rounded batches"),
    pytest.param({"samples": 1280}, {}, 320, id="samples"),
    pytest.param({"samples": 1280, "batch": 128}, {}, 320, id="samples and batch"),
    pytest.param({"samples": 1280, "step": 90}, {}, 320, id="samples and steps"),
    pytest.param({"samples": 1280, "cursor": 1880}, {}, 320, id="samples and cursor"),
    pytest.param({"samples": 1280, "step": 50}, {}, 0, id="no step"),
    pytest.param({"samples": 1280, "step": 40, "epoch": 1}, {}, 0, id="steps back"),
    pytest.param({"samples": 1280, "step": 90, "epoch": 3, "cursor": 20}, {}, 420, id="in the next epoch"),
    pytest.param({"samples": 1280, "step": 90, "epoch": 3, "cursor": 20}, {"dataset": 0}, 1280, id="of a stream"),
]


@pytest.mark.parametrize(("changes", "of_spec", "samples"), BELIEVED)
def test_samples_count_as_far_as_steps_and_data_confirm_them(
    changes: dict[str, int], of_spec: dict[str, int], samples: int
) -> None:
    """Ten steps of 32 samples since a hello at step 50, sample 600 of an epoch of 1000, and what a liar makes of it."""
    true = {"epoch": 2, "step": 60, "cursor": 920, "samples": 320, "seconds": 5.0, "batch": 32, "lr_factor": 1.0}
    line_ = ReportLine(2, NOW, Throughput(**{**true, **changes}))
    spec = replace(SPEC, **{"dataset": 1000, **of_spec})
    together = RunReports(1, 0, 0, 2, spec, [ReportLine(1, NOW, HELLO), line_])
    for reports, before in ((together, None), (replace(together, lines=[line_]), HELLO)):
        found, problem = confirmed(reports, before)
        assert found.lines[-1].report.samples == samples
        assert bool(problem) == (samples != line_.report.samples)
        assert last_measured(found) == found.lines[-1].report
    unknown, problem = confirmed(replace(together, lines=[line_]), None)
    assert (unknown.lines, problem) == ([line_], "")
