"""Command `slurm-ones simulate`: compares policies on the same workload in virtual time."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import TaskProgressColumn, TextColumn, TimeElapsedColumn

from ones_wrapper.protocol.choices import listed
from slurm_ones.cli.batch_script import is_bare, options_in
from slurm_ones.cli.common import bars, check_outputs, command, complain, console, errors, grid, say
from slurm_ones.simulate import BadInput
from slurm_ones.text import plain, safe, seconds

# The simulator is imported by the command itself, so that no other command waits for it.
if TYPE_CHECKING:
    from slurm_ones.simulate.spec import Network, Part
    from slurm_ones.simulate.study.plan import Contender, StudyPlan
    from slurm_ones.simulate.study.runs import ContenderSummary, OnProgress, RunProgress, StudyRun
    from slurm_ones.simulate.training.application import Mechanism

Found = TypeVar("Found")

QUICK_MIX = "ones-sc21"
"""Workload whose jobs take only minutes, so that decisions must be frequent."""
QUICK_S, USUAL_S, HOT_S = 10.0, 60.0, 15.0
"""Seconds between decisions for `QUICK_MIX`, for other workloads, and for other workloads with `--resize hot`."""
REQUEUE_S = "30"
"""Default of the option `--resize-cost`."""
EXECUTORS = ("local", "slurm")
DIRECTORY = "ones-study"
"""Default of the option `--directory`."""
OWN = (
    "array", "chdir", "clusters", "comment", "error", "input", "job-name", "open-mode", "output", "parsable", "quiet",
    "test-only", "wait", "wrap", "elastic-gpus", "elastic-nodes", "elastic-batch", "elastic-deadline",
)  # fmt: skip
"""Options of sbatch that users may not set for a study's jobs; `--comment` could make a companion resize the jobs."""
_OPTION = re.compile(r"--[a-z][a-z0-9-]{0,40}")
_CLUSTER = re.compile(r"(\d{1,5})x(\d{1,3})(?::([a-z0-9]{1,20}))?")


def parse_cluster(text: str) -> tuple[Part, ...]:
    """Parse nodes x GPUs per node: `16x4`, or for several kinds `8x4:a100+8x4:v100`. Raises `BadInput`."""
    from slurm_ones.simulate.spec import Part
    from slurm_ones.simulate.training.application import POWER

    found = [_CLUSTER.fullmatch(one) for one in text.split("+")]
    parts = tuple(Part(int(one[1]), int(one[2]), one[3] or "") for one in found if one is not None)
    if len(parts) < len(found) or not all(part.nodes and part.gpus_per_node for part in parts):
        raise BadInput(f"--cluster: {text!r:.40} is not NODESxGPUS, such as 16x4 or 8x4:a100+8x4:v100")
    kinds = [part.kind for part in parts]
    unknown = [kind for kind in kinds if kind not in POWER and not (kind == "" and len(parts) == 1)]
    if unknown or len(set(kinds)) < len(kinds):
        raise BadInput(f"--cluster: {text!r:.60}: each part is of another kind of GPU, of {', '.join(POWER)}")
    return parts


def parse_network(text: str) -> Network:
    """Parse a network such as `4x4:3`: leaf switches x nodes per switch : taper. Raises `BadInput`."""
    from slurm_ones.simulate.spec import Network

    cluster, _, taper = text.partition(":")
    found, value = _CLUSTER.fullmatch(cluster), parse_number(taper or "1")
    if found is not None and 1 <= value < math.inf:
        with suppress(ValueError):
            return Network(int(found[1]), int(found[2]), value)
    raise BadInput(f"--network: {text!r:.40} is not LEAVESxNODES:TAPER, such as 4x4:3")


def parse_slow_nodes(text: str) -> tuple[float, ...]:
    """Parse the relative speeds of slow nodes: `2:0.7` means two nodes of speed 0.7. Raises `BadInput`."""
    count, _, speed = text.partition(":")
    value = parse_number(speed)
    if not count.isdecimal() or len(count) > 4 or not 0 < value < 1:
        raise BadInput(f"--slow-nodes: {text!r:.40} is not COUNT:SPEED, such as 2:0.7")
    return (value,) * int(count)


