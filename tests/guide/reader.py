"""Who follows the guide: installs, breaks, and looks whether all is well again."""

from __future__ import annotations

import re
import time

from rich.console import Console

from tests.guide import guide, install, operations
from tests.guide.breaks import ROWS, Break
from tests.guide.daily import TASKS
from tests.guide.follow import Outcome, carry_out, carry_out_task
from tests.guide.host import Host
from tests.guide.place import Place
from tests.guide.service import ObservedService, Record
from tests.guide.site import DROP_IN, SETTINGS

console = Console(highlight=False, stderr=True)


def unknown() -> list[str]:
    """Rows of the guide that nothing here breaks or does, and things here that the guide has no row for."""
    said = [row.name for row in (*guide.table("When something breaks"), *guide.table("Day to day"))]
    done = [*dict.fromkeys(one.row for one in ROWS), *TASKS]
    lines = [f"the guide has no row {name!r}" for name in done if name not in said]
    return lines + [f"nothing is done for the row {name!r}" for name in said if name not in done]


class Reader:
    def __init__(self, place: Place, only: str = "") -> None:
        """Rows in whose name `only` (a regular expression) is found are broken or done, and no others."""
        self.place, self._only = place, re.compile(only)
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.service = ObservedService(place)

    def say(self, text: str) -> None:
        console.print(f"{time.monotonic() - self._began:6.0f} s  {text}", markup=False, soft_wrap=True)

    def install(self, host: Host) -> None:
        first = not self.service.installed
        self.say(f"{host.name}: {'the first host' if first else 'a standby'}")
        self.place.boot(host)
        text = SETTINGS.format(cluster=self.place.cluster.name, url=install.URL, spool=install.SPOOL)
        install.install(self.place, host, first=first, settings=text, drop_in=DROP_IN, say=self.say)
        install.start(host, self.say)
        self.service.installed.append(host)

    def act(self) -> None:
        """From advising to acting, by a reload."""
        for host in self.service.installed:
            self.say(f'{host.name}: mode = "act", systemctl reload slurm-ones')
            install.write(host, 'mode = "act"')
            host.sh("systemctl reload slurm-ones")

    def prepare(self) -> None:
        """What a site has before it reads the guide."""
        self.say("a real Slurm, and the database's host")
        self.place.start()
        install.administer_database(self.place)

    def all(self) -> None:
        """Install, break, install the standby, break that, go through a day, and on until it is uninstalled."""
        self.prepare()
        self.install(self.place.one)
        install.nights(self.place.one, self.say)
        self.act()
        self.service.populate()
        self._break([one for one in ROWS if not one.standby])
        self.install(self.place.other)
        self.act()
        self._break([one for one in ROWS if one.standby])
        for name, work in TASKS.items():
            if self._only.search(name):
                self._tell(carry_out_task(self.service, name, work))
        self._operate()

    def _operate(self) -> None:
        """Follow docs/operations.md, to its end."""
        for title, work in operations.SECTIONS.items():
            if self._only.search(f"operations: {title}"):
                self._tell(carry_out_task(self.service, title, work))
        if self._only.search("operations: Uninstall"):
            began = time.monotonic()
            faults = operations.uninstall(self.service)
            record = Record(how="done as written")
            self._tell(Outcome("Uninstall", "", record, time.monotonic() - began, faults))

    def _break(self, breaks: list[Break]) -> None:
        for one in breaks:
            if self._only.search(f"{one.row}: {one.way}"):
                self._tell(carry_out(self.service, one))
            lost = [host for host in self.place.hosts if not host.alive and host in self.service.lost]
            for host in lost:
                self.service.lost.remove(host)
                self.install(host)
                self.act()

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        mark = "ok " if outcome.fine else "BAD"
        seconds = f", well after {outcome.recovered_s:.0f} s" if outcome.recovered_s is not None else ""
        self.say(f"{mark} {outcome.name}: {outcome.record.how}{seconds}")
        for line in (*outcome.record.seen, *outcome.faults):
            console.print(f"          {line[:300]}", markup=False, soft_wrap=True)
