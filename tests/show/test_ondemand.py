"""The Open OnDemand app asks the JSON API for what it has; no Open OnDemand was there to try it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from slurm_ones.show import api
from slurm_ones.show.columns import JOB

APP = Path(__file__).parents[2] / "ondemand"


def test_its_page_shows_columns_that_there_are() -> None:
    """Served as WSGI wants it; and no name of a job is ever read as HTML."""
    answers: list[Any] = []
    environ: dict[str, Any] = {"QUERY_STRING": ""}
    setup_testing_defaults(environ)
    application = validator(runpy.run_path(str(APP / "passenger_wsgi.py"))["application"])
    found = application(environ, lambda status, headers, info=None: answers.append(status) or (lambda data: None))
    page = b"".join(found).decode()
    found.close()  # type: ignore[attr-defined]
    assert answers == ["200 OK"] and f"{api.BASE[1:]}/jobs" in page and "innerHTML" not in page
    named = re.findall(r"COLUMNS = (\[.*\]);", page)
    assert {*json.loads(named[0])} <= {column.name for column in JOB if column.json}
