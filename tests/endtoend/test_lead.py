"""Two companions over one database: the one that leads is paused in the middle of a resize, and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest

from ones_db import ResizeRecord, Store, migrate
from slurm_ones.act.transitions import State
from tests.db.server import ADMIN, Server
from tests.endtoend.harness import WAIT_S, Harness
from tests.endtoend.test_move import shown
from tests.waiting import until

pytestmark = pytest.mark.cluster
TICK_S = 2.0
TAKEOVER_S = 6.0
"""Long enough that a leader which gets no time for a moment is not taken for one that hangs."""


class Companion:
    """`slurm-ones run --act` inside the cluster, with words of its own."""

    def __init__(self, harness: Harness, settings: str, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        program = Path(harness.cluster.python).with_name("slurm-ones")  # no fork: signals are for its process
        command = [str(program), "run", "--config", settings, "--verbose", "--act", "--own"]
        with self._log.open("a") as log:
            self._process = harness.cluster.popen(command, stdout=log, stderr=subprocess.STDOUT)
        harness.kill_at_end(self._process)

    @property
    def words(self) -> str:
        return self._log.read_text()

    def says(self, what: str) -> None:
        until(lambda: what in self.words or self._process.poll() is not None, lambda: self.words, WAIT_S, 0.05)
        assert what in self.words, self.words

    def send(self, number: signal.Signals) -> None:
        """To the companion itself, not to what brings it into the cluster."""
        pid = self._process.pid
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        os.kill(int(child), number)


def held(harness: Harness, store: Store, leader: Companion) -> ResizeRecord:
    """A resize whose job we hold, with the leader stopped there: of the first of some new jobs for which that comes
    about."""
    seen: set[int] = set()
    for _ in range(8):
        harness.light("--comment=ones: gpus=1-2 batch=16-32")
        deadline = time.monotonic() + WAIT_S
        while True:
            fresh = [r for r in store.resizes() if r.id not in seen]
            found = [r for r in fresh if r.ended is None and r.state in (State.REQUEUING, State.RESHAPING)]
            if found or any(r.ended is not None for r in fresh):
                break
            assert time.monotonic() < deadline, leader.words
            time.sleep(0.01)
        if not found:
            # It went by unseen: that of the next job.
            seen |= {r.id for r in fresh if r.ended is not None}
            continue
        seen.add(found[0].id)
        # Its processes end, which takes a moment; it is held as soon as the requeue was taken.
        while not harness.job(found[0].job_id).held and found[0].id in {r.id for r in store.open_resizes()}:
            time.sleep(0.01)
        leader.send(signal.SIGSTOP)
        (resize,) = [r for r in store.resizes(found[0].job_id) if r.id == found[0].id]
        if harness.job(resize.job_id).held and not State(resize.state).final:
            return resize
        leader.send(signal.SIGCONT)
    raise AssertionError(f"no job was held while its companion was stopped: {leader.words}")


@pytest.mark.nightly
def test_a_leader_that_is_paused_holding_a_job(harness: Harness, server: Server) -> None:
    """Protects a job that is held by a companion that hangs: the standby finishes its resize, and the one that wakes up
    does nothing a second time, neither in Slurm nor in the database, and stands by."""
    name = server.fresh()
    settings = harness.settings(database='"here"', tick_s=str(TICK_S), takeover_s=str(TAKEOVER_S))
    folder = harness.cluster.scratch / Path(settings).parent.name
    shown(server, folder)
    text = (folder / "ones.toml").read_text()
    inside = f"postgresql://{ADMIN}@/{quote(name)}?host=/scratch/{folder.name}"
    (folder / "ones.toml").write_text(text.replace('"here"', f'"{inside}"', 1))
    migrate.upgrade(server.url(name))

    with Store.open(server.url(name), "here") as store:
        one = Companion(harness, settings, folder, "one")
        one.says("leads, in term 1")
        other = Companion(harness, settings, folder, "other")
        other.says("stands by: ")
        leader = store.leader()
        assert leader is not None and f"stands by: {leader.holder} leads" in other.words
        resize = held(harness, store, one)
        job_id, stopped = resize.job_id, time.monotonic()
        try:
            other.says("leads, in term 2")
            harness.wait(job_id, lambda job: job.running and not job.held, "running again")
            took = time.monotonic() - stopped
            until(
                lambda: store.resizes(job_id)[-1].id != resize.id or store.resizes(job_id)[-1].ended is not None,
                lambda: other.words,
                WAIT_S,
                0.1,
            )
            (finished,) = [r for r in store.resizes(job_id) if r.id == resize.id]
            ticks = one.words.count("elastic jobs run")
            restarts = harness.job(job_id).restart
        finally:
            one.send(signal.SIGCONT)
        assert finished.state == State.DONE, (finished, other.words)
        one.says("the lead")
        one.says("stands by: ")
        # The tick in which it was stopped may end in its line; no other begins.
        ended = one.words.count("elastic jobs run")
        assert ended <= ticks + 1, one.words
        time.sleep(3 * TICK_S)
        assert one.words.count("elastic jobs run") == ended, one.words
        job = harness.job(job_id)
        # As often as a resize that was done by the one that leads now, or is under way.
        resizes = [r for r in store.resizes(job_id) if r.id > resize.id and r.restart >= 0]
        assert restarts <= job.restart <= restarts + len(resizes)
        assert [r for r in store.resizes(job_id) if r.id == resize.id] == [finished]
        steps = Counter(step.state for step in store.resize_steps(resize.id))
        assert max(steps.values()) == 1, steps
        # The other is killed: the first leads again.
        other.send(signal.SIGKILL)
        one.says("leads, in term 3")
        ticks = one.words.count("elastic jobs run")
        until(lambda: one.words.count("elastic jobs run") >= ticks + 2, lambda: one.words, WAIT_S, 0.1)
        assert not harness.job(job_id).admin_held
    print(f"the job ran again {took / TICK_S:.1f} ticks after its companion was stopped")
