"""A user's directory whose file system stops answering; two companions are services of systemd, and one leads."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ones_db import ResizeRecord
from slurm_ones.act.transitions import State
from tests.cluster import Cluster, ClusterError, root, unavailable
from tests.cluster.cli import Progress
from tests.cluster.spec import Bind
from tests.conftest import quick
from tests.db.server import Server
from tests.endtoend.fault_site import ELASTIC, FULL, SIZES, FaultSite, JobExpectation, Service
from tests.endtoend.invariants import check
from tests.guide.host import why_no_systemd
from tests.guide.site import HOST
from tests.service.hanging import can_mount, silent_mount
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]
TICKS, BEFORE_KILL = 100, 10
WAIT_S = 180.0
MOST_S, FEW, LONGEST_S = 1.0, 3, 2.0
"""The aim for a tick, s; how many may take longer, and how long. At loads of 7 to 15 none to three did."""
SILENT = "files_silent"
PLACE = Path(FULL, "alice")
HELD = (State.RESHAPING, State.RELEASING)
"""States of a resize in which the companion holds its job."""


@dataclass(frozen=True)
class Hundred:
    """100 ticks."""

    took: list[float]
    """Seconds of each."""
    states: list[str]
    """Of the job's resize: at first, when the leader was killed, in the end."""
    read: dict[int, int]
    """How many reports of each job were read meanwhile."""
    summary: str


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Iterator[FaultSite]:
    """Two companions of an operator's over PostgreSQL, each the installed unit on a host of its own."""
    why = why_no_systemd() or unavailable() or ("" if can_mount() else "mounting a FUSE needs root and /dev/fuse")
    if why:
        pytest.skip(why)
    disks = {place: tmp_path / place.lstrip("/") for place in SIZES}
    for disk in disks.values():
        disk.mkdir()
        disk.chmod(0o1777)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        root.build(HOST, Progress())
    cluster = Cluster("gres").start([Bind(str(disk), place, writable=True) for place, disk in disks.items()])
    try:
        quick(cluster)
        try:
            made = FaultSite(cluster, disks, random.Random(1), own=False, server=server, companions=2, systemd=True)
        except ClusterError as error:
            pytest.skip(f"no host with systemd can be started here: {error}")
        yield made
        made.end()
    finally:
        cluster.stop()


def ticks(site: FaultSite) -> list[float]:
    """Seconds of each tick since the last `skip_log`, as the companions said them."""
    return [float(found) for found in re.findall(r"elastic jobs run.*\((\d+\.\d+) s\)", site.companion_log())]


def read(site: FaultSite) -> dict[int, int]:
    """How many reports of each job were read."""
    with site.store() as store:
        found = store.report_positions(list(site.expected))
    return {id_: sum(number for _, number in runs.values()) for id_, runs in found.items()}


def leader(site: FaultSite) -> Service:
    with site.store() as store:
        record = store.leader()
    holder = record.holder.rpartition(":")[0] if record else ""
    (found,) = (one for one in services(site) if one.host.full_name == holder)
    return found


def services(site: FaultSite) -> list[Service]:
    return [one for one in site.companions if isinstance(one, Service)]


def open_resize(site: FaultSite, job_id: int, *states: State) -> ResizeRecord | None:
    with site.store() as store:
        return next((r for r in store.open_resizes() if r.job_id == job_id and (not states or r.state in states)), None)


def refusal(site: FaultSite, job_id: int) -> str:
    with site.store() as store:
        return store.jobs([job_id])[job_id].refusal.code


def why(site: FaultSite, job_id: int) -> str:
    """What its owner reads, on a host where the file system hangs."""
    program = Path(site.cluster.python).with_name("slurm-ones")
    command = f"{program} why {job_id} --config {site.settings}"
    return leader(site).host.ask(command, user="alice", timeout=30).stdout


def hundred(site: FaultSite, job_id: int, silent: ExitStack | None = None) -> Hundred:
    """100 ticks from a moment on at which the companion holds that job. The leader is killed among them. With `silent`
    the job's directory hangs from that moment on, until it is closed."""
    words = site.companion_log
    site.set_quiet(False)
    until(lambda: open_resize(site, job_id, *HELD), words, WAIT_S, 0.01)
    site.skip_log()
    for service in services(site) if silent else ():
        silent.enter_context(silent_mount(PLACE, service.host.box.init))
    resize = open_resize(site, job_id)
    site.set_quiet(True)
    read_first, first = read(site), leader(site)
    until(lambda: len(ticks(site)) >= BEFORE_KILL, words, WAIT_S, 0.1)
    at_kill = open_resize(site, job_id)
    first.kill(absent_s=5.0)
    until(lambda: leader(site) is not first, words, WAIT_S, 0.1)
    until(lambda: len(ticks(site)) >= TICKS, words, WAIT_S, 0.5)
    took = ticks(site)[:TICKS]
    states = [one.state if one else "over" for one in (resize, at_kill, open_resize(site, job_id))]
    more = {id_: number - read_first[id_] for id_, number in read(site).items()}
    summary = (
        f"at most {max(took):.2f} s, median {sorted(took)[TICKS // 2]:.2f}, {sum(t > MOST_S for t in took)} over 1 s"
    )
    return Hundred(took, states, more, f"{summary}; its resize {', '.join(states)}")


def test_one_of_three_directories_hangs(site: FaultSite) -> None:
    """Over 100 ticks with a change of leader, while the job there is resized: ticks stay short, other jobs' reports are
    read, and that job is left as it is with a note. Once its files answer it is looked after, neither lost nor held."""
    options, words = f"--comment={ELASTIC}", site.companion_log
    mine, others = site.light(options, f"--chdir={PLACE}", "--output=/dev/null"), []
    site.expected[mine] = JobExpectation("elastic", "alice", full=True)
    for user in ("alice", "bob"):
        others.append(site.light(options, user=user))
        site.expected[others[-1]] = JobExpectation("elastic", user)
    until(lambda: "leads, in term 1" in words(), words, WAIT_S, 0.5)
    until(lambda: len(read(site)) == 3 and min(read(site).values()) > 2, words, WAIT_S, 0.5)
    before = hundred(site, mine)
    print(f"ticks before: {before.summary}", flush=True)
    with ExitStack() as silent:
        during = hundred(site, mine, silent)
        print(f"ticks while it hung: {during.summary}", flush=True)
        assert during.states[0] != "over" and "does not answer" in words()
        note = why(site, mine)
        assert re.search(rf"{PLACE} has not answered since .* \(since ", note) and refusal(site, mine) == SILENT, note
        assert during.read[mine] == 0 and all(during.read[id_] > 5 for id_ in others), during.read
        assert SILENT not in map(partial(refusal, site), others)
        last = read(site)[mine]
    answered = time.monotonic()
    until(lambda: read(site)[mine] > last and refusal(site, mine) != SILENT, words, WAIT_S, 0.1)
    print(f"read again after {time.monotonic() - answered:.1f} s")
    until(lambda: open_resize(site, mine) is None, words, WAIT_S, 0.5)
    until(lambda: not check(site).found, lambda: check(site).found, WAIT_S, 1.0)
    job = site.jobs()[mine]
    assert job.running and not job.held, job
    # On a busy machine the ticks in which it falls silent take longer.
    assert sum(seconds > MOST_S for seconds in during.took) <= FEW and max(during.took) <= LONGEST_S, during
