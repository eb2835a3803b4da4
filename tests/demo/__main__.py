"""`make demo`: ten training jobs on a real Slurm, resized by the companion, and the same ten on Slurm alone; two rigid
jobs of others each time."""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ones_db import Store
from slurm_ones.cli.common import is_terminal
from slurm_ones.demo.jobs import ON_CLUSTER
from slurm_ones.show import page_lacks
from slurm_ones.show.pages import write_usage
from slurm_ones.show.usage import of_job, of_jobs, usage
from slurm_ones.slurm.model import SlurmJob
from slurm_ones.text import plain
from tests.cluster.cli import Progress
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.demo import results
from tests.demo.scenario import DATABASE, RIGID, SITE, TOP, Outcome, companion, gpus_of, operator, run

# Wide enough for the last table where nobody says how wide it is.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
OUT = TOP / "build" / "demo"
RESIZED = "about 2 minutes 30 s"
ALONE = "about 3 minutes"
"""How long each part takes on two cores, as it is said before."""
PAGE_S = 3600.0
"""How long the page is served on a terminal after the report."""
STORED_S = 12.0
"""More than two ticks."""


class Watch:
    """Jobs and decisions as they happen: a live table on a terminal, a line a change elsewhere."""

    def __init__(self, title: str, store: Store | None) -> None:
        self._title = title
        self._store = store
        self._live = Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else None
        self._began = time.time()
        self._said = ""

    def __enter__(self) -> Watch:
        console.rule(self._title)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, outcomes: list[Outcome], jobs: dict[int, SlurmJob]) -> None:
        """One look. Decisions are read from the job database, the rest from Slurm."""
        elapsed = time.time() - self._began
        if self._live is None:
            line = self._line(outcomes, jobs)
            if line != self._said:
                self._said = line
                console.print(f"{elapsed:4.0f} s  {line}", soft_wrap=True)
            return
        self._live.update(Group(self._table(outcomes, jobs, elapsed), *self._decisions(outcomes)))

    @staticmethod
    def _line(outcomes: list[Outcome], jobs: dict[int, SlurmJob]) -> str:
        words = []
        for o in outcomes:
            job = jobs.get(o.job_id)
            if job is not None and job.running:
                words.append(f"{o.job.name} on {gpus_of(job)}")
            elif job is not None and job.pending:
                words.append(f"{o.job.name} {'requeued' if job.restart else 'waits'}")
        done = sum(bool(o.state) for o in outcomes)
        return f"{done}/{len(ON_CLUSTER) + len(RIGID)} done; " + ", ".join(words)

    @staticmethod
    def _table(outcomes: list[Outcome], jobs: dict[int, SlurmJob], elapsed: float) -> Table:
        shown = Table(box=None, header_style="bold", title=f"{elapsed:.0f} s", title_justify="left")
        for column in ("job", "user", "state", "GPUs", ""):
            shown.add_column(column)
        for o in outcomes:
            job = jobs.get(o.job_id)
            gpus = gpus_of(job) if job is not None and job.running else 0
            state = o.state or (job.state.value if job is not None else "?")
            shown.add_row(o.job.name, o.job.user, state, str(gpus or ""), "█" * (2 * gpus))
        return shown

    def _decisions(self, outcomes: list[Outcome]) -> list[Text]:
        if self._store is None:
            return []
        names = {o.job_id: o.job.name for o in outcomes}
        lines = []
        for decision in self._store.recent_decisions(6):
            for job in decision.jobs:
                if job.acted:
                    name = names.get(job.job_id, f"job {job.job_id}")
                    what = f"{name} → {job.shape}: {plain(str(job.reason))}"
                    lines.append(Text(f"  {decision.time - self._began:4.0f} s  {what}"))
        return lines[:8]


