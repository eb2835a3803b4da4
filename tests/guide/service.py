"""The service at its site: what is seen of it when something breaks, and when it is well again."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ones_db import StoreError
from tests.cluster import ClusterError
from tests.endtoend.fault_run import between
from tests.endtoend.invariants import check
from tests.guide.host import Host
from tests.guide.operators import NotSeen, Operators
from tests.guide.place import Place

PROGRAM = "sudo -u slurm-ones HOME=/var/lib/slurm-ones /opt/slurm-ones/bin/slurm-ones"
HEALTHY_S = 180.0
QUIET_S = 120.0


@dataclass
class Record:
    """One break: how, what was seen of it, and what people did in the end."""

    how: str = ""
    seen: list[str] = field(default_factory=list)
    repaired: str = ""


class ObservedService(Operators):
    """The service, among people."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.record = Record()

    # -- what is seen --------------------------------------------------------------------------------------------

    @property
    def leader(self) -> Host:
        with self.store() as store:
            leader = store.leader()
        holder = leader.holder.rpartition(":")[0] if leader else ""
        for host in self.installed:
            if holder == host.full_name:
                return host
        raise NotSeen(f"who leads? {holder!r}")

    def pair(self) -> tuple[Host, Host]:
        """The host whose companion leads, and the one that stands by."""
        leader = self.leader
        (other,) = (host for host in self.installed if host is not leader)
        return leader, other

    def status(self, host: Host, *options: str) -> tuple[int, str]:
        """Exit code and words of `slurm-ones status`."""
        done = host.ask(f"{PROGRAM} status {' '.join(options)}")
        return done.returncode, done.stdout + done.stderr

    def why(self, job_id: int, host: Host | None = None) -> str:
        return (host or self.place.one).sh(f"{PROGRAM} why {job_id}", check=False)

    def journal(self, host: Host, *options: str) -> str:
        """What the service has said since the latest break."""
        text = host.sh(f"journalctl -u slurm-ones --no-pager -o cat --since @{self.since:.6f} {' '.join(options)}")
        # Python's own calls, by hundreds, after an abort.
        return re.sub(r"^  Binary file .*\n", "", text, flags=re.MULTILINE)

    def mark_broken(self, how: str) -> None:
        self.record.how = how
        self.since = self.repaired_at = time.time()

    def mark_repaired(self, how: str) -> None:
        """From now on it can be well again: somebody did what the guide says."""
        self.record.repaired = how
        self.repaired_at = time.time()

    def see(self, look: Callable[[], str], pattern: str, timeout_s: float = 60.0) -> str:
        """Wait until what is looked at says so; the line that does is recorded."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = look()
            if found := re.search(f"^.*(?:{pattern}).*$", text, flags=re.MULTILINE):
                line = " ".join(found[0].split())
                self.record.seen.append(line)
                return line
            if time.monotonic() > deadline:
                raise NotSeen(f"{pattern!r} not within {timeout_s:.0f} s in: {text[-3000:]}")
            time.sleep(0.5)

    def see_journal(self, host: Host, pattern: str, timeout_s: float = 60.0) -> str:
        return self.see(lambda: self.journal(host), pattern, timeout_s)

    def see_status(self, host: Host, pattern: str, timeout_s: float = 60.0) -> str:
        return self.see(lambda: self.status(host)[1], pattern, timeout_s)

    # -- well again ----------------------------------------------------------------------------------------------

    def wait_healthy(self) -> float:
        """Wait for a tick since it was mended, and until `slurm-ones status` says on each host that all is well; the
        seconds to that tick."""
        while (ticked := self._ticked()) is None:
            if time.time() - self.repaired_at > HEALTHY_S:
                raise NotSeen(f"no tick within {HEALTHY_S:.0f} s: {self.status(self.installed[0])[1]}")
            time.sleep(0.1)
        for host in self.installed:
            while (told := self.status(host))[0] != 0:
                if time.time() - self.repaired_at > HEALTHY_S:
                    raise NotSeen(f"{host.name} not healthy within {HEALTHY_S:.0f} s: {told[1]}")
        return ticked - self.repaired_at

    def _ticked(self) -> float | None:
        """When it ticked, if that was since it was mended."""
        with suppress(StoreError), self.store() as store:
            health = store.health()
            if health is not None and (health.tick_time or 0.0) > self.repaired_at:
                return health.tick_time
        return None

    def repair(self) -> None:
        """Start all that may not run, after a break that was not carried through."""
        self.place.database("start")
        if not self.cluster.controller_lives():
            self.cluster.start_slurmctld()
        self.scontrol("scontrol", "update", "NodeName=n[1-4]", "State=RESUME", user="root")
        for host in self.installed:
            if host.alive:
                host.sh("systemctl start slurm-ones", check=False)
        self.set_quiet(False)

    def faults(self) -> list[str]:
        """What is wrong with people's jobs once all is quiet: lost, left held, touched, set back, or told otherwise in
        the database."""
        self.set_quiet(True)
        try:
            deadline = time.monotonic() + QUIET_S
            while unsettled := self._unsettled():
                if time.monotonic() > deadline:
                    return [f"not quiet within {QUIET_S:.0f} s: {unsettled}"]
                time.sleep(0.3)
            return check(self).found
        finally:
            self.set_quiet(False)

    def _unsettled(self) -> str:
        try:
            with self.store() as store:
                if resizes := store.open_resizes():
                    return f"resizes {[(r.job_id, r.state) for r in resizes]}"
                if store.deferrals():
                    return "jobs are kept from starting"
                jobs = self.jobs()
                for job_id in self.elastic():
                    job, record = jobs.get(job_id), store.jobs([job_id]).get(job_id)
                    if job is None or record is None or record.state != job.state.value:
                        return f"job {job_id} is {job and job.state.value}, the database has {record and record.state}"
                    if why := between(job):
                        return why
                    run = {run.restart: run for run in store.runs(job_id)}.get(job.restart)
                    if job.running and (run is None or run.shape.nodes != job.nodes):
                        return f"job {job_id} runs, and the database does not know"
        except (StoreError, ClusterError, subprocess.TimeoutExpired) as error:
            return str(error)
        return ""