def parse_number(text: str) -> float:
    """Return the number in a text; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_value(text: str) -> bool | int | float | str:
    """Parse the value of an option: true or false, a number, or a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def parse_pairs(where: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse texts such as `key=value` into a dict. `where` begins the message of `BadInput`."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key.strip() or not equals:
            raise BadInput(f"{where}: {text!r:.60} is not key=value")
        found[key.strip()] = parse_value(value.strip())
    return found


def parse_policy(text: str) -> Contender:
    """Parse `name` or `name:option=value,…`; the name may be `package.module:Class`. Raises `BadInput`."""
    from slurm_ones.policies import POLICIES
    from slurm_ones.simulate.study.plan import Contender

    name, _, options = text.partition(":")
    if options and name not in POLICIES and "=" not in options.partition(":")[0]:
        cls, _, options = options.partition(":")
        name = f"{name}:{cls}"
    return Contender(text, name, parse_pairs(f"--policy {name}", options.split(",") if options else ()))


def parse_resize_cost(text: str) -> float | None:
    """Parse the pause of a resize in seconds; None for the word `measured`. Raises `BadInput`."""
    if text == "measured":
        return None
    value = parse_number(text)
    if not 0 <= value < 86400:
        raise BadInput(f"--resize-cost: {text!r:.40} is neither seconds nor the word measured")
    return value


def parse_mechanism(text: str, resize_cost: str | None) -> Mechanism:
    """Parse the mechanism of resizes: `requeue`, `hot` or `hot:launch_s=30,…`. Raises `BadInput`."""
    from slurm_ones.simulate.training.application import Hot, Requeue

    name, _, costs = text.partition(":")
    if name == "requeue" and not costs:
        return Requeue(parse_resize_cost(resize_cost or REQUEUE_S))
    if name != "hot":
        raise BadInput(f"--resize: {text!r:.60} is neither requeue nor hot nor hot:COST=value,…")
    if resize_cost is not None:
        raise BadInput("--resize-cost is for requeues; give the costs of hot resizes as --resize hot:COST=value")
    found = parse_pairs("--resize hot", costs.split(",") if costs else ())
    known = [field.name for field in fields(Hot) if field.name != "terms"]
    for key, number in found.items():
        if key not in known:
            raise BadInput(f"--resize hot: {key!r:.40} is no cost; there are {listed(known, key)}")
        if isinstance(number, bool | str):
            raise BadInput(f"--resize hot: {key}={number!r:.40} is not a number")
    try:
        numbers: dict[str, Any] = {key: float(number) for key, number in found.items()}
        return Hot(**numbers)
    except ValueError as error:
        raise BadInput(f"--resize hot: {error}") from None


def parse_sbatch(text: str) -> dict[str, str | bool]:
    """Parse options of sbatch such as `-t 2:00:00 --exclusive`. Return their values by long name. Raises `BadInput`."""
    found: dict[str, str | bool] = {}
    try:
        given = list(options_in(shlex.split(text)))
    except ValueError as error:
        raise BadInput(f"--sbatch: {text!r:.80}: {error}") from None
    for name, value in given:
        option = name[2:]
        if not _OPTION.fullmatch(name):
            raise BadInput(f"--sbatch: {name!r:.60} is no option of sbatch's, such as --partition=cpu")
        # sbatch takes an option's beginning for the option.
        if own := next((own for own in OWN if own.startswith(option)), None):
            short = f", which sbatch may take --{option} for," if own != option else ""
            raise BadInput(f"--sbatch: --{own}{short} is set by the study itself")
        if not value.isprintable() or not (value or is_bare(name)):
            raise BadInput(f"--sbatch: --{option} has no value that sbatch could read")
        found[option] = value or True
    return found


def policies() -> list[str]:
    """Return the names of all policies, for shell completion."""
    from slurm_ones.policies import POLICIES

    return [*POLICIES]


@command
def simulate(
    workload: Annotated[
        str,
        typer.Option(
            help="CSV file (name,time,application,num_replicas,batch_size), ones-sc21, philly, uniform or strategies."
        ),
    ] = "philly",
    profiles: Annotated[Path | None, typer.Option(help="Folder of measured profiles, for a CSV workload.")] = None,
    cluster: Annotated[str, typer.Option(help="Nodes x GPUs per node, or by kind: 8x4:a100+8x4:v100.")] = "16x4",
    network: Annotated[str | None, typer.Option(help="Leaf switches x nodes : taper, as 4x4:3 (--idealized).")] = None,
    slow_nodes: Annotated[str | None, typer.Option(help="Slow nodes as COUNT:RELATIVE-SPEED, such as 2:0.7.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy as NAME:option=value,… where NAME may be package.module:Class. Repeatable (default: ones).",
            autocompletion=policies,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; each is a workload of its own.")] = 1,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of jobs (default: the workload's).")] = None,
    load: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    arrivals: Annotated[str | None, typer.Option(help="poisson, uniform or diurnal (default: the workload's).")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of submissions (default: follows from --load).")] = None,
    rigid: Annotated[float, typer.Option(help="Share of rigid jobs.")] = 0.0,
    deadlines: Annotated[
        float, typer.Option(help="Share of jobs with deadline: 0.5 to 1.5 times their own time at the requested size.")
    ] = 0.0,
    interval: Annotated[
        float | None, typer.Option(help="Seconds between decisions (default: 60; hot: 15; workload ones-sc21: 10).")
    ] = None,
    resize: Annotated[
        str,
        typer.Option(
            help="How jobs change size: requeue, or hot (blocks join and leave while the job trains). "
            "Costs measured on a real Slurm can be changed as hot:launch_s=7,pause_s=0.3,"
            "shrink_pause_s=0.03,bytes_per_s=6.5e8."
        ),
    ] = "requeue",
    resize_cost: Annotated[
        str | None, typer.Option(help="Seconds that a requeue pauses a job, or the word measured (default: 30).")
    ] = None,
    idealized: Annotated[
        bool, typer.Option("--idealized", help="Simulate as published studies do: without Slurm, companion and noise.")
    ] = False,
    bound: Annotated[
        bool, typer.Option("--bound", help="Compute a lower bound of the mean JCT, and what jobs spend their time on.")
    ] = False,
    figures: Annotated[Path | None, typer.Option(help="Write all figures and jobs to this file, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
    database: Annotated[str, typer.Option(help="URL of a new job database, with a cluster for each run.")] = "",
    processes: Annotated[int, typer.Option(min=0, help="Simulations at once; 0: one per core.")] = 0,
    executor: Annotated[
        str, typer.Option(help="local, or slurm: a job of this site per policy and seed; continues if called again.")
    ] = "local",
    sbatch: Annotated[str | None, typer.Option(help="sbatch's options for these jobs: '-p cpu -t 4:00:00'.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for results and logs; nodes must see it (default: ./ones-study).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Companion's setting, such as resize.dwell_s=60. Repeatable.")
    ] = None,
) -> None:
    """Compare policies on a simulated cluster in virtual time, with the real companion on it."""
    plan = _plan(SimpleNamespace(**locals()))
    from slurm_ones.bound.bound import bounds_of
    from slurm_ones.simulate.study.present import as_json, page, pictures, rows
    from slurm_ones.simulate.study.runs import run_all, summarize

    processes = processes or os.cpu_count() or 1
    d = plan.description()
    drawn = f"seed{'s' * (len(plan.seeds) > 1)} {d['seeds']}"
    costs = f"a decision {d['decisions']}, a resize costs {d['a resize']}"
    say(f"{d['work']}: {d['jobs']}, {d['cluster']}, {drawn}; {costs}; {d['engine']}", 400)
    if executor == "local":
        runs = shown(len(list(plan.runs())), lambda on_progress: run_all(plan, processes, on_progress))
    else:
        runs = _send(plan, sbatch or "", directory or Path(DIRECTORY))
    bounds = bounds_of(plan, processes) if bound else {}
    found = summarize(plan, runs, bounds)
    print_table(["", *(summary.label for summary in found)], [(row.title, row.cells) for row in rows(plan, found)])
    if figures is not None:
        text = json.dumps(as_json(plan, found, runs, bounds), indent=1, allow_nan=False)
        figures.write_text(text, encoding="utf-8")
    if html is not None:
        # Studies without a page need no Jinja2.
        from slurm_ones.show.pages import write

        write(html, "study.html", pictures=pictures(plan, runs), **page(plan, found))
    end(found)


def _plan(given: SimpleNamespace) -> StudyPlan:
    """Return the study that the options of `simulate` describe. Raises `BadInput`."""
    from slurm_ones.simulate.spec import ClusterSpec
    from slurm_ones.simulate.study.plan import Source, StudyPlan

    usual = QUICK_S if given.workload == QUICK_MIX else USUAL_S if given.resize == "requeue" else HOT_S
    interval = usual if given.interval is None else given.interval
    for wrong, why in (
        (not 0 < interval < math.inf, f"--interval: {interval} is not above 0"),
        (given.idealized and given.settings, "--set: the companion's settings, which --idealized does not use"),
        (given.network and not given.idealized, "--network: only --idealized simulates leaf switches"),
        (given.executor not in EXECUTORS, f"--executor: {given.executor!r:.40} is neither local nor slurm"),
        (
            given.executor == "slurm" and given.database,
            "--database: only with --executor local, since jobs of the site open no database",
        ),
        (
            given.executor == "local" and (given.sbatch is not None or given.directory is not None),
            "--sbatch and --directory: only with --executor slurm",
        ),
    ):
        if wrong:
            raise BadInput(why)
    plan = StudyPlan(
        source=Source(**{field.name: getattr(given, field.name) for field in fields(Source)}),
        contenders=tuple(parse_policy(text) for text in given.policy or ["ones"]),
        seeds=tuple(range(given.first_seed, given.first_seed + given.seeds)),
        cluster=ClusterSpec(
            slow_nodes=parse_slow_nodes(given.slow_nodes) if given.slow_nodes else (),
            network=parse_network(given.network) if given.network else None,
            parts=parse_cluster(given.cluster),
        ),
        interval_s=interval,
        mechanism=parse_mechanism(given.resize, given.resize_cost),
        idealized=given.idealized,
        settings=parse_pairs("--set", given.settings or ()),
    )
    check_outputs(given.figures, given.html)
    plan.check()
    return plan.with_database(given.database)


def _send(plan: StudyPlan, sbatch: str, directory: Path) -> list[StudyRun]:
    """Run each simulation of the study as a job of the site's Slurm. Return the results."""
    from slurm_ones.simulate.study.jobs import StudyJobs, StudyQueue
    from slurm_ones.simulate.study.runs import StudyFolder

    folder = StudyFolder(directory.absolute())
    jobs = StudyJobs(folder.jobs, parse_sbatch(sbatch))
    with folder.locked():
        study = StudyQueue(plan, folder, jobs, inform)
        return shown(study.left, study.run)


def print_table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
    """Print a study's table, with a mean in each cell and its confidence interval below it."""
    first, *others = (safe(head, 60) for head in heads)
    table = grid(first, *others, right=others)
    for title, cells in rows:
        table.add_row(safe(title), *(f"{mean}\n({between})" if between else mean for mean, between in cells))
    console.print(table)


def end(found: Sequence[ContenderSummary]) -> None:
    """Print the errors of a study, and exit with code 1 if there are any."""
    failed = [f"{summary.label}: {error}" for summary in found for error in summary.errors]
    for line in failed:
        complain(line)
    if failed:
        raise typer.Exit(1)


# -- progress on stderr: a bar on a terminal, lines elsewhere ----------------------------------------------------------


class ProgressLines:
    """Progress where stderr is no terminal: a line at the end of each run, and at least every `EVERY_S` seconds."""

    EVERY_S = 15.0

    def __init__(self, runs: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Report progress by calling `write` with each line. `runs` is the total number of runs."""
        self._runs = runs
        self._write = write
        self._clock = clock
        self._began = self._written = clock()
        self._latest: dict[tuple[str, int], RunProgress] = {}

    def __call__(self, progress: RunProgress) -> None:
        key = progress.label, progress.seed
        before = self._latest.get(key)
        if before is not None and before.finished:
            return
        if progress.finished and before is not None:
            progress = replace(before, finished=True)
        self._latest[key] = progress
        now = self._clock()
        if progress.finished or now - self._written >= self.EVERY_S:
            self._written = now
            self._write(self._line(progress, now - self._began))

    def _line(self, progress: RunProgress, elapsed_s: float) -> str:
        done = sum(one.share for one in self._latest.values()) / self._runs
        finished = sum(one.finished for one in self._latest.values())
        left = seconds(elapsed_s * (1.0 - done) / done) if done > 0 else "–"
        return (
            f"{finished} of {self._runs} runs done after {seconds(elapsed_s)}, about {left} left; {progress.label}, "
            f"seed {progress.seed}: {progress.ended} of {progress.jobs} jobs ended in "
            f"{seconds(progress.simulated_s)} of simulated time{', done' * progress.finished}"
        )


def shown(runs: int, run: Callable[[OnProgress], Found]) -> Found:
    """Return the result of `run`, a function that does `runs` simulations, and show its progress on stderr."""
    if not errors.is_terminal:
        return run(ProgressLines(runs, inform))
    shares: dict[tuple[str, int], float] = {}
    with bars(TaskProgressColumn(), TextColumn("{task.fields[last]}"), TimeElapsedColumn()) as bar:
        task = bar.add_task(f"{runs} runs", total=float(runs), last="")

        def on_progress(progress: RunProgress) -> None:
            key = progress.label, progress.seed
            shares[key] = max(progress.share, shares.get(key, 0.0))
            bar.update(task, completed=sum(shares.values()), last=f"{safe(key[0], 40)}, seed {key[1]}")

        return run(on_progress)


def inform(line: str) -> None:
    """Print a sentence on stderr, above the progress bar if there is one."""
    errors.print(plain(line, 1000), markup=False, soft_wrap=True)
