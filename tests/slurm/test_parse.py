"""Reading what Slurm prints: every release's way to write a thing, and nonsense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_db.shape import Shape
from slurm_ones.slurm import command, fields, parse
from slurm_ones.slurm.model import (
    JobState,
    Node,
    Partition,
    Quota,
    Quotas,
    Reservation,
    SlurmJob,
    Snapshot,
    Task,
    fewest_switches,
    longest_run_s,
)
from tests.slurm.make import DATA, PENDING, recorded_jobs
from tests.slurm.sites import Site

RELEASES = ["22.05", "26.05"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


def captured(release: str) -> dict[str, SlurmJob]:
    """Jobs as `squeue --json` of that release printed them, by name."""
    return {job.name: job for job in parse.parse_jobs({"jobs": recorded_jobs(release)}).values()}


def records(release: str, kind: str) -> str:
    """Records of nodes, partitions or reservations as `scontrol -o` of that release printed them."""
    lines = (DATA / f"scontrol-{release}.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith(kind))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "fields", "values"),
    [
        # It asks for 3 nodes, though 22.05 goes on naming the 2 that it ran on.
        ("waits", "nodes gpus_per_node tasks task_counts", (3, 1, 3, False)),
        ("waits", "state held admin_held restart", (JobState.PENDING, True, False, 1)),
        ("waits", "user uid comment", ("alice", 2001, "ones: gpus=1-16 batch=256")),
        ("waits", "node_list start_time end_time time_limit_s", ((), 0.0, 0.0, 86400.0)),
        ("runs", "running nodes gpus_per_node gpus_total node_list", (True, 2, 3, 6, ("n1", "n2"))),
        ("runs", "batch array requeue exit_code", (True, False, True, 0)),
        ("runs", "start_time considered", (pytest.approx(1.8e9, abs=1e8),) * 2),
        # 22.05 writes a wait status (1792 for 7), 26.05 an object.
        ("fails", "state ended exit_code", (JobState.FAILED, True, 7)),
    ],
)
def test_jobs_as_captured(release: str, name: str, fields: str, values: tuple[Any, ...]) -> None:
    """A job that was requeued and reshaped, one that runs, and one that failed; 22.05 shows no line of submission."""
    job = captured(release)[name]
    assert tuple(getattr(job, field) for field in fields.split()) == values
    assert bool(job.submit_line) == (release != "22.05")


@pytest.mark.parametrize("release", RELEASES)
def test_an_array_as_captured(release: str) -> None:
    """Task 0 runs, task 3 waits at a shape of its own, and the others wait in one record; the throttle is in each."""
    jobs = parse.parse_jobs({"jobs": recorded_jobs(release)}).values()
    tasks = {job.array_tasks: job for job in jobs if job.name == "blocks"}
    assert tasks.keys() == {(0,), (1, 2, 4, 5, 6), (3,)}
    assert {(job.array, job.throttle, job.array_id) for job in tasks.values()} == {(True, 1, 27)}
    together, first, third = tasks[1, 2, 4, 5, 6], tasks[0,], tasks[3,]
    assert (together.job_id, together.key, together.held, together.pending) == (27, 27, True, True)
    assert (first.key, first.running, first.held, first.nodes) == (Task(27, 0), True, False, 1)
    assert (third.key, third.held, third.nodes, third.gpus_per_node) == (Task(27, 3), True, 2, 2)
    apart = command.apart(tasks.values(), 27)
    assert sorted(str(job.key) for job in apart) == [f"27_{task}" for task in range(7)]


@pytest.mark.parametrize("release", RELEASES)
def test_nodes_partitions_and_reservations_as_captured(release: str) -> None:
    """GPUs in use, whole nodes, times in seconds."""
    nodes = parse.parse_nodes(records(release, "NodeName"))
    assert {n.name: (n.gpus, n.gpus_used, n.idle, n.usable) for n in nodes.values() if n.name != "n3"} == {
        "n1": (4, 3, False, True),
        "w1": (0, 0, True, True),
    }
    partitions = parse.parse_partitions(records(release, "PartitionName"))
    assert {p.name: (p.whole_nodes, p.default, p.max_time_s, p.up) for p in partitions.values()} == {
        "gpu": (False, True, 86400.0, True),
        "whole": (True, False, 86400.0, True),
    }
    (maint,) = parse.parse_reservations(records(release, "ReservationName"))
    assert (maint.name, maint.node_names, maint.end_time - maint.start_time) == ("maint", ("n3", "n4"), 600.0)
    assert maint.flags == {"SPEC_NODES"}


def test_the_next_reservation() -> None:
    """The first to come on any of the nodes; one that began is over when its nodes are usable again."""
    soon, later = Reservation("soon", ("n1",), 200.0, 300.0), Reservation("later", ("n1", "n2"), 250.0, 0.0)
    seen = Snapshot(100.0, {}, {}, {}, (later, soon, Reservation("now", ("n1", "n2"), 50.0, 150.0)))
    found = [seen.next_reservation(names, own) for names, own in ((("n1", "n2"), ""), (("n1",), "soon"), (("n2",), ""))]
    assert found == [soon, later, later]
    assert seen.next_reservation(("n2",), "later") is seen.next_reservation(("n3",)) is None
    assert seen.next_reservation(("n1", "n2"), "later,soon") is None


def test_leaf_switches_and_blocks() -> None:
    """Of a tree the switches above no other, as 22.05 and 26.05 print them; of blocks those that are made of no others.
    Without a topology nothing is printed."""
    tree = """SwitchName=s1 Level=0 LinkSpeed=100 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]
