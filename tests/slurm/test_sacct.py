"""What `sacct` prints, of each release, and rows that are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db import AccountingJob
from slurm_ones.jobs.past_jobs import PastJobs
from slurm_ones.slurm.client import Refused, SlurmMissing, Unreachable
from slurm_ones.slurm.sacct import (
    ENDS,
    FIELDS,
    LONGEST,
    AccountingRow,
    BadRow,
    Rejected,
    Sacct,
    gpus_of,
    parse_row,
    parse_rows,
)
from tests.slurm.test_command import fake

SEPARATOR = "|1f2e3d4c|"
GOOD = {
    "JobIDRaw": "7",
    "JobID": "7",
    "Cluster": "here",
    "Submit": "1000",
    "Start": "1010",
    "End": "1500",
    "State": "COMPLETED",
    "ExitCode": "0:0",
    "NNodes": "2",
    "AllocTRES": "billing=8,cpu=8,gres/gpu:a100=8,gres/gpu=8,mem=1G,node=2",
    "ReqTRES": "billing=2,cpu=2,gres/gpu=4,node=1",
    "NodeList": "n[1-2]",
    "TimelimitRaw": "60",
    "User": "alice",
    "Account": "lab",
    "Partition": "gpu",
}


def line(name: str = "train", comment: str = "", **other: str) -> bytes:
    """A row as 22.05 prints it."""
    return (SEPARATOR.join([*(GOOD | other).values(), comment, name]) + "\n").encode("utf-8", "surrogatepass")


def parsed(*lines: bytes, cluster: str = "here") -> list[AccountingRow | Rejected]:
    return list(parse_rows(lines, SEPARATOR, cluster, restarts=False))


def good(*lines: bytes) -> list[AccountingRow]:
    found = parsed(*lines)
    assert all(isinstance(row, AccountingRow) for row in found), found
    return [row for row in found if isinstance(row, AccountingRow)]


def jobs(*lines: bytes, until: float = 1e12) -> list[AccountingJob]:
    return PastJobs().take(good(*lines), until)


def test_a_row() -> None:
    """Protects every field, and GPUs from being counted twice where their type is named too."""
    assert good(line()) == [
        AccountingRow(
            job_id=7,
            restart=None,
            submit=1000.0,
            start=1010.0,
            end=1500.0,
            state="COMPLETED",
            exit_code=0,
            nodes=2,
            gpus=8,
            requested_nodes=1,
            requested_gpus=4,
            node_list="n[1-2]",
            time_limit_s=3600.0,
            user="alice",
            account="lab",
            partition="gpu",
            name="train",
        )
    ]
    assert gpus_of("gres/gpu:a100=2,gres/gpu:h100=3") == 5 and gpus_of("cpu=4,gres/gpumem=9") == 0


def test_states_and_exit_codes() -> None:
    """Protects who cancelled it, and signals, from spoiling a state and a code."""
    cancelled, killed = good(line(State="CANCELLED by 2001"), line(State="FAILED", ExitCode="0:9"))
    assert (cancelled.state, cancelled.live, killed.exit_code) == ("CANCELLED", False, 137)


def test_a_job_that_never_ran() -> None:
    """Protects from a run where a job was cancelled while it waited: some releases give it a start all the same."""
    one = jobs(line(State="CANCELLED by 0", Start="1500", NodeList="None assigned", AllocTRES="", NNodes="1"))
    assert one[0].runs == () and one[0].job.state == "CANCELLED"


def test_requeued_runs_are_one_job() -> None:
    """Protects a job's first submission, what it asked for, and each of its runs with its own shape and end."""
    (job,) = jobs(
        line(State="NODE_FAIL", Submit="2000", Start="2100", End="2200", NNodes="1", AllocTRES="gres/gpu=4,node=1"),
        line(State="REQUEUED", End="1999"),
        line(Submit="2200", Start="2300", End="2400"),
    )
    assert (job.job.submit_time, job.job.end_time, job.job.restart, job.job.state) == (1000, 2400, 2, "COMPLETED")
    assert [(r.restart, r.start_time, r.end_time, r.end_reason) for r in job.runs] == [
        (0, 1010, 1999, "REQUEUED"),
        (1, 2100, 2200, "NODE_FAIL"),
        (2, 2300, 2400, "COMPLETED"),
    ]
    assert (str(job.runs[0].shape), job.runs[0].node_list) == ("2x4", ("n1", "n2"))


