"""What the demo shows and leaves behind, and whether all that was said agrees."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.table import Table

from ones_db import Store, TimelineRow
from ones_db.shape import Shape
from slurm_ones.show.pages import write as write_page
from slurm_ones.show.pictures import gpus_over_time
from slurm_ones.text import seconds
from tests.demo.scenario import Outcome, Size

CAPACITY = 16
EMULATED = (
    "Emulated: there are no GPUs here, so each rank sleeps in proportion to its local batch. Real are Slurm, the "
    "processes, gradients, checkpoints and resizes."
)


def _entry(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.job.name,
        "user": outcome.job.user,
        "jct_s": round(outcome.jct_s, 1) if outcome.ended else None,
        "accuracy": outcome.accuracy,
        "waited_s": round(outcome.waited_s, 2) if outcome.waited_s is not None else None,
        "state": outcome.state,
        "shapes": [_shape(size) for size in outcome.sizes],
        "batches": [size.batch for size in outcome.sizes],
        "resizes": outcome.resizes,
        "preempted": outcome.unordered,
        "pauses_s": [round(pause, 2) for pause in outcome.pauses],
    }


def result(ones: list[Outcome], slurm: list[Outcome]) -> dict[str, Any]:

    def part(outcomes: list[Outcome]) -> dict[str, Any]:
        ended = [o.jct_s for o in outcomes if o.finished]
        return {
            "jobs": [_entry(o) for o in outcomes],
            "mean_jct_s": round(statistics.mean(ended), 1) if ended else None,
        }

    return {"ones": part(ones), "slurm": part(slurm), "emulated": EMULATED}


def table(found: dict[str, Any]) -> Table:
    """The demo's last word."""
    shown = Table(
        title="Ten jobs, twice: resized by slurm-ones, and at fixed sizes by Slurm alone",
        box=None,
        collapse_padding=True,
    )
    for column in ("job", "by", "GPUs over time", "batch"):
        shown.add_column(column, no_wrap=column in ("job", "by"), min_width=6)
    for column in ("JCT", "accuracy", "resizes", "preempted", "pauses"):
        shown.add_column(column, justify="right", no_wrap=True)
    alone = {job["name"]: job for job in found["slurm"]["jobs"]}
    for job in found["ones"]["jobs"]:
        shown.add_row(*_row(job["name"], "slurm-ones", job))
        shown.add_row(*_row("", "Slurm", alone[job["name"]])[:6], end_section=True)
    waits = [
        f"{job['name']} started after {job['waited_s']} s, on Slurm alone after {alone[job['name']]['waited_s']} s"
        for job in found["ones"]["jobs"]
        if job["waited_s"] is not None
    ]
    shown.caption = "\n".join([*waits, EMULATED])
    for side, who in (("ones", "slurm-ones"), ("slurm", "Slurm")):
        shown.add_row("mean", who, "", "", seconds(found[side]["mean_jct_s"]), style="bold")
    return shown


def _row(name: str, by: str, job: dict[str, Any]) -> list[str]:
    return [
        name,
        by,
        " → ".join(str(_gpus(shape)) for shape in job["shapes"]),
        " → ".join(str(batch or "–") for batch in job["batches"]),
        seconds(job["jct_s"]) if job["state"] == "COMPLETED" else job["state"],
        f"{job['accuracy']:.3f}" if job["accuracy"] is not None else "–",
        str(job["resizes"]),
        str(job["preempted"]),
        f"{sum(job['pauses_s']):.1f} s" if job["pauses_s"] else "–",
    ]


def _shape(size: Size) -> str:
    """Nodes × GPUs of each; of blocks whose nodes give unequally many, all GPUs as one node's."""
    equal = size.nodes * size.gpus_per_node == size.gpus
    return f"{size.nodes}x{size.gpus_per_node}" if equal else f"1x{size.gpus}"


def _gpus(shape: str) -> int:
    nodes, _, gpus = shape.partition("x")
    return int(nodes) * int(gpus)


def pictures(ones: list[Outcome], slurm: list[Outcome], found: dict[str, Any]) -> dict[str, Markup]:
    """GPUs over time of both runs, each from its own first submission, with one scale of time."""
    lasted = max(max(o.ended for o in side) - side[0].submitted for side in (ones, slurm))
    return {
        f"{title}: mean JCT {seconds(found[side]['mean_jct_s'])}, all done after "
        f"{seconds(max(o.ended for o in outcomes) - outcomes[0].submitted)}": gpus_over_time(
            _timeline(outcomes), CAPACITY, 0.0, lasted, elapsed=True
        )
        for title, side, outcomes in (("slurm-ones", "ones", ones), ("Slurm alone", "slurm", slurm))
    }


def _timeline(outcomes: list[Outcome]) -> list[TimelineRow]:
    begin = outcomes[0].submitted
    return [
        TimelineRow(
            number, outcome.job.name, outcome.job.user, "", CAPACITY, 0, Shape(1, size.gpus),
            size.began - begin, size.ended - begin,
        )
        for number, outcome in enumerate(outcomes, 1)
        for size in outcome.sizes
    ]  # fmt: skip


def disagreements(ones: list[Outcome], store: Store, listed: list[dict[str, Any]]) -> list[str]:
    """Where the database or `slurm-ones jobs --json` says other than Slurm and the jobs' own reports do."""
    found = []
    by_id = {job["job_id"]: job for job in listed}
    open_resizes = {resize.job_id: resize for resize in store.open_resizes()}
    for outcome in ones:
        what = f"{outcome.job.name} (job {outcome.job_id})"
        said = by_id.get(outcome.job_id)
        if said is None:
            found.append(f"{what}: not listed by slurm-ones jobs")
            continue
        if said["state"] != outcome.state:
            found.append(f"{what}: {said['state']} in the database, {outcome.state} in Slurm")
        runs = [(run.shape.nodes, run.shape.gpus_per_node, run.batch) for run in store.runs(outcome.job_id)]
        reported = [(hello.nodes, hello.gpus_per_node, hello.batch) for hello in outcome.hellos]
        if outcome.memberships:
            # Slurm has a new block before the job trains with it: sizes are compared by memberships.
            runs, reported = ([(0, 0, batch) for _, _, batch in rows] for rows in (runs, reported))
        if runs != reported:
            found.append(f"{what}: runs {runs} in the database, {reported} in its reports")
        stored = [
            (m.report.generation, m.report.blocks, m.report.world) for m in reversed(store.memberships(outcome.job_id))
        ]
        told = [(m.generation, m.blocks, m.world) for m in outcome.memberships]
        if stored != told:
            found.append(f"{what}: memberships {stored} in the database, {told} in its reports")
        if outcome.left:
            found.append(f"{what}: {outcome.left} of its tasks still wait")
        if said["accuracy"] != outcome.accuracy:
            found.append(f"{what}: accuracy {said['accuracy']} in the database, {outcome.accuracy} in its reports")
        if outcome.job_id in open_resizes:
            found.append(f"{what}: its resize is still {open_resizes[outcome.job_id].state}")
    return found


def write(folder: Path, found: dict[str, Any], drawn: dict[str, Markup]) -> None:
    """`result.json` and `gpus.html`."""
    (folder / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    sides = [([title], (), picture, "") for title, picture in drawn.items()]
    write_page(folder / "gpus.html", "usage.html", title="The demo's GPUs over time", totals=[], jobs=sides)