"""
    assert parse.parse_topology(tree) == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    blocks = """BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4
"""
    assert parse.parse_topology(blocks) == {"n1": "b1", "n2": "b1", "n3": "b2", "n4": "b2"}
    assert parse.parse_topology("") == {}


def test_fewest_switches_of_a_shape() -> None:
    """Those that most usable nodes are below come first; one switch for all is no topology."""
    partition = Partition("gpu", True, ("n1", "n2", "n3", "n4"), 0.0, 0, False)

    def snapshot(leaves: Sequence[str], usable: Sequence[bool] = (True,) * 4) -> Snapshot:
        nodes = {
            f"n{i + 1}": Node(f"n{i + 1}", "IDLE", good, 4, 0, ("gpu",), True, leaf=leaf)
            for i, (leaf, good) in enumerate(zip(leaves, usable, strict=True))
        }
        return Snapshot(0.0, {}, nodes, {"gpu": partition})

    two = snapshot(["s1", "s1", "s2", "s2"])
    assert [fewest_switches(two, "gpu", n) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 0]
    assert fewest_switches(snapshot(["s1", "s1", "s2", "s2"], [False, True, False, True]), "gpu", 2) == 2
    assert fewest_switches(snapshot(["s1"] * 4), "gpu", 2) == fewest_switches(snapshot([""] * 4), "gpu", 2) == 0
    assert fewest_switches(two, "other", 1) == 0


def test_a_reserved_node_is_unusable_while_the_reservation_lasts() -> None:
    """Active means between its start and its end."""
    (maint,) = parse.parse_reservations(records("26.05", "ReservationName"))
    nodes = parse.parse_nodes(records("26.05", "NodeName"))
    nodes["n3"] = replace(nodes["n3"], usable=True)

    def usable(now: float) -> bool:
        return parse.nodes_of(nodes, {}, [maint], now)["n3"].usable

    assert [usable(maint.start_time + at) for at in (-1, 0, 599, 600)] == [True, False, False, True]


def test_the_larger_count_of_used_gpus_is_believed() -> None:
    """Slurm's own figure of a node and the sum over its jobs may differ; free GPUs must be free by both."""
    nodes = parse.parse_nodes(records("26.05", "NodeName"))
    runs = captured("26.05")["runs"]
    elsewhere = {"n1": replace(nodes["n1"], gpus_used=0), "n2": replace(nodes["n1"], name="n2", gpus_used=4)}
    found = parse.nodes_of(elsewhere, {runs.job_id: runs}, (), 0.0)
    assert {name: node.gpus_used for name, node in found.items()} == {"n1": 3, "n2": 4}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        (7.9, 7),
        ({"set": True, "infinite": False, "number": 7}, 7),
        ({"set": False, "infinite": False, "number": 7}, -1),
        ({"set": True, "infinite": True, "number": 7}, -1),
        ({"number": 7}, 7),
        (0xFFFFFFFE, -1),
        (0xFFFFFFFF, -1),
        (4294901760, 4294901760),
        ({"set": True, "infinite": False, "number": 0xFFFFFFFE}, -1),
        (None, -1),
        ("7", -1),
        (True, -1),
        (float("nan"), -1),
        (float("inf"), -1),
        ([], -1),
    ],
)
def test_numbers_in_every_form(value: Any, number: int) -> None:
    """Plain, as {set, infinite, number}, and Slurm's NO_VAL and INFINITE; priorities near 2**32 are numbers."""
    assert fields.number(value, -1) == number


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("gpu:4", 4, ""),
        ("gres:gpu:4", 4, ""),
        ("gres/gpu:4", 4, ""),
        ("gres/gpu=4", 4, ""),
        ("gpu:3(IDX:0-2)", 3, ""),
        ("gpu:0", 0, ""),
        # A node's GPUs in use, where the site gives them no type.
        ("gpu:(null):8(IDX:0-7)", 8, ""),
        ("gpu:(null):0(IDX:N/A)", 0, ""),
        ("cpu=4,mem=8G,node=1,gres/gpu=2", 2, ""),
        ("(null)", 0, ""),
        ("", 0, ""),
        (None, 0, ""),
        ("fpga:2", 0, ""),
        ("vgpu:2", 0, ""),
        ("gres/gpumem:40G", 0, ""),
        # `--gres=gpu` is one.
        ("gpu", 1, ""),
        ("gres:gpu", 1, ""),
        ("gres/gpu:a100", 1, "a100"),
        ("gres/gpu,gres/nvme:2", 1, ""),
        ("gres/gpu:a100:4", 4, "a100"),
        ("gres/gpu:a100=2", 2, "a100"),
        ("gpu:v100:8(S:0-1)", 8, "v100"),
        # Though a type may begin with a digit.
        ("gres:gpu:2080ti:2", 2, "2080ti"),
        ("gpu:a100:2,gpu:v100:1", 3, "a100,v100"),
        ("gpu:a100:2,gpu:1", 3, ",a100"),
        ("gpu:a b:2", 2, "a b"),
    ],
)
def test_gpus_and_their_types_in_every_form(text: str | None, count: int, kind: str) -> None:
    """GRES and TRES, with types, sockets and indices; several types are all named."""
    assert (fields.gpus(text), fields.gpu_kind(text)) == (count, kind)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("gres/gpu:4,gres/nvme:100", "nvme:100"),
        ("gres:tmp:fast:2,gres:gpu:a100:4,gres:nvme", "tmp:fast:2,nvme"),
        ("gpu,vgpu:2", "vgpu:2"),
        ("gres/gpu:4", ""),
        ("gres/gpu", ""),
        ("N/A", ""),
        ("(null)", ""),
        ("", ""),
    ],
)
def test_what_a_job_asks_for_besides_gpus(text: str, others: str) -> None:
    assert fields.other_gres(text) == others