def test_a_job_id_that_is_used_again() -> None:
    """Protects two jobs with one id from becoming one: another user's, and one that came much later."""
    found = jobs(
        line(),
        line(User="bob", Submit="1600", Start="1600", End="1700"),
        line(User="bob", Submit="900000", Start="900001", End="900002"),
    )
    assert [(job.job.user, job.job.submit_time, len(job.runs)) for job in found] == [
        ("alice", 1000, 1),
        ("bob", 1600, 1),
        ("bob", 900000, 1),
    ]


def test_spans_one_after_the_other() -> None:
    """Protects a job that is told of in several spans: it counts once, in the one in which it ended, with all runs."""
    past = PastJobs()
    first = good(line(State="REQUEUED", End="1400"), line(Submit="1400", Start="1450", End="3000"))
    assert past.take(first, until=2000.0) == [] and past.open == 1
    (job,) = past.take(good(line(Submit="1400", Start="1450", End="3000")), until=4000.0)
    assert (len(job.runs), job.job.end_time, past.open) == (2, 3000.0, 0)
    assert past.take(good(line(State="REQUEUED", Submit="5000", Start="5001", End="5002")), until=9e9) == []
    assert past.open == 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("JobIDRaw", "7_[1-3]", "no number"),
        ("JobIDRaw", "9" * 40, "too large"),
        ("JobIDRaw", "-1", "no number"),
        ("JobIDRaw", "٣", "no number"),
        ("Cluster", "elsewhere", "of cluster 'elsewhere'"),
        ("Submit", "Unknown", "no submission time"),
        ("Submit", "2026-11-21T12:00:00", "no number"),
        ("End", "1005", "out of order"),
        ("Start", "nan", "no number"),
        ("End", "1e999", "no number"),
        ("State", "", "none"),
        ("ExitCode", "0:x", "no number"),
        ("AllocTRES", "gres/gpu=99999999999999999999", "too large"),
        ("NNodes", "99999999999999999999999", "too large"),
    ],
)
def test_bad_rows_say_why(field: str, value: str, why: str) -> None:
    """Protects the rest: the row is named with the reason, and those around it are read."""
    before, bad, after = parsed(line(), line(**{field: value}), line(JobIDRaw="8"))
    assert isinstance(bad, Rejected) and why in bad.why and bad.row == 2
    assert isinstance(before, AccountingRow) and isinstance(after, AccountingRow)


def test_lines_that_are_no_rows() -> None:
    """Protects from half a row: too few fields, too many, and the last one cut off."""
    short = SEPARATOR.join(list(GOOD.values())[:4]).encode() + b"\n"
    few, many, fine, cut = parsed(short, line(f"a{SEPARATOR}b"), line(), line()[:-1])
    assert isinstance(few, Rejected) and "fields" in few.why
    assert isinstance(many, Rejected) and "fields" in many.why
    assert isinstance(fine, AccountingRow)
    assert isinstance(cut, Rejected) and (cut.row, cut.why) == (4, "it is cut off")


def test_names_cannot_forge_rows() -> None:
    """Protects other users' records from a job named after a row: the separator is of the call alone."""
    forged = "x\n" + "|".join([*(GOOD | {"JobIDRaw": "8", "User": "bob"}).values(), "mine"])
    one, two = good(*line(forged).splitlines(keepends=True), line(JobIDRaw="9"))
    assert (one.name, one.user, two.job_id) == (forged, "alice", 9)


def test_comments_cannot_forge_rows() -> None:
    """Protects the same of comments: of several lines, of one that looks like a row, and of one without an end."""
    row = "|".join([*(GOOD | {"JobIDRaw": "8", "User": "bob"}).values(), "", "mine"])
    for comment in ("two\nlines", f"\n{row}\n", "\n\n", row):
        lines = line("a\nname", comment).splitlines(keepends=True)
        one, two = good(*lines, line(JobIDRaw="9"))
        assert (one.comment, one.name, one.user, two.job_id) == (comment, "a\nname", "alice", 9)
    cut = line("x", "begins\nends").splitlines(keepends=True)[0]
    bad, fine = parsed(cut, line())
    assert isinstance(bad, Rejected) and "no end" in bad.why and isinstance(fine, AccountingRow)


