"""HTML pages that need nothing else: of a cluster's elastic jobs, and of a study. The templates escape all text."""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ones_db import Store
from slurm_ones.show.charts import Lane, Panel, draw_gpus, study_charts
from slurm_ones.text import per_gpu, plain, resized, seconds, starts, troubles


@dataclass(frozen=True)
class Acted:
    """One decision about one job that was carried out, and what came of it."""

    at: float
    job: str
    change: str
    reason: str
    steps: str


def _acted(store: Store) -> list[Acted]:
    names = {job.job_id: job.name for job in store.job_summaries()}
    runs = {(job_id, run.restart): run for job_id in names for run in store.runs(job_id)}
    reasons = {
        (decision.id, job.job_id): str(job.reason)
        for decision in store.recent_decisions(1000)
        for job in decision.jobs
        if job.acted
    }
    found = []
    resizes = store.resizes()
    begun = starts(resizes, runs)
    for resize in resizes:
        steps = ", ".join(f"{s.state} {s.time - resize.started:.1f} s" for s in store.resize_steps(resize.id))
        shapes = resized(resize.old_shape, resize.new_shape, old_kind=resize.old_kind, new_kind=resize.new_kind)
        pause = f"; paused {seconds(resize.pause_s)}" if resize.pause_s is not None else ""
        start = f"; the start after it: {begun[resize.id]}" if resize.id in begun else ""
        found.append(
            Acted(
                at=resize.started,
                job=names.get(resize.job_id, str(resize.job_id)),
                change=f"{shapes}, batch {resize.old_batch or '–'} → {resize.new_batch or '–'}",
                reason=reasons.get((resize.decision_id or 0, resize.job_id), ""),
                steps=f"{steps}: {resize.outcome!s}{pause}{start}",
            )
        )
    return found


def environment() -> Any:
    """Jinja2's environment of this folder's templates, in which all text is escaped."""
    from jinja2 import Environment, PackageLoader

    made = Environment(loader=PackageLoader("slurm_ones.show", ""), autoescape=True)
    made.filters["plain"] = plain
    made.filters["seconds"] = seconds
    return made


def write(path: Path, template: str, **values: Any) -> None:
    """Write a page from one of this folder's templates."""
    written = time.strftime("%Y-%m-%d %H:%M")
    path.write_text(environment().get_template(template).render(written=written, **values), encoding="utf-8")


def write_page(path: Path, store: Store, panels: list[Panel], found: dict[str, Any], note: str) -> None:
    """Write the page of a demo: the picture, the two tables, and `note` about what they are worth.

    `found` is what the demo's `result.json` holds.
    """
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "gpus.png"
        draw_gpus(panels, picture)
        image = base64.b64encode(picture.read_bytes()).decode()
    decisions = _acted(store)
    jobs = store.job_summaries()
    write(
        path,
        "demo.html",
        image=image,
        alone={job["name"]: job for job in found["slurm"]["jobs"]},
        found=found,
        note=note,
        decisions=decisions,
        per_gpu={job.name: per_gpu(job) for job in jobs},
        troubles=[(job.name, trouble) for job in jobs for trouble in troubles(job)],
        begin=decisions[0].at if decisions else 0.0,
    )


def write_study(path: Path, lanes: Sequence[Lane], groups: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Write the page of a study. `groups` gives each job's kind by its name: jobs of a kind have a colour in common."""
    from markupsafe import Markup

    drawn = study_charts(lanes, groups) if any(lane.bars for lane in lanes) else {}
    if not any(lane.goodput for lane in lanes):
        drawn.pop("goodput", None)
    write(path, "study.html", pictures={name: Markup(svg) for name, svg in drawn.items()}, **values)