@pytest.mark.parametrize(
    ("names", "held", "state", "flags"),
    [
        (["RUNNING"], False, JobState.RUNNING, set()),
        (["PENDING", "COMPLETING"], True, JobState.PENDING, {"COMPLETING"}),
        (["COMPLETING"], True, JobState.PENDING, {"COMPLETING"}),
        (["COMPLETING"], False, JobState.UNKNOWN, {"COMPLETING"}),
        (["RUNNING", "CONFIGURING"], False, JobState.RUNNING, {"CONFIGURING"}),
        (["REQUEUE_HOLD"], True, JobState.PENDING, {"REQUEUE_HOLD"}),
        (["RESV_DEL_HOLD"], True, JobState.PENDING, {"RESV_DEL_HOLD"}),
        (["CONFIGURING"], False, JobState.RUNNING, {"CONFIGURING"}),
        (["OUT_OF_MEMORY"], False, JobState.OUT_OF_MEMORY, set()),
        (["FROM_THE_FUTURE"], False, JobState.UNKNOWN, {"FROM_THE_FUTURE"}),
        ([], False, JobState.UNKNOWN, set()),
    ],
)
def test_states(names: list[str], held: bool, state: JobState, flags: set[str]) -> None:
    """A held job that completes is being requeued; names nobody knows are flags, not errors."""
    assert parse.state_of(tuple(names), held=held) == (state, frozenset(flags))


