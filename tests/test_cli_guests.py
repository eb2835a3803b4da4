"""`slurm-ones doctor --guests`: what a site lacks, as lines that can be copied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_ones.cli.guests import GuestSite, PreemptedQos, examine_guests
from slurm_ones.config import GuestSettings, Settings, parse
from slurm_ones.slurm.model import Partition, Quota, Quotas
from tests.cluster import Cluster
from tests.cluster.sites import GRES, OLD
from tests.conftest import start

NODES = ("n1", "n2")
GPU = Partition("gpu", True, NODES, 0.0, 0, False, default=True, tier=10, preempt_mode="OFF")
SCAVENGE = Partition("scavenge", True, NODES, 0.0, 0, False, tier=1, preempt_mode="CANCEL", grace_s=60.0)
CONFIG = {
    "PreemptType": "preempt/qos",
    "PreemptMode": "CANCEL",
    "PreemptParameters": "youngest_first,send_user_signal,reclaim_licenses",
    "PreemptExemptTime": "00:00:00",
    "MinJobAge": "300 sec",
}
QOS = {"normal": PreemptedQos("normal", 10, ("guest",)), "guest": PreemptedQos("guest", 0, (), "cancel", 60.0)}
BY_QOS = GuestSite(CONFIG, {"gpu": GPU}, QOS)
TIERS = {**CONFIG, "PreemptType": "preempt/partition_prio"}
BY_PARTITION = GuestSite(TIERS, {"gpu": GPU, "scavenge": SCAVENGE}, {})
OLDER = {name: value for name, value in TIERS.items() if name != "PreemptParameters"}
ON = Settings(guests={"gpu": GuestSettings(qos="guest", grace_s=60)})
LOW = Settings(guests={"gpu": GuestSettings(partition="scavenge")})


def lacking(site: GuestSite, settings: Settings = ON) -> tuple[set[str], set[str]]:
    """What is not ok, and the lines that are missing."""
    found = [f for f in examine_guests(site, settings) if f.verdict != "ok"]
    return {f"{f.verdict} {f.what}" for f in found}, {line for f in found for line in f.lines}


def test_a_site_that_has_all() -> None:
    """By QOS, and by partition; the old one has the words of SchedulerParameters."""
    assert lacking(BY_QOS) == lacking(BY_PARTITION, LOW) == (set(), set())
    parameters = "bf_max_job_test=9,preempt_youngest_first,preempt_send_user_signal"
    assert lacking(BY_PARTITION._replace(config={**OLDER, "SchedulerParameters": parameters}), LOW) == (set(), set())


@pytest.mark.parametrize(
    ("change", "what", "line"),
    [
        ({"PreemptType": "(null)"}, "bad PreemptType", "PreemptType=preempt/qos"),
        ({"PreemptType": "preempt/partition_prio"}, "bad PreemptType", "PreemptType=preempt/qos"),
        ({"PreemptMode": "OFF"}, "bad PreemptMode", "PreemptMode=CANCEL"),
        ({"PreemptMode": "GANG,SUSPEND"}, "bad PreemptMode", "PreemptMode=CANCEL"),
        (
            {"PreemptParameters": "min_exempt_priority=9,youngest_first"},
            "note PreemptParameters",
            "PreemptParameters=min_exempt_priority=9,youngest_first,send_user_signal,reclaim_licenses",
        ),
        ({"RequeueExit": "99"}, "note RequeueExit", ""),
        ({"PreemptExemptTime": "02:00:00"}, "note PreemptExemptTime", ""),
        ({"MinJobAge": "60 sec"}, "bad MinJobAge", "MinJobAge=300"),
    ],
)
def test_what_slurm_conf_lacks(change: dict[str, str], what: str, line: str) -> None:
    assert lacking(BY_QOS._replace(config={**CONFIG, **change})) == ({what}, {line} - {""})


def test_a_slurm_that_dies_of_preempt_parameters() -> None:
    """22.05 does not show them; there they are SchedulerParameters."""
    line = "SchedulerParameters=bf_interval=2,preempt_youngest_first,preempt_send_user_signal"
    site = BY_PARTITION._replace(config={**OLDER, "SchedulerParameters": "bf_interval=2"})
    assert lacking(site, LOW) == ({"note SchedulerParameters"}, {line})


@pytest.mark.parametrize(
    ("change", "what", "line"),
    [
        ({"preempts": ()}, "bad QOS normal", "sacctmgr -i modify qos normal set preempt+=guest"),
        ({"mode": "suspend"}, "bad QOS guest", "sacctmgr -i modify qos guest set preemptmode=cancel"),
        ({"mode": "requeue"}, "note QOS guest", ""),
        ({"grace_s": 0.0}, "note QOS guest", "sacctmgr -i modify qos guest set gracetime=60"),
        ({"exempt_s": 3600.0}, "note QOS guest", ""),
        ({"priority": 10}, "note QOS guest", "sacctmgr -i modify qos guest set priority=0"),
    ],
)
def test_what_the_qos_lack(change: dict[str, Any], what: str, line: str) -> None:
    name = what.split()[-1]
    site = BY_QOS._replace(qos={**QOS, name: QOS[name]._replace(**change)})
    assert lacking(site) == ({what}, {line} - {""})


@pytest.mark.parametrize(
    ("checkpoint", "grace_s", "wanted"),
    [(None, 60.0, 0), ((7, 59.0), 60.0, 0), ((7, 61.0), 60.0, 120), ((7, 500.0), 0.0, 780), ((7, 1.0), 0.0, 60)],
)
def test_the_grace_time_is_compared_with_checkpoints(
    checkpoint: tuple[int, float] | None, grace_s: float, wanted: int
) -> None:
    """The slowest one by which a job changed lately, by QOS and by partition, with the job's number."""
    of_qos = {**QOS, "guest": QOS["guest"]._replace(grace_s=grace_s)}
    by_qos = BY_QOS._replace(qos=of_qos, checkpoint=checkpoint)
    low = {"gpu": GPU, "scavenge": replace(SCAVENGE, grace_s=grace_s)}
    by_partition = BY_PARTITION._replace(partitions=low, checkpoint=checkpoint)
    line, word = f"sacctmgr -i modify qos guest set gracetime={wanted}", f"PartitionName=scavenge … GraceTime={wanted}"
    assert lacking(by_qos) == (({"note QOS guest"}, {line}) if wanted else (set(), set()))
    assert lacking(by_partition, LOW) == (({"note partition scavenge"}, {word}) if wanted else (set(), set()))
    if wanted:
        assert any("job 7" in finding.advice for finding in examine_guests(by_qos, ON))


