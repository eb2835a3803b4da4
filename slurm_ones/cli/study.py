"""Command `slurm-ones study`: estimates what a cluster would gain if its past jobs had been elastic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_ones.cli.common import bars, check_outputs, command, say, span
from slurm_ones.cli.simulate import end, inform, parse_cluster, print_table, shown
from slurm_ones.simulate import BadInput
from slurm_ones.text import seconds

# The simulator is imported by the command itself, so that no other command waits for it.
if TYPE_CHECKING:
    from slurm_ones.simulate.workloads.trace import Trace

PAGE = Path("elasticity.html")
SINCE = "30d"
"""Default of the option `--since`."""
CROWDED = 0.7
"""Share of the cluster's GPUs. If the trace's jobs never held more at once, it may be another cluster's trace."""


@command
def study(
    trace: Annotated[
        Path | None,
        typer.Argument(help="sacct --parsable2 with header, CSV, SWF, Philly, Helios, Acme, Alibaba (default: sacct)."),
    ] = None,
    since: Annotated[str, typer.Option(help="Start (sacct): 2026-01-31, or an age such as 90d (default: 30d).")] = "",
    until: Annotated[str, typer.Option(help="End (sacct; default: now).")] = "",
    partition: Annotated[str, typer.Option("--partition", "-p", help="Only jobs of this partition (sacct).")] = "",
    cluster: Annotated[
        str | None, typer.Option(help="Nodes x GPUs per node, such as 16x4 (default: the most that jobs held at once).")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of jobs, for a --cluster smaller than the trace's own.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Most jobs that are simulated.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Number of random assignments of training curves to jobs.")] = 3,
    profiles: Annotated[Path | None, typer.Option(help="Folder of measured profiles (default: built-in ones).")] = None,
    html: Annotated[Path, typer.Option(help="File to write the page to.")] = PAGE,
    figures: Annotated[Path | None, typer.Option(help="File for all figures as JSON; FILE.csv: as CSV.")] = None,
    database: Annotated[str, typer.Option(help="URL of a new job database, with a cluster for each run.")] = "",
    processes: Annotated[int, typer.Option(min=0, help="Simulations at once; 0: one per core.")] = 0,
    directory: Annotated[
        Path | None, typer.Option(help="Folder by which a stopped study continues (default: next to the page).")
    ] = None,
) -> None:
    """Estimate what elastic jobs would gain here: simulate past jobs with 0, 20, 50 and 100 % of them elastic.

    It reads Slurm's accounting of the jobs that you may see, changes nothing, and writes one page.
    """
    from slurm_ones.simulate.study.present import ElasticityStudy, as_csv, pictures, rows
    from slurm_ones.simulate.study.runs import StudyFolder, parts_of, run_all, summarize
    from slurm_ones.simulate.study.stretch import catalogue, measured, plan_of, recorded, stretch_of
    from slurm_ones.simulate.workloads.profiles import read_profiles

    check_outputs(figures, html)
    size = None
    if cluster is not None:
        parts = parse_cluster(cluster)
        if len(parts) > 1 or parts[0].kind:
            raise BadInput(f"--cluster: {cluster!r:.40}: a trace has no kinds of GPU; give NODESxGPUS of one partition")
        size = parts[0].nodes, parts[0].gpus_per_node
    if not 0 < sample <= 1:
        raise BadInput(f"--sample: {sample:g} is not above 0 and at most 1")
    curves = catalogue() if profiles is None else measured(read_profiles(profiles))
    read = _read(trace, since, until, partition)
    stretch = stretch_of(read, jobs, size, sample)
    plan = plan_of(read.name, stretch, curves, range(seeds), profiles=profiles).with_database(database)
    all_runs = len(list(plan.runs()))
    inform(
        f"{read.name} ({read.format}): {len(read.jobs)} jobs with GPUs; {len(stretch.jobs)} of them within "
        f"{seconds(stretch.hours * 3600)} are simulated on {stretch.nodes}x{stretch.gpus_per_node} GPUs; "
        f"{all_runs} runs, a decision every {seconds(plan.interval_s)}"
    )
    there = stretch.nodes * stretch.gpus_per_node / stretch.most_held
    if there < CROWDED:
        inform(f"jobs held {stretch.most_held} GPUs at once: --sample {sample * there:.2g} fills this cluster as much")
    for why, count in read.left_out:
        inform(f"left out: {count}: {why}")
    workers = processes or os.cpu_count() or 1
    folder = StudyFolder((directory or html.with_suffix(".runs")).absolute())
    with folder.locked():
        done = len(folder.done(parts_of(plan)))
        if done:
            inform(f"{done} of {all_runs} runs were done before ({folder.root})")
        runs = shown(all_runs - done, lambda on_progress: run_all(plan, workers, on_progress, folder))
    found = ElasticityStudy(read, stretch, curves, plan, summarize(plan, runs), runs)
    print_table(
        ["jobs elastic", "recorded", *(summary.label for summary in found.summaries)],
        [(row.title, [(row.recorded, ""), *row.cells]) for row in rows(plan, found.summaries, recorded(stretch))],
    )
    for line in [*found.verdict(), found.fidelity()]:
        say(line, 1000)
    if figures is not None:
        plain_csv = figures.suffix == ".csv"
        text = as_csv(found.summaries) if plain_csv else json.dumps(found.as_json(), indent=1, allow_nan=False)
        figures.write_text(text, encoding="utf-8")
    from slurm_ones.show.pages import write  # checked for above

    write(html, "study.html", pictures=pictures(plan, runs), **found.page())
    inform(f"{html} has the assumptions and all results")
    end(found.summaries)


def _read(path: Path | None, since: str, until: str, partition: str) -> Trace:
    """Return the trace from a file, or from `sacct` if there is no path."""
    from slurm_ones.simulate.workloads.formats import read_sacct, read_trace
    from slurm_ones.slurm.sacct import Sacct

    if path is not None:
        if since or until:
            raise BadInput(f"--since and --until are for sacct; {path} is read as a whole")
        return read_trace(path, partition)
    began, ended = span(since or SINCE, until)
    with bars() as bar:
        task = bar.add_task("accounting", total=1.0)
        return read_sacct(
            Sacct(), began, ended, partition,
            lambda share, rows: bar.update(task, completed=share, description=f"accounting, {rows} rows"),
        )  # fmt: skip
