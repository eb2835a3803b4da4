"""JSON API, version 1. It returns the same objects as commands with --json, for the jobs that the reader may see.

`show.columns` declares the fields of each object, from which OpenAPI's schemas are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import slurm_ones
from ones_db import Store
from slurm_ones.show.columns import DECISION, JOB, NODE, RESIZE, ShownColumn, record, to_json
from slurm_ones.show.feed import Moment
from slurm_ones.show.live import node_rows
from slurm_ones.show.why import explain, with_names

BASE = "/api/v1"
KIND = "application/json"
DECISIONS = 20
"""Number of decisions that the API returns: the newest."""
OBJECTS: Mapping[str, tuple[str, Sequence[ShownColumn[Any]]]] = {
    "Job": ("a job that opted in", JOB),
    "Node": ("a node, and who holds its GPUs", NODE),
    "Decision": ("what a decision gives one job", DECISION),
    "Resize": ("a resize of one job", RESIZE),
}


def jobs(moment: Moment, opened: Callable[[], Store]) -> bytes:
    """Jobs that have not ended, and the last ended ones, as `slurm-ones jobs --json` prints them."""
    return _text([record(JOB, one) for one in moment.live.jobs])


def nodes(moment: Moment, opened: Callable[[], Store]) -> bytes:
    """Nodes, as `slurm-ones top --json` prints them."""
    return _text([record(NODE, one) for one in node_rows(moment.live.nodes, moment.live.held)])


def decisions(moment: Moment, opened: Callable[[], Store]) -> bytes:
    """Newest decisions, newest first, with an object for each job in them."""
    with opened() as store:
        found = with_names(store, store.recent_decisions(DECISIONS, user=moment.user))
    return _text([record(DECISION, one) for _, shown in found for one in shown])


def job(moment: Moment, opened: Callable[[], Store], job_id: int) -> bytes | None:
    """One job, as `slurm-ones why --json` prints it; None if the reader may not see it."""
    with opened() as store:
        return _text(explain(store, job_id, DECISIONS)) if moment.job(store, job_id) is not None else None


LISTS: Mapping[str, tuple[str, Callable[[Moment, Callable[[], Store]], bytes]]] = {
    "jobs": ("Job", jobs),
    "nodes": ("Node", nodes),
    "decisions": ("Decision", decisions),
}
"""Lists of the API: for each path below `BASE`, the kind of object and the function that returns the list."""


def openapi(root: str) -> bytes:
    """Return the description of the API in OpenAPI 3.1."""
    lists = {
        f"/{path}": _get(f"{kind}s", {"type": "array", "items": _of(kind)}, str(make.__doc__))
        for path, (kind, make) in LISTS.items()
    }
    whole = {
        "job": _of("Job"),
        "decisions": {"type": "array", "items": _of("Decision")},
        "resizes": {"type": "array", "items": _of("Resize")},
    }
    one = _get("Job", {"type": "object", "properties": whole}, str(job.__doc__))
    number = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "integer"}}
    one["get"] |= {"parameters": [number]}
    one["get"]["responses"]["404"] = {"description": "not among the jobs that can be seen here"}
    schemas = {
        name: {
            "type": "object",
            "description": text,
            "properties": {
                column.name: {"description": column.help + (f" ({column.unit})" if column.unit else "")}
                for column in columns if column.json
            },
        }
        for name, (text, columns) in OBJECTS.items()
    }  # fmt: skip
    return _text(
        {
            "openapi": "3.1.0",
            "info": {"title": "slurm-ones", "version": slurm_ones.__version__},
            "servers": [{"url": root + BASE}],
            "paths": lists | {"/jobs/{job_id}": one},
            "components": {
                "schemas": schemas,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"token": []}, {}],
        }
    )


def _get(name: str, schema: Mapping[str, Any], summary: str) -> dict[str, Any]:
    answer = {"description": name, "content": {KIND: {"schema": schema}}}
    refused = {"description": "without the token, or a user"}
    return {"get": {"summary": summary, "responses": {"200": answer, "403": refused}}}


def _of(kind: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind}"}


def _text(value: Any) -> bytes:
    return to_json(value).encode()
