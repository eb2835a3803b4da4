"""A page about a cluster's elastic jobs: GPUs over time, every job, every decision that was carried out."""

from __future__ import annotations

import base64
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ones_db import Store
from slurm_ones.report.gpus import Panel, draw
from slurm_ones.report.text import per_gpu, plain, resized, seconds, starts, troubles


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
        (decision.id, job.job_id): job.reason.text
        for decision in store.recent_decisions(1000)
        for job in decision.jobs
        if job.acted
    }
    found = []
    resizes = store.resizes()
    begun = starts(resizes, runs)
    for resize in resizes:
        steps = ", ".join(f"{s.state} {s.time - resize.started:.1f} s" for s in store.resize_steps(resize.id))
        shapes = resized(resize.old_nodes, resize.old_gpus_per_node, resize.new_nodes, resize.new_gpus_per_node)
        pause = f"; paused {seconds(resize.pause_s)}" if resize.pause_s is not None else ""
        start = f"; the start after it: {begun[resize.id]}" if resize.id in begun else ""
        found.append(
            Acted(
                at=resize.started,
                job=names.get(resize.job_id, str(resize.job_id)),
                change=f"{shapes}, batch {resize.old_batch or '–'} → {resize.new_batch or '–'}",
                reason=reasons.get((resize.decision_id or 0, resize.job_id), ""),
                steps=f"{steps}: {resize.outcome.text}{pause}{start}",
            )
        )
    return found


def write_page(path: Path, store: Store, panels: list[Panel], found: dict[str, Any], note: str) -> None:
    """Write one HTML file that needs nothing else: the picture, the two tables, and `note` about what they are worth.

    `found` is what the demo's `result.json` holds. All text is escaped by the template engine.
    """
    from jinja2 import Environment, PackageLoader

    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "gpus.png"
        draw(panels, picture)
        image = base64.b64encode(picture.read_bytes()).decode()
    environment = Environment(loader=PackageLoader("slurm_ones.report", ""), autoescape=True)
    environment.filters["seconds"] = seconds
    environment.filters["plain"] = plain
    decisions = _acted(store)
    jobs = store.job_summaries()
    html = environment.get_template("page.html").render(
        image=image,
        alone={job["name"]: job for job in found["slurm"]["jobs"]},
        found=found,
        note=note,
        decisions=decisions,
        per_gpu={job.name: per_gpu(job) for job in jobs},
        troubles=[(job.name, trouble) for job in jobs for trouble in troubles(job)],
        begin=decisions[0].at if decisions else 0.0,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    path.write_text(html, encoding="utf-8")
