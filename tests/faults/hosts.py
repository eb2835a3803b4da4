"""Companions as processes in virtual time: each lives until it is killed, waits while others act, and comes back. Of
several over one database one leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from ones_db.leader import LeaderLock
from slurm_ones.service.leadership import Leadership
from slurm_ones.simulate.slurm.timeline import Timeline
from tests.faults.injector import Crash, FaultInjector
from tests.faults.kinds import FaultKind


class HostClock:
    """The clock of a companion's host: virtual time, and what it is off by."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.offset_s = 0.0
        self.most_behind_s = 0.0
        """The most by which it ever was behind."""

    def jump(self, seconds: float) -> None:
        """Set it forwards, or back."""
        self.offset_s += seconds
        self.most_behind_s = max(self.most_behind_s, -self.offset_s)

    def __call__(self) -> float:
        return self._timeline.now + self.offset_s


class Host:
    """A service node on which one companion runs, and is started again after it died.

    Its process is a thread, of which only one runs at any moment: it runs from `go` to its next `wait`. So the order of
    all that happens follows from the seed.
    """

    def __init__(self, name: str, timeline: Timeline, work: Callable[[Host], None]) -> None:
        """`work` is the process: it waits by `wait`, and may raise."""
        self.name = name
        self.clock = HostClock(timeline)
        self.wake = timeline.now
        """When the process goes on, or is started again."""
        self.stopped = False
        """It is to stop."""
        self.ended = False
        """Its process came to its end by itself."""
        self.failure: BaseException | None = None
        """What its process died of, where that was no fault of ours."""
        self._timeline = timeline
        self._work = work
        self._thread: threading.Thread | None = None
        self._killed = False
        self._to_host, self._to_others = threading.Lock(), threading.Lock()
        self._to_host.acquire()
        self._to_others.acquire()

    @property
    def alive(self) -> bool:
        """Its process runs, or waits."""
        return self._thread is not None

    @property
    def dying(self) -> bool:
        """What happens now no longer happens in the process: it was killed."""
        return self._killed

    def go(self) -> None:
        """Let the process run until it waits, ends, or dies; starts it where it does not run."""
        if self._thread is None:
            self._killed = False
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._to_host.release()
        self._to_others.acquire()

    def die(self) -> None:
        """In the process: it is killed at this step."""
        self._killed = True

    def kill(self) -> None:
        """Kill the process while it waits."""
        if self._thread is not None:
            self._killed = True
            self.go()

    def wait(self, seconds: float) -> None:
        """In the process: let so much time pass."""
        self.wake = self._timeline.now + max(seconds, 0.0)
        self._to_others.release()
        self._to_host.acquire()
        if self._killed:
            raise Crash("killed while it waited")

    def _run(self) -> None:
        try:
            self._work(self)
            self.ended = True
        except Crash:
            self._killed = True
        except BaseException as failure:
            self.failure = failure
        self._thread = None
        self._to_others.release()


class HostStop:
    """How the companion on a host waits: `daemon.Stop`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def is_set(self) -> bool:
        return self._host.stopped

    def wait(self, timeout: float) -> bool:
        self._host.wait(timeout)
        return self._host.stopped


STANDBY_S = 20.0
"""One that stands by asks this often."""
PAUSED_S = (5.0, 400.0)
NEVER_S = 1e9
"""Nobody is deposed for being silent: real seconds say nothing here."""


class HostLeadership:
    """A host's share in the lead: the real lock, taken, lost and given back."""

    wait_s = STANDBY_S

    def __init__(self, host: Host, url: str, cluster: str, injector: FaultInjector, leaders: list[str]) -> None:
        """The host's name is appended to `leaders` each time that it takes the lead."""
        self._host = host
        self._injector = injector
        self._leaders = leaders
        self._cluster = cluster
        self._lock = LeaderLock(url, cluster)
        self._lead = Leadership(self._lock, NEVER_S, clock=host.clock, say=injector.trace)
        self._leads = False

    @property
    def term(self) -> int:
        """See `Leadership.term`."""
        return self._lead.term

    def check(self) -> None:
        """See `Leadership.check`. The leader may be stopped just before it looks, until long after another leads."""
        if self._injector.injects(FaultKind.PAUSED):
            # What an administrator, or a server that ends a silent session, does meanwhile.
            self.lock_file.unlink(missing_ok=True)
            self._host.wait(self._injector.random.uniform(*PAUSED_S))
        self._lead.check()

    def take(self) -> bool:
        """See `lead.Lead`."""
        before, self._leads = self._leads, self._lead.take()
        if self._leads and not before:
            self._leaders.append(self._host.name)
        return self._leads

    def leave(self) -> None:
        """Given back by one that ends; the system takes it from one that was killed."""
        if not self._host.dying:
            self._lead.leave()

    def close(self) -> None:
        self._lock.close()

    @property
    def lock_file(self) -> Path:
        """What the leader holds."""
        return Path(f"{self._lock.place}.{quote(self._cluster, safe='')}.lead")