def test_a_qos_that_is_not_there() -> None:
    what, lines = lacking(BY_QOS._replace(qos={"normal": QOS["normal"]}))
    assert what == {"bad QOS guest"} and "sacctmgr -i add qos guest" in lines
    assert lacking(BY_QOS._replace(qos={})) == ({"bad QOS guest"}, set())


@pytest.mark.parametrize(
    ("gpu", "scavenge", "what", "lines"),
    [
        (
            GPU,
            None,
            "bad partition scavenge",
            {"PartitionName=scavenge Nodes=n1,n2 PriorityTier=1 PreemptMode=CANCEL GraceTime=60"},
        ),
        (replace(GPU, tier=1), SCAVENGE, "bad partition scavenge", {"PartitionName=gpu … PriorityTier=10"}),
        (GPU, replace(SCAVENGE, node_names=("n1", "x1")), "bad partition scavenge", set()),
        (
            GPU,
            replace(SCAVENGE, preempt_mode="SUSPEND"),
            "bad partition scavenge",
            {"PartitionName=scavenge … PreemptMode=CANCEL"},
        ),
        (None, SCAVENGE, "bad partition gpu", set()),
    ],
)
def test_what_the_partitions_lack(
    gpu: Partition | None, scavenge: Partition | None, what: str, lines: set[str]
) -> None:
    partitions = {one.name: one for one in (gpu, scavenge) if one is not None}
    assert lacking(BY_PARTITION._replace(partitions=partitions), LOW) == ({what}, lines)