def test_gpus_of_unequal_nodes_are_not_rounded_up() -> None:
    """As of --gpus=3 on two nodes: GPU-hours are those of three."""
    tres = "gres/gpu=3,node=2"
    (one,) = PastJobs().take(good(line(AllocTRES=tres, ReqTRES=tres)), 2000.0)
    assert (one.runs[0].shape.gpus, one.job.requested_shape.gpus) == (3, 3)


BLOCKS = "ones: gpus=1-16 array=blocks"


def block(raw: int, shown: str, start: int, end: int, nodes: int = 1, gpus: int = 1, **other: str) -> bytes:
    ran = {"Start": str(start), "NodeList": f"n[1-{nodes}]", "AllocTRES": f"gres/gpu={gpus},node={nodes}"}
    ran = ran if start else {"Start": "None", "NodeList": "None assigned", "AllocTRES": "", "State": "CANCELLED by 0"}
    asked = f"gres/gpu={gpus},node={nodes}"
    shape = {"JobIDRaw": str(raw), "JobID": shown, "End": str(end), "NNodes": str(nodes), "ReqTRES": asked}
    return line(**{"comment": BLOCKS, **shape, **ran, **other})


def test_the_tasks_of_an_array_of_blocks_are_one_job() -> None:
    """Protects its time from being counted twice where blocks ran together, and its GPU-seconds from being lost: 100 s
    with one GPU, 50 s of them with four more, which one block gave twice."""
    rows = [
        block(41, "40_0", 1000, 1100),
        block(42, "40_3", 1020, 1050, nodes=2, gpus=4),
        block(42, "40_3", 1070, 1090, gpus=4, Submit="1060", NodeList="n4"),
        block(40, "40_[1-2,5]", 0, 1101, gpus=1),
    ]
    for order in (rows, rows[::-1]):
        (found,) = jobs(*order)
        assert (found.job.job_id, found.job.submit_time, found.job.end_time, found.job.state) == (
            40,
            1000.0,
            1101.0,
            "COMPLETED",
        )
        assert (str(found.job.requested_shape), found.job.restart) == ("1x1", 4)
        assert [(r.restart, r.start_time, r.end_time, str(r.shape)) for r in found.runs] == [
            (0, 1000.0, 1020.0, "1x1"),
            (1, 1020.0, 1050.0, "1x5"),
            (2, 1050.0, 1070.0, "1x1"),
            (3, 1070.0, 1090.0, "1x5"),
            (4, 1090.0, 1100.0, "1x1"),
        ]
        assert found.runs[3].node_list == ("n1", "n4")


def test_a_sweep_stays_as_many_jobs_as_it_has_tasks() -> None:
    """Protects arrays whose comment says nothing of blocks, or cannot be understood, unless the array is known."""
    for comment in ("", "ones: gpus=1-4", "ones: array=blocks nonsense", "array=blocks"):
        rows = [block(41, "40_0", 1000, 1100, comment=comment), block(42, "40_1", 1000, 1100, comment=comment)]
        assert [found.job.job_id for found in jobs(*rows)] == [41, 42], comment
    # The last task that starts has the array's own id.
    (last,) = jobs(
        block(40, "40_2", 1000, 1100, comment="", State="REQUEUED"),
        block(40, "40_2", 1200, 1300, Submit="1100", comment=""),
    )
    assert (last.job.job_id, last.job.restart, [run.start_time for run in last.runs]) == (40, 1, [1000, 1200])
    known = PastJobs(lambda array: array == 40).take(good(*rows), 1e12)
    assert [found.job.job_id for found in known] == [40]


def test_a_job_of_blocks_waits_for_its_requeued_block() -> None:
    """Protects it from ending with the block that ended first."""
    past = PastJobs()
    rows = [block(41, "40_0", 1000, 1100, State="REQUEUED"), block(42, "40_1", 1000, 1200)]
    assert past.take(good(*rows), until=1e12) == [] and past.open == 1
    (found,) = past.take(good(block(41, "40_0", 1300, 1400, Submit="1100")), until=1e12)
    assert [(r.start_time, r.end_time) for r in found.runs] == [(1000, 1100), (1100, 1200), (1300, 1400)]