ASSOCIATIONS = """Current Association Manager state
Association Records
ClusterName=c Account=root UserName= Partition= ParentAccount= GrpTRES=cpu=N(1),gres/gpu=N(2) MaxTRESPJ= Comment=(null)
ClusterName=c Account=lab UserName= Partition= ParentAccount=root(1) GrpTRES=cpu=40(1),gres/gpu=12(2) MaxTRESPJ=
ClusterName=c Account=lab UserName=alice(2001) Partition= ParentAccount= GrpTRES=cpu=N(1) MaxTRESPJ=gres/gpu=4
ClusterName=c Account=lab UserName=alice(2001) Partition=long ParentAccount= GrpTRES=cpu=7(0) MaxTRESPJ=
QOS Records
QOS=normal(1) GrpTRES=cpu=N(1) MaxTRESPJ= PreemptMode=OFF Account Limits= lab={MaxJobsPA=N(1) MaxTRESPA=cpu=9(1)} @
QOS=guest(2) GrpTRES=mem=N(0),gres/gpu=8(0) MaxTRESPJ= Account Limits=No Accounts User Limits=No Users
""".replace(
    "@", "User Limits= alice(2001)={MaxJobsPU=N(1) MaxTRESPU=cpu=N(1),gres/gpu=6(2) MaxTRESRunMinsPU=cpu=N(1440)}"
)


def test_quotas() -> None:
    """As 26.05 prints them, shortened; each binds the jobs of its account, of all below it, or of its QOS."""
    found = parse.parse_quotas(ASSOCIATIONS)
    lab, job = Quota("gres/gpu", 12, 2, account="lab"), replace(PENDING, account="lab", qos="normal")
    own = Quota("gres/gpu", 4, account="lab", user="alice", per_job=True)
    per_user = Quota("gres/gpu", 6, 2, qos="normal", user="alice")
    cpus = (Quota("cpu", 40, 1, account="lab"), Quota("cpu", 9, 1, qos="normal", account="lab"))
    guests = Quota("gres/gpu", 8, qos="guest")
    long = Quota("cpu", 7, account="lab", user="alice", partition="long")
    assert {*found.all} == {lab, own, per_user, *cpus, guests, long}
    assert found.parents == {"root": "", "lab": "root"}
    assert found.modes == {"normal": "off", "guest": ""}
    assert {*found.of(job)} == {lab, own, per_user, *cpus}
    assert {*found.of(replace(job, partitions=("long",)))} == {lab, long, per_user, *cpus}
    # A quota of the QOS takes the place of the account's.
    assert {*found.of(replace(job, user="bob", qos="guest"))} == {cpus[0], guests}
    assert {*found.of(replace(job, user="bob", account="other"), "guest")} == {guests}
    below = Quotas(found.all, {**found.parents, "team": "lab", "loop": "loop"})
    assert {*below.of(replace(job, account="team"))} == {lab, per_user, cpus[0]}
    assert below.of(replace(job, account="loop", qos="")) == ()
    assert (below.above("team"), below.above("loop"), below.above("")) == ({"lab", "root"}, {"loop"}, set())
    # Without accounting.
    assert parse.parse_quotas("No associations currently cached in Slurm.\n\n") == Quotas()


