"""Traces of real clusters: each format as its owners write it, what is odd in them, and what is broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.workloads import trace as limits
from slurm_ones.simulate.workloads.formats import read_sacct, read_trace
from slurm_ones.simulate.workloads.trace import Trace
from slurm_ones.slurm.sacct import FIELDS, AccountingRow, Rejected, Sacct, parse_row

SWF = """; UnixStartTime: 1700000000
; MaxNodes: 4
; MaxProcs: 16
 1 0 5 100 4 -1 -1 4 200 -1 1 1 1 -1 1 1 -1 -1
 2 10 -1 50 -1 -1 -1 2 -1 -1 1 1 1 -1 1 1 -1 -1
 3 20 0 0 4 -1 -1 4 60 -1 5 1 1 -1 1 1 -1 -1
 4 30 0 10 0 -1 -1 0 60 -1 1 1 1 -1 1 1 -1 -1
 5 5 1 10 1 -1 -1 1 60 -1 2 1 1 -1 1 1 -1 -1
 6 4 1 10 1 -1 -1 1 60 -1 0 1 1 -1 1 1 -1 -1
"""
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u1,v1,8,64,2,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:42:01,2020-06-09 19:42:01,3600,60
2,u2,v1,0,1,1,COMPLETED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0
3,u3,v1,1,1,1,CANCELLED,2020-06-09 18:40:00,,,0,0
4,u3,v1,1,1,1,FAILED,2020-06-09 18:40:00,2020-06-09 18:39:00,2020-06-09 18:59:00,0,0
5,u3,v1,1,1,1,FAILED,2020-06-09 18:40:00,2020-06-09 18:49:00,2020-06-09 18:48:00,0,0
"""
ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
7,u1,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-02-28 16:20:51+00:00,117,32,936.0
"""
CUT = """u_id,user,gpu_num,cpu_num,node_num,interval,run_time,wall_time,new_status
0,1,2,0,2,0,100,0,Pass
1,1,0,0,1,50,100,0,Pass
2,1,1,0,1,50,7,0,Killed
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
a,1,1,1,460,,LS,Succeeded,10,110,20
b,1,1,0,0,,LS,Running,10,110,20
c,1,1,8,1000,,LS,Pending,10,110,
"""
ATTEMPT = {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:09"}
PHILLY: list[dict[str, Any]] = [
    {"status": "Pass", "vc": "e", "jobid": "app_1", "submitted_time": "2017-10-07 01:11:39", "user": "c",
     "attempts": [
         {**ATTEMPT, "detail": [{"ip": "m1", "gpus": ["gpu0"]}]},
         {"start_time": "2017-10-07 02:00:00", "end_time": "2017-10-07 02:10:00",
          "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0", "gpu1"]}]}]},
    {"status": "Killed", "vc": "e", "jobid": "app_2", "submitted_time": "2017-10-07 01:00:00", "user": "c",
     "attempts": []},
    {"status": "Failed", "vc": "e", "jobid": "app_3", "submitted_time": "2017-10-07 01:00:00", "user": "c",
     "attempts": [{"start_time": "2017-10-07 02:00:00", "end_time": None, "detail": []}]},
]  # fmt: skip
SACCT = """JobIDRaw|JobID|Submit|Start|End|State|NNodes|AllocTRES|ReqTRES|TimelimitRaw|User|Partition
1|1|1700000000|1700000010|1700000110|COMPLETED|2|cpu=8,gres/gpu=8,node=2|gres/gpu=8,node=2|60|u|gpu
1.batch|1.batch|1700000000|1700000010|1700000110|COMPLETED|1|cpu=8,gres/gpu=8,node=2||||
2|2|1700000001|1700000020|1700000080|REQUEUED|1|gres/gpu=1,node=1|gres/gpu=1,node=1|UNLIMITED|u|gpu
2|2|1700000080|1700000200|1700000300|COMPLETED|1|gres/gpu=4,node=1|gres/gpu=1,node=1|UNLIMITED|u|gpu
3|3|1700000002|Unknown|1700000090|CANCELLED by 0|1||gres/gpu=1,node=1|60|u|gpu
4|4|1700000003|1700000004|1700000005|COMPLETED|1|cpu=1,node=1|cpu=1,node=1|60|u|cpu
5|5|1700000003|1700000004|Unknown|RUNNING|1|gres/gpu=1,node=1|gres/gpu=1,node=1|60|u|gpu
6|6|1700000009|1700000004|1700000008|COMPLETED|1|gres/gpu=1,node=1|gres/gpu=1,node=1|60|u|gpu
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:

    def reader(text: str, name: str = "trace", partition: str = "") -> Trace:
        path = tmp_path / name
        path.write_text(text)
        return read_trace(path, partition)

    return reader


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    """Its jobs, times counted from the first submission."""
    first = trace.jobs[0].submitted
    return [
        (job.name, job.submitted - first, None if job.started is None else job.started - first, *job[3:])
        for job in trace.jobs
    ]