@pytest.mark.parametrize(
    ("debug", "mode", "what"),
    [
        ({}, "CANCEL", {"bad partition debug"}),
        ({"preempt_mode": "OFF"}, "CANCEL", set()),
        ({"preempt_mode": "OFF"}, "OFF", {"bad PreemptMode", "note partition debug"}),  # perhaps not its own word
        ({"node_names": ("x1",)}, "CANCEL", set()),
        ({"tier": 10}, "CANCEL", set()),
    ],
)
def test_a_partition_that_lends_nothing(debug: dict[str, Any], mode: str, what: set[str]) -> None:
    """Protects its jobs from being preempted by those of a partition that guests made higher."""
    other = replace(SCAVENGE, name="debug", **debug)
    site = BY_PARTITION._replace(config={**TIERS, "PreemptMode": mode})
    found, lines = lacking(site._replace(partitions={**site.partitions, "debug": other}), LOW)
    assert found == what
    assert ("PartitionName=debug … PreemptMode=OFF" in lines) == any("debug" in one for one in what)


def test_the_tier_that_is_asked_for_counts() -> None:
    """A partition that is level today would be below once the lines are followed."""
    partitions = {"gpu": replace(GPU, tier=1), "debug": replace(SCAVENGE, name="debug")}
    found, lines = lacking(BY_PARTITION._replace(partitions=partitions), LOW)
    assert found == {"bad partition scavenge", "bad partition debug"}
    assert {"PartitionName=gpu … PriorityTier=10", "PartitionName=debug … PreemptMode=OFF"} < lines


def test_two_queues_of_guests() -> None:
    """Neither QOS is to preempt the other: Slurm refuses a circle of them."""
    two = Settings(guests={"gpu": GuestSettings(qos="guest", grace_s=60), "old": GuestSettings(qos="spare")})
    spare = PreemptedQos("spare", 0, (), "cancel", 60.0)
    normal = QOS["normal"]._replace(preempts=("guest", "spare"))
    assert lacking(BY_QOS._replace(qos={"normal": normal, "guest": QOS["guest"], "spare": spare}), two) == (
        set(),
        set(),
    )


def test_the_guide_has_the_same_lines() -> None:
    text = (Path(__file__).parents[1] / "docs/guests.md").read_text()
    by_qos, by_partition = text.split("## By QOS")[1].split("## By partition")
    nothing = {"PreemptMode": "OFF", "MinJobAge": "300 sec"}
    normal = {"normal": PreemptedQos("normal")}
    _, lines = lacking(GuestSite({**nothing, "PreemptParameters": "(null)"}, {"gpu": GPU}, normal))
    assert {*written(by_qos, "ini"), *written(by_qos, "bash")} == lines
    _, lines = lacking(GuestSite(nothing, {"gpu": replace(GPU, tier=1)}, {}), LOW)
    assert {*written(by_partition.split("## ")[0], "ini")} == lines
    for part, settings in ((by_qos, ON), (by_partition, LOW)):
        (block,) = re.findall(r"```toml\n(.*?)```", part.split("\n## ")[0], re.DOTALL)
        assert parse(block).guests == settings.guests