@pytest.mark.parametrize(
    ("shown", "enforced"),
    [("associations,limits,qos", True), ("associations,safe", True), ("associations", False), ("none", False)],
)
def test_limits_that_are_figures_alone(shown: str, enforced: bool) -> None:
    assert parse.enforces_limits({"AccountingStorageEnforce": shown}) is enforced
    assert parse.enforces_limits({}) is True


def test_usage_factors() -> None:
    assert parse.parse_usage_factors("normal|1.000000\nguest|0.000000\nodd|\n|1\nx|y|0.5\n") == {
        "normal": 1.0,
        "guest": 0.0,
        "x|y": 0.5,
    }


@pytest.mark.parametrize(
    ("used", "shape", "max_time_s", "own", "most_s"),
    [
        ((0, 0, 0), Shape(1, 1), 0.0, "", math.inf),
        ((0, 0, 0), Shape(2, 1), 0.0, "", 200.0),
        ((0, 0, 0), Shape(3, 1), 0.0, "", 100.0),
        ((0, 0, 4), Shape(1, 1), 0.0, "", 200.0),
        ((0, 4, 4), Shape(1, 1), 0.0, "", 100.0),
        ((0, 4, 4), Shape(1, 1), 0.0, "soon", 150.0),
        ((4, 4, 4), Shape(1, 1), 0.0, "", math.inf),
        ((0, 0, 3), Shape(1, 2), 0.0, "", 200.0),
        ((0, 0, 0), Shape(4, 1), 0.0, "", math.inf),
        ((0, 0, 0), Shape(1, 1), 60.0, "", 60.0),
    ],
)
def test_the_longest_time_limit_that_may_start(
    used: tuple[int, ...], shape: Shape, max_time_s: float, own: str, most_s: float
) -> None:
    """Of three nodes of 4 GPUs one is reserved soon and later, one later, and one never."""
    nodes = {f"n{i}": Node(f"n{i}", "", True, 4, n, ("gpu",), not n) for i, n in enumerate(used, 1)}
    soon, later = Reservation("soon", ("n1",), 1100.0, 0.0), Reservation("later", ("n2",), 1200.0, 0.0)
    third = Reservation("third", ("n1",), 1150.0, 0.0)
    partition = Partition("gpu", True, tuple(nodes), max_time_s, 0, False)
    seen = Snapshot(1000.0, {}, nodes, {"gpu": partition}, (later, third, soon))
    assert longest_run_s(seen, "gpu", shape, own) == most_s
    assert longest_run_s(seen, "other", shape, own) == math.inf


LIMITED = {"AssocGrpGRES", "QOSMaxGRESPerUser", "MaxGRESPerAccount", "MaxCpuRunMinsPerUser", "ReqNodeNotAvail, May"}


@pytest.mark.parametrize("reason", [*sorted(LIMITED), "Resources", "Priority", "Licenses", "JobArrayTaskLimit", "None"])
def test_a_job_waits_for_a_limit(reason: str) -> None:
    """By all of Slurm's words: a changed job is then given its old shape at the next look, not after minutes."""
    assert replace(PENDING, reason=reason).limited == (reason in LIMITED)


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "RESIZING", "SPECIAL_EXIT"])
def test_what_is_not_the_end_of_a_job(state: str) -> None:
    """Such a job comes back."""
    entry = {"job_id": 1, "job_state": [state, "FAILED"]}
    job = parse.parse_jobs({"jobs": [entry]})[1]
    assert not job.ended or state == "RESIZING"