def _elastic(cluster: Cluster) -> tuple[list[Outcome], list[str]]:
    with companion(cluster):
        path = cluster.scratch / DATABASE
        with Store.open(f"sqlite:///{path}", "demo", read_only=True) as store, Watch("slurm-ones", store) as watch:
            outcomes = run(cluster, elastic=ON_CLUSTER, show=watch.show, rigid=RIGID)
            # The companion stores the ends of the last jobs in its next tick.
            until = time.monotonic() + STORED_S
            while store.live_jobs() and time.monotonic() < until:
                time.sleep(0.5)
        # The rest of that tick.
        time.sleep(1)
        command = ["slurm-ones", "jobs", "--json", "--config", "/scratch/ones.toml"]
        told = cluster.run(command, user=operator(cluster)).stdout
    shutil.copy(cluster.scratch / "ones/companion.log", OUT / "companion.log")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(OUT / "ones.sqlite")) as target:
        source.backup(target)
        # One file to take away, with no log beside it.
        target.execute("PRAGMA journal_mode = DELETE")
    with Store.open(f"sqlite:///{OUT / 'ones.sqlite'}", "demo", read_only=True) as store:
        trained = [one for one in outcomes if one.waited_s is None]
        return outcomes, results.disagreements(trained, store, json.loads(told))


def _complaints(ones: list[Outcome], slurm: list[Outcome]) -> list[str]:
    found = [f"{o.job.name}: {o.state or 'never ended'}" for o in (*ones, *slurm) if not o.finished]
    resized = sum(o.resizes > 0 for o in ones)
    if resized < 6:
        found.append(f"only {resized} of {len(ON_CLUSTER)} jobs were resized")
    return found


def _report() -> None:
    """The page of `slurm-ones report` over what the demo left."""
    with Store.open(f"sqlite:///{OUT / 'ones.sqlite'}", "demo", read_only=True) as store:
        found = usage(store)
    totals = [*of_jobs(found, "The demo's ten jobs"), f"  {'note':<11}{results.EMULATED}"]
    write_usage(OUT / "report.html", "The demo", totals, [(one, of_job(one, [])) for one in found])


def serve_page(port: int) -> None:
    """Serve the live page over what the demo left, for an hour or until Ctrl-C."""
    command = [sys.executable, "-m", "slurm_ones.cli", "web", f"--port={port}"]
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        subprocess.run([*command, f"--database=sqlite:///{OUT / 'ones.sqlite'}"], check=False, timeout=PAGE_S)


def main(port: int = 0) -> int:
    """Run both scenarios on one cluster each; returns 1 if a job did not finish or something disagrees.

    On a terminal, serve the live page afterwards."""
    began = time.time()
    console.print("1 of 3: a Slurm of 4 nodes; about 10 s, where it is made first about 90 s more")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    try:
        with Cluster(SITE, report=Progress(), compile=False) as cluster:
            how = "PySlurm" if cluster.pyslurm else f"the command line ({cluster.pyslurm_why})"
            who = operator(cluster)
            console.print(f"A real Slurm runs: 4 nodes × 4 GPUs. The companion talks to it as {who}, through {how}.")
            console.print(f"2 of 3: ten jobs, resized by slurm-ones, and two of others; {RESIZED}")
            ones, disagree = _elastic(cluster)
        console.print(f"3 of 3: the same jobs on Slurm alone; {ALONE}")
        with Cluster(SITE, report=Progress(), compile=False) as cluster, Watch("Slurm alone", None) as watch:
            slurm = run(cluster, elastic=(), show=watch.show, rigid=RIGID)
    except ClusterError as error:
        console.print(f"make demo: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("make demo: interrupted; the Slurm it started is gone, with its jobs")
        return 130
    found = results.result(ones, slurm)
    drawn = results.pictures(ones, slurm, found)
    results.write(OUT, found, drawn)
    _report()
    console.print(results.table(found))
    complaints = [*_complaints(ones, slurm), *disagree]
    for complaint in complaints:
        console.print(f"✗ {complaint}", style="red", markup=False)
    if not complaints:
        console.print("✓ Every job finished, and Slurm, the jobs' reports, the database and slurm-ones jobs agree.")
    names = ", ".join(sorted(path.name for path in OUT.iterdir()))
    console.print(f"{OUT.relative_to(TOP)}/: {names}; {time.time() - began:.0f} s in all.")
    if is_terminal(sys.stdin) and is_terminal(sys.stdout) and not page_lacks():
        serve_page(port)
    return 1 if complaints else 0


if __name__ == "__main__":
    asked = argparse.ArgumentParser(prog="python -m tests.demo")
    asked.add_argument("--port", type=int, default=0, help="port of the page (default: any that is free)")
    sys.exit(main(asked.parse_args().port))
