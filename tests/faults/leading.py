"""Two companions over one database, and the leader that is stopped (SIGSTOP) at the worst moment."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from ones_db.leader_lock import LeaderLock
from slurm_ones.service.leadership import Leadership
from tests.faults.chance import Chance
from tests.faults.hosts import Host
from tests.faults.kinds import Kind

STANDBY_S = 20.0
"""One that stands by asks this often."""
PAUSED_S = (5.0, 400.0)
NEVER_S = 1e9
"""Nobody is ousted for being silent: real seconds say nothing here."""


class HostLead:
    """A host's share in the lead: the real lock, taken, lost and given back."""

    wait_s = STANDBY_S

    def __init__(self, host: Host, url: str, cluster: str, chance: Chance, leaders: list[str]) -> None:
        """`leaders` is told the host's name each time that it takes the lead."""
        self._host = host
        self._chance = chance
        self._leaders = leaders
        self._cluster = cluster
        self._lock = LeaderLock(url, cluster)
        self._lead = Leadership(self._lock, NEVER_S, clock=host.clock, say=chance.told)
        self._leads = False

    @property
    def term(self) -> int:
        """See `Leadership.term`."""
        return self._lead.term

    def check(self) -> None:
        """See `Leadership.check`. The leader may be stopped just before it looks, until long after another leads."""
        if self._chance.strikes(Kind.PAUSED):
            # What an administrator, or a server that ends a silent session, does meanwhile.
            self.lock_file.unlink(missing_ok=True)
            self._host.wait(self._chance.random.uniform(*PAUSED_S))
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
        """The process is gone."""
        self._lock.close()

    @property
    def lock_file(self) -> Path:
        """What the leader holds."""
        return Path(f"{self._lock.place}.{quote(self._cluster, safe='')}.lead")