USABLE = "IDLE MIXED ALLOCATED IDLE+COMPLETING IDLE+PLANNED"
UNUSABLE = """IDLE* DOWN DOWN*+DRAIN IDLE+DRAIN MIXED+DRAINING IDLE+MAINTENANCE IDLE+RESERVED IDLE+POWERED_DOWN FAIL
UNKNOWN IDLE+INVALID_REG IDLE+NOT_RESPONDING IDLE+REBOOT_REQUESTED"""


@pytest.mark.parametrize("state", [*USABLE.split(), *UNUSABLE.split()])
def test_node_states(state: str) -> None:
    """No shape may be planned on a node that takes no jobs."""
    assert parse.usable(state) is (state in USABLE.split())


def test_a_silent_controller_is_no_empty_queue() -> None:
    """22.05 ends with status 0 and no jobs: only the errors tell."""
    error = {"description": "Failed while looking for jobs", "error_number": -1, "error": "Unspecified error"}
    assert "Failed while looking for jobs" in parse.json_fault({"errors": [error], "jobs": []})
    assert parse.json_fault({"errors": [], "jobs": []}) == ""
    assert parse.json_fault(None) == ""


@given(st.dictionaries(st.sampled_from(sorted(recorded_jobs("26.05")[0])), JSON))
def test_no_job_stops_a_tick(entry: dict[str, Any]) -> None:
    """Whatever a release writes into a field, the snapshot is read."""
    for job in parse.parse_jobs({"jobs": [entry, "nonsense"]}).values():
        assert isinstance(job, SlurmJob)


@given(st.text())
def test_no_record_stops_a_tick(text: str) -> None:
    """Nor does any text that Slurm prints."""
    parse.parse_nodes(text)
    parse.parse_partitions(text)
    parse.parse_reservations(text)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_shape_reads_back(nodes: int, gpus: int) -> None:
    """`parse` is the inverse of `str`."""
    assert Shape.parse(str(Shape(nodes, gpus))) == Shape(nodes, gpus)


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        ({"TaskPlugin": "task/cgroup,task/affinity", "ConstrainDevices": "yes"}, True),
        ({"TaskPlugin": "task/cgroup", "ConstrainDevices": "no"}, False),
        ({"taskplugin": "cgroup,affinity", "constraindevices": "YES"}, True),
        # cgroup.conf may say so for nothing.
        ({"TaskPlugin": "task/affinity", "ConstrainDevices": "yes"}, False),
        ({"TaskPlugin": "(null)"}, False),
        ({"TaskPlugin": "task/none"}, False),
        ({"TaskPlugin": "task/cgroup"}, None),
        ({"TaskPlugin": "task/cgroup", "ConstrainDevices": "?"}, None),
        ({"ConstrainDevices": "yes"}, True),
        ({}, None),
    ],
)
def test_whether_gpus_of_others_are_hidden(config: dict[str, str], hidden: bool | None) -> None:
    """What is not shown is not guessed."""
    assert parse.hides_gpus(config) is hidden


@pytest.mark.parametrize(
    ("size", "allowed"), [("1001", True), ("2", True), ("1", False), ("0", False), ("", True), ("UNLIMITED", True)]
)
def test_whether_arrays_are_allowed(size: str, allowed: bool) -> None:
    """A site bans them by MaxArraySize."""
    assert parse.allows_arrays({"MaxArraySize": size} if size else {}) is allowed


@pytest.mark.cluster
def test_as_a_real_controller_shows_it(slurm: Site) -> None:
    """26.05 writes (null) and 22.05 task/none where there is no task plugin."""
    config = slurm.owner.config()
    assert (parse.hides_gpus(config), parse.allows_arrays(config)) == (False, True)
