"""What blocks are to Slurm's fair share and priorities, with accounting: what plain jobs of their GPU time are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests import waiting
from tests.cluster import Cluster
from tests.endtoend.block_site import Site
from tests.endtoend.harness import LOOK_S, WAIT_S, Harness
from tests.endtoend.test_accounting import recorded

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
# A second of age counts 1000. Slurm takes stock once a minute, not more often.
MULTIFACTOR = """PriorityType=priority/multifactor
PriorityCalcPeriod=1
PriorityMaxAge=0-1
PriorityWeightAge=3600000
PriorityWeightFairshare=100000
"""
until = partial(waiting.until, within_s=75.0, look_s=LOOK_S)


@pytest.fixture
def site(gres: Cluster) -> Iterator[Site]:
    """The cluster, with priorities by age and by how many GPUs were used for how long."""
    if not gres.accounting:
        pytest.skip(f"no accounting: {gres.accounting_why}")
    conf = gres.root / "etc/slurm/slurm.conf"
    before = conf.read_text()
    lines = before.replace("PartitionName=gpu ", "PartitionName=gpu TRESBillingWeights=CPU=0.0,GRES/gpu=1.0 ")
    site = Site(Harness(gres), owner=True)
    try:
        conf.write_text(MULTIFACTOR + lines)
        gres.run(["scontrol", "reconfigure"], user="root")
        gres.await_nodes()
        yield site
    finally:
        site.harness.clear()
        conf.write_text(before)
        gres.run(["scontrol", "reconfigure"], user="root")
        gres.await_nodes()


def table(site: Site, *command: str) -> list[list[str]]:
    text = site.harness.cluster.run([*command], user="root").stdout
    return [[word.strip() for word in line.split("|")] for line in text.splitlines()]


def usage(site: Site) -> dict[str, int]:
    """GPU-seconds by which fair share knows each user."""
    rows = table(site, "sshare", "-ahP", "-o", "User,RawUsage")
    return {user: int(used) for user, used in rows if user}


def gpu_seconds(site: Site, job_id: int) -> int:
    rows = table(site, "sacct", "-nPDX", f"-j{job_id}", "-o", "ElapsedRaw,AllocTRES")
    trained = [(int(seconds), dict(one.split("=") for one in tres.split(","))) for seconds, tres in rows if tres]
    return sum(seconds * int(tres.get("gres/gpu", 0)) for seconds, tres in trained)


def ages(site: Site) -> dict[str, int]:
    """What age adds to the priority of each user's job that waits, as thousands: about a second each."""
    rows = table(site, "sprio", "-h", "-o", "%u|%A")
    assert len({user for user, _ in rows}) == len(rows), rows
    return {user: int(age) // 1000 for user, age in rows}


def test_blocks_cost_their_owner_what_a_plain_job_costs(site: Site) -> None:
    """The same for each GPU and second, and nothing for tasks that wait in a hold. A block's age in the queue begins
    when it is released; its owner's share counts for it as for any job."""
    harness = site.harness
    array = site.submit("--gres=gpu:4")
    plain = harness.rigid("--gres=gpu:4", "--nodes=2")
    settings = site.settings()
    site.resize(settings, {array: [[0, 8, 32]]})
    until(lambda: min(usage(site)[user] for user in ("alice", "bob")) > 0, lambda: usage(site))
    # Nothing is free, and a block waits beside a plain job that waits as long as the array has.
    waits = harness.rigid("--gres=gpu:4", "--nodes=1")
    submitted = time.monotonic()
    held = [n for n, task in harness.tasks(array).items() if task.held]
    assert len(held) == 6 and "alice" not in ages(site), "what is held has no priority"
    time.sleep(15)
    harness.cluster.run(["scontrol", "release", f"{array}_{held[0]}"], user="alice")
    later = time.monotonic() - submitted
    until(lambda: len(found := ages(site)) == 2 and min(found.values()) > 0, lambda: ages(site))
    found = ages(site)
    block, other = found["alice"], found["bob"]
    print(f"age: {block} s of a block released {later:.0f} s after a plain job was submitted, {other} s of that")
    assert 0 < block <= other - later + 5

    harness.cluster.run(["scancel", str(waits), str(plain), str(array)], user="root")
    until(
        lambda: not harness.cluster.run(["squeue", "-h"], user="root").stdout,
        lambda: harness.tasks(array),
        within_s=WAIT_S,
    )
    recorded(harness, plain)
    used = {"alice": gpu_seconds(site, array), "bob": gpu_seconds(site, plain)}
    until(
        lambda: all(abs(usage(site)[user] - seconds) <= 0.05 * seconds for user, seconds in used.items()),
        lambda: (usage(site), used),
    )
    print(f"GPU-seconds by sacct {used}, usage by sshare {usage(site)}")