def written(text: str, kind: str) -> list[str]:
    """Lines of the blocks of code of a kind."""
    return [line for block in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_the_account_of_guests() -> None:
    charged = Settings(guests={"gpu": GuestSettings(qos="guest", account="guests")})
    site = BY_QOS._replace(associations=frozenset({("lab", "alice"), ("lab", "bob"), ("guests", "alice")}))
    add = "sacctmgr -i add user bob account=guests"
    assert lacking(site, charged) == ({"note account guests"}, {add})
    assert lacking(site._replace(associations=site.associations | {("guests", "bob")}), charged) == (set(), set())
    nobody = site._replace(associations=frozenset({("lab", "bob")}))
    assert lacking(nobody, charged)[1] == {"sacctmgr -i add account guests", add}
    limited = BY_QOS._replace(quotas=Quotas((Quota("gres/gpu", 5, account="lab"), Quota("cpu", 5, qos="normal"))))
    assert lacking(limited) == ({"note account lab"}, set())
    assert lacking(limited, charged) == (set(), set())


def test_without_settings_the_recipe_is_checked() -> None:
    assert lacking(BY_QOS, Settings()) == ({"note settings"}, set())
    assert lacking(BY_PARTITION, Settings()) == ({"note settings"}, set())


@pytest.fixture(
    params=[
        pytest.param(OLD, marks=[pytest.mark.cluster, pytest.mark.nightly], id="old"),
        pytest.param(GRES, marks=[pytest.mark.cluster, pytest.mark.nightly], id="gres"),
    ]
)
def bare(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A real Slurm without preemption, for one test alone."""
    cluster = start(request, replace(request.param, name=f"{request.param.name}-bare", base=request.param.name))
    yield cluster
    cluster.stop()


def with_line(conf: str, line: str) -> str:
    """The line in place of the one for the same key; what follows dots stands at the end of that."""
    begins, dots, more = line.partition(" … ")
    key = begins if dots or " " in begins else begins.split("=")[0] + "="
    lines = conf.splitlines()
    old = [one for one in lines if one.startswith(key)]
    return "\n".join([*(one for one in lines if one not in old), f"{old[0]} {more}" if dots else line, ""])


def test_a_site_that_follows_it_preempts(bare: Cluster) -> None:
    """Every line goes where it says, and then nothing is bad and a guest makes room."""
    settings = '[guests.gpu]\nqos = "guest"\n' if bare.site.accounting else '[guests.gpu]\npartition = "scavenge"\n'
    (bare.scratch / "guests.toml").write_text(settings)
    program = str(Path(bare.python).with_name("slurm-ones"))

    def doctor() -> list[dict[str, Any]]:
        options = ["doctor", "--guests", "--json", "--config", "/scratch/guests.toml"]
        return json.loads(bare.run([program, *options], user="slurm", env={"HOME": "/tmp"}, check=False).stdout)

    conf = bare.root / "etc/slurm/slurm.conf"
    for line in (line for finding in doctor() for line in finding["lines"]):
        short = re.sub("(?i)gracetime=60", "gracetime=1", line)  # nobody here leaves before
        if line.startswith("sacctmgr"):
            bare.run(short.split(), user="root")
        else:
            conf.write_text(with_line(conf.read_text(), short))
    bare.kill_slurmctld()
    bare.start_slurmctld()
    bare.await_nodes()
    assert [finding for finding in doctor() if finding["verdict"] == "bad"] == []
    submit = ["sbatch", "--parsable", "--nodes=4", "--gres=gpu:4", "--cpus-per-gpu=1", "--output=/dev/null"]
    where = "--qos=guest" if bare.site.accounting else "--partition=scavenge"
    ask = ["squeue", "--noheader", "--format=%T", "--states=all", "--jobs"]

    def becomes(job: str, state: str) -> None:
        until = ["timeout", "60", "bash", "-c", f'until [ "$({" ".join(ask)} {job})" = {state} ]; do sleep 0.2; done']
        bare.run(until)

    guest = bare.run([*submit, where, "--wrap", "sleep 300"]).stdout.strip()
    becomes(guest, "RUNNING")
    rigid = bare.run([*submit, "--wrap", "sleep 300"], user="bob").stdout.strip()
    becomes(rigid, "RUNNING")
    becomes(guest, "PREEMPTED")