def test_odd_names() -> None:
    """Protects from bytes that are no text, control characters, and names without an end."""
    assert good(line("größe 🧪\x1b[2J\r\t"))[0].name == "größe 🧪\x1b[2J\r\t"
    assert good(line().replace(b"train", b"\xff\xfe\0"))[0].name == "\ufffd\ufffd\\0"
    assert good(line("a" * 10), *[b"b" * 1000 + b"\n"] * 200)[0].name.count("b") <= LONGEST + 1000


@given(st.lists(st.binary(max_size=80) | st.just(SEPARATOR.encode()) | st.just(line()), max_size=12))
def test_any_bytes(pieces: Sequence[bytes]) -> None:
    """Protects the import from whatever comes out of the pipe: rows or reasons, no exception, no row made up."""
    data = b"".join(pieces)
    found = parsed(*data.splitlines(keepends=True))
    rows = [row for row in found if isinstance(row, AccountingRow)]
    assert all(row.submit <= (row.start or row.submit) and row.job_id >= 0 for row in rows)
    PastJobs().take(rows, until=1e18)


TEXT = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12)
ODD = (
    TEXT
    | st.integers().map(str)
    | st.sampled_from(["Unknown", "None", "n[1-99999999]", "n[1-9]r[1-99999]m[1-99999]", "["])
)


@given(st.lists(ODD, min_size=len(FIELDS) + 3, max_size=len(FIELDS) + 3), st.sets(st.integers(0, len(FIELDS) + 2)))
def test_any_fields(odd: list[str], where: set[int]) -> None:
    """Protects from any text in any field: a row that a database can store, or a reason."""
    fields = [*GOOD.values(), "", "", "train"]
    for place in where:
        fields[place] = odd[place]
    try:
        row = parse_row(fields, "here")
    except BadRow as error:
        assert str(error)
        return
    for number in (row.job_id, row.nodes, row.gpus, row.exit_code, row.requested_nodes, row.requested_gpus):
        assert 0 <= number < 2**63
    assert row.end is None or row.end >= row.submit
    for job in PastJobs().take([row], until=1e18):
        assert all(run.shape.gpus_per_node >= 0 and len(run.node_list) in (0, run.shape.nodes) for run in job.runs)


def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, fields: Sequence[str] = FIELDS) -> None:
    """Put a `sacct` on the PATH that knows these fields and otherwise does as the script says."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    fake(folder, "sacct", f'if [ "$1" = --helpformat ]; then echo "{" ".join(fields)}"; exit; fi\n{script}')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_release_that_tells_the_restart_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the restart count of newer releases, and that older ones are not asked for it."""
    sacct(tmp_path, monkeypatch, "printf '%s\\n' \"$@\"")
    assert "Restarts" not in " ".join(Sacct().command(0.0, 60.0, "|x|"))
    sacct(tmp_path, monkeypatch, "", [*FIELDS, "Restarts"])
    *_, fields, states, since, until, cluster = Sacct("c").command(0.0, 60.0, "|x|")
    assert "Restarts" in fields and states == f"--state={ENDS}"
    assert (since, until, cluster) == ("--starttime=uts0", "--endtime=uts60", "--clusters=c")


def test_commands_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from accounting that is not there passing for one without jobs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="sacct"):
        Sacct()
    sacct(tmp_path, monkeypatch, "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(Refused, match="storage is disabled"):
        list(Sacct().rows(0.0, 1.0))
    fake(tmp_path / "bin", "sacct", "echo JobID")
    with pytest.raises(Refused, match="does not have JobIDRaw"):
        Sacct()


def test_a_command_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from an import that never ends, and from taking what came until then for all."""
    sacct(tmp_path, monkeypatch, "echo half; exec sleep 60")
    slow = Sacct()
    monkeypatch.setattr("slurm_ones.slurm.sacct.TIMEOUT_S", 0.5)  # of the rows alone
    with pytest.raises(Unreachable, match=r"within 0|within 1"):
        list(slow.rows(0.0, 1.0))