def test_swf(read: Callable[..., Trace]) -> None:
    """Negative numbers are unknown, lines are put in order, and jobs without GPUs or length are counted apart."""
    found = read(SWF)
    assert rows(found) == [("1", 0, 5, 100, 4, 0, 200), ("6", 4, 5, 10, 1, 0, 60), ("2", 10, None, 50, 2, 0, 0)]
    assert dict(found.left_out) == {
        "never ran, or ended at once": 1, "no GPUs": 1, "part of a job that has a line of its own": 1
    }  # fmt: skip
    assert found.gpus_per_node == 4 and "processor" in found.notes[0]


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.swf.gz"
    path.write_bytes(gzip.compress(SWF.encode()))
    assert len(read_trace(path).jobs) == 3
    whole = gzip.compress(SWF.encode())
    for damaged in (whole[:-20], whole[:10] + bytes([whole[10] | 7]) + whole[11:]):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"x\.swf\.gz: cannot be read"):
            read_trace(path)


def test_helios_and_acme(read: Callable[..., Trace]) -> None:
    helios = read(HELIOS)
    assert (helios.format, rows(helios)) == ("Helios", [("1", 0, 60, 3600, 8, 2, 0)])
    assert dict(helios.left_out) == {
        "no GPUs": 1, "never ran, or ended at once": 1, "started before it was submitted": 1,
        "ended before it started": 1,
    }  # fmt: skip
    assert "trace: line 5: started before it was submitted" in helios.doubts
    own = read("gpus,submit_time,start_time,end_time,team\n4,100,160,2000,vision\n0,100,160,2000,vision\n")
    assert (own.format, rows(own), dict(own.left_out)) == ("CSV", [("2", 0, 60, 1840, 4, 0, 0)], {"no GPUs": 1})
    huge = read(f"gpus,submit_time,start_time,end_time,nodes\n4,0,0,9,2\n4,0,0,9,{10**50}\n")
    assert dict(huge.left_out) == {"more than 100,000 GPUs or nodes, or longer than ten years": 1}
    acme = read(ACME)
    assert (acme.format, rows(acme)) == ("Acme", [("7", 0, 32, 117, 8, 1, 0)])


def test_cut_and_pods(read: Callable[..., Trace]) -> None:
    """Gaps count those left out too; a part of a GPU is one, openly."""
    cut = read(CUT)
    assert rows(cut) == [("0", 0, None, 100, 2, 2, 0), ("2", 100, None, 7, 1, 1, 0)]
    pods = read(PODS)
    assert rows(pods) == [("a", 0, 10, 90, 1, 1, 0)]
    assert "1 pods used a part of a GPU" in pods.notes[0] and sum(count for _, count in pods.left_out) == 2


