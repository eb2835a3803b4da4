"""The JSON API: the same objects as the commands', for the same people as the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from slurm_ones.show import api
from slurm_ones.show.columns import DECISION, JOB, NODE, RESIZE
from tests.commands import printed
from tests.show.conftest import TOKEN, Page

Serve = Callable[..., Page]
LISTS = ("jobs", "nodes", "decisions")


def get(page: Page, path: str, **headers: str) -> Any:
    status, answered, text = page.get(f"{api.BASE}/{path}", **headers)
    assert (status, answered["content-type"]) == (200, "application/json"), text
    return json.loads(text)


def test_objects_are_those_of_the_commands(serve: Serve) -> None:
    page = serve()
    jobs = get(page, "jobs")
    assert jobs == printed("jobs", "--database", page.url, "--json") and len(jobs) >= 4
    assert get(page, "nodes") == printed("top", "--database", page.url, "--json")["nodes"]
    assert get(page, "jobs/7") == printed("why", "7", "--last", "20", "--database", page.url, "--json")
    assert {one["job_id"] for one in get(page, "decisions")} <= {job["job_id"] for job in jobs}
    assert get(page, "decisions")


def test_only_with_the_token(serve: Serve) -> None:
    """A program names it in a header; whoever has none, or a wrong one, learns nothing."""
    page = serve()
    for path in (*LISTS, "jobs/7", "openapi.json"):
        assert get(page, path, Cookie="", Authorization=f"Bearer {TOKEN}")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
            status, _, text = page.get(f"{api.BASE}/{path}", Cookie="", **headers)
            assert status == 403 and "{" not in text


def test_a_user_sees_their_own_jobs(serve: Serve) -> None:
    page = serve("", "X-Remote-User")
    everything = serve()
    users = {job["user"] for job in get(everything, "jobs")}
    assert len(users) > 1
    for user in sorted(one for one in users if one.isascii() and one.isprintable()):
        own = {job["job_id"] for job in get(page, "jobs", **{"X-Remote-User": user})}
        assert own and own < {job["job_id"] for job in get(everything, "jobs")}
        assert {one["job_id"] for one in get(page, "decisions", **{"X-Remote-User": user})} <= own
        held = {one["job_id"] for node in get(page, "nodes", **{"X-Remote-User": user}) for one in node["held"]}
        assert held <= own
        for job in get(everything, "jobs"):
            status, _, _ = page.get(f"{api.BASE}/jobs/{job['job_id']}", **{"X-Remote-User": user})
            assert status == (200 if job["job_id"] in own else 404)
    assert page.get(f"{api.BASE}/jobs")[0] == 403


@pytest.mark.parametrize("path", ["users", "jobs/4711", "jobs/x", f"jobs/{'9' * 300}", "", "../decisions.x"])
def test_what_is_not_there(serve: Serve, path: str) -> None:
    """A wrong path is a 404, not an error of the server."""
    assert serve().get(f"{api.BASE}/{path}")[0] == 404


def test_openapi_says_what_is_there(serve: Serve) -> None:
    """Whoever generates a client from it reaches each path, and finds each field that an object has."""
    page = serve(root="/node/n1")
    found = get(page, "openapi.json")
    assert found["openapi"].startswith("3.1") and found["servers"] == [{"url": "/node/n1/api/v1"}]
    for path in found["paths"]:
        get(page, re.sub(r"\{job_id\}", "7", path).lstrip("/"))
    for name, columns in (("Job", JOB), ("Node", NODE), ("Decision", DECISION), ("Resize", RESIZE)):
        assert {*found["components"]["schemas"][name]["properties"]} == {one.name for one in columns if one.json}
    assert {*get(page, "jobs")[0]} == {*found["components"]["schemas"]["Job"]["properties"]}
