"""HTML pages that need nothing else: of a cluster's elastic jobs, and of a study. The templates escape all text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_ones.show.charts import Lane, study_charts
from slurm_ones.text import plain, seconds


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


def write_study(path: Path, lanes: Sequence[Lane], groups: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Write the page of a study. `groups` gives each job's kind by its name: jobs of a kind have a colour in common."""
    from markupsafe import Markup

    drawn = study_charts(lanes, groups) if any(lane.bars for lane in lanes) else {}
    if not any(lane.goodput for lane in lanes):
        drawn.pop("goodput", None)
    write(path, "study.html", pictures={name: Markup(svg) for name, svg in drawn.items()}, **values)