def test_philly(read: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts are one job. Read in small pieces too, in which a job never ends with one."""
    expected = [("app_1", 0, 30, 660, 4, 2, 0)]
    for indent, chunk in ((None, 1 << 16), (4, 7), (1, 1)):
        monkeypatch.setattr("slurm_ones.simulate.workloads.formats.CHUNK", chunk)
        found = read(json.dumps(PHILLY, indent=indent))
        assert rows(found) == expected
        assert dict(found.left_out) == {"never ran, or ended at once": 2}


def test_sacct(read: Callable[..., Trace]) -> None:
    """Steps are none, a requeued job is one, and rows that cannot be believed are named."""
    found = read(SACCT)
    assert rows(found) == [("1", 0, 10, 100, 8, 2, 3600), ("2", 1, 20, 160, 4, 1, 0)]
    assert dict(found.left_out) == {
        "a step, not a job": 1, "never ran, or ended at once": 1, "no GPUs": 1, "had not ended": 1,
        "an implausible row": 1,
    }  # fmt: skip
    assert "trace: line 9: its times are out of order" in found.doubts[0]
    with pytest.raises(BadInput, match="no job of it held GPUs"):
        read(SACCT, partition="cpu")


def test_no_run_counts_with_two_pieces_of_a_span() -> None:
    """sacct is asked for whole seconds, both ends of them included, however the span is named."""
    ends = [1_700_000_000 + i * 43_200 for i in range(5)]

    class Asked(Sacct):
        def __init__(self) -> None:
            pass

        def rows(self, since: float, until: float) -> Iterator[AccountingRow | Rejected]:
            for job, end in enumerate(ends, 1):
                if float(f"{since:.0f}") <= end <= float(f"{until:.0f}"):
                    fields = dict.fromkeys(FIELDS, "") | {
                        "JobIDRaw": f"{job}", "JobID": f"{job}", "Submit": f"{end - 100}", "Start": f"{end - 100}",
                        "End": f"{end}", "State": "COMPLETED", "NodeList": "n1", "AllocTRES": "gres/gpu=1",
                    }  # fmt: skip
                    yield parse_row([*fields.values(), "", "", ""], "")

    for part in (0.0, 0.4, 0.6):
        trace = read_sacct(Asked(), ends[0] + part, ends[-1] + part)
        assert [job.run_s for job in trace.jobs] == [100.0] * len(ends), part


def test_sacct_as_people_ask_for_it(read: Callable[..., Trace]) -> None:
    text = (
        "JobID|Submit|Start|End|State|AllocTRES|Timelimit|\n"
        "7_1|2026-01-31T08:00:00|2026-01-31T08:01:00|2026-01-31T09:01:00|COMPLETED|gres/gpu:a100=2|1-02:00:30|\n"
        "7_2|2026-01-31T08:00:00|2026-01-31T08:01:00|2026-01-31T09:01:00|TIMEOUT|gres/gpu:a100=2|UNLIMITED|\n"
    )
    found = read(text)
    assert [row[1:] for row in rows(found)] == [(0, 60, 3600, 2, 0, 93660), (0, 60, 3600, 2, 0, 0)]
    assert len({job.name for job in found.jobs}) == 2 and "no time zone" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "begins no known format of traces"),
        ("hello\n", "begins no known format of traces; known are: sacct"),
        (SWF + "1 2 3\n", "line 10: has 3 fields, not 18; a line of SWF has 18 numbers"),
        (SWF + "1 2 3 x" + " 1" * 14 + "\n", "line 10: run time: 'x' is not a number; correct or remove"),
        (SWF + "1 2 3 nan" + " 1" * 14 + "\n", "run time: 'nan' is not a number"),
        (HELIOS + "9,u\n", "line 7: has 2 fields, its header 12"),
        (HELIOS.replace("18:42:01", "18:99"), "line 2: start_time: '2020-06-09 18:99' is no date and time; write"),
        (HELIOS + '"9,u\n', "line 7: is no CSV"),
        (CUT + "3,1,1,0,1,-5,7,0,Pass\n", "line 5: interval: -5 is negative"),
        ("[", "line 1: the list has no end; is the file whole?"),
        ("{}", "line 1: does not begin with ["),
        ("[\n1]", "line 2: is no job of Philly"),
        (json.dumps(PHILLY)[:200], "line 1: is no JSON"),
        ("[" * 100_000, "nested too deeply|is no JSON|is no job"),
        (SACCT.replace("|State|", "|Zustand|"), "line 1: has no column State; write the file by: SLURM_TIME_FORMAT"),
        (SACCT + "7|a|b\n", "line 10: has 3 fields, its header 12; leave out free text such as JobName"),
        (SACCT.replace("|1700000110|COMPLETED|2", "|soon|COMPLETED|2"), "line 2: End: 'soon' is no date and time"),
        (SWF + "\0", "line 10: holds a zero byte"),
        (SWF + " " * 70_000, "line 10: is longer than 65536 bytes"),
        ("; nothing\n", "no job of it held GPUs"),
    ],
)
def test_broken_files(read: Callable[..., Trace], text: str, said: str) -> None:
    with pytest.raises(BadInput, match=r"trace") as error:
        read(text)
    assert any(one in str(error.value) for one in said.split("|"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder, nothing, a pipe that nobody writes; a partition where there is none."""
    import os

    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path, "no such file"), (tmp_path / "x", "no such file"), (tmp_path / "pipe", "regular")):
        with pytest.raises(BadInput, match=said):
            read_trace(path)
    (tmp_path / "x.swf").write_text(SWF)
    with pytest.raises(BadInput, match="--partition"):
        read_trace(tmp_path / "x.swf", "gpu")
    (tmp_path / "latin").write_bytes(b"job\xe4\n")
    with pytest.raises(BadInput, match="line 1: is not UTF-8"):
        read_trace(tmp_path / "latin")


def test_memory_is_bounded(read: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_JOBS", 1)
    monkeypatch.setattr("slurm_ones.simulate.workloads.formats.MOST_JOBS", 1)
    for text in (SWF, CUT, SACCT):
        with pytest.raises(BadInput, match="shorter span"):
            read(text)


SECOND = st.integers(0, 10**9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(
        st.tuples(SECOND, st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 512)), min_size=1, max_size=20
    )
)
def test_each_format_says_the_same(tmp_path: Path, jobs: list[tuple[int, int, int, int]]) -> None:
    """The same jobs written as SWF, as sacct's rows and as pods are read as the same."""
    swf, pods = ["; a comment"], [PODS.splitlines()[0]]
    sacct = [SACCT.splitlines()[0]]
    for i, (submit, wait, run, gpus) in enumerate(jobs, 1):
        begin, end = submit + wait, submit + wait + run
        swf.append(f"{i} {submit} {wait} {run} {gpus} -1 -1 {gpus} -1 -1 1 1 1 -1 1 1 -1 -1")
        pods.append(f"{i},1,1,{gpus},1000,,LS,Succeeded,{submit},{end},{begin}")
        tres = f"gres/gpu={gpus},node=1"
        sacct.append(f"{i}|{i}|{submit}|{begin}|{end}|COMPLETED|1|{tres}|{tres}|UNLIMITED|u|gpu")
    found = []
    for name, text in (("a.swf", swf), ("b.csv", pods), ("c.txt", sacct)):
        (tmp_path / name).write_text("\n".join(text) + "\n")
        found.append([job._replace(nodes=0) for job in read_trace(tmp_path / name).jobs])
    assert found[0] == found[1] == found[2]
