"""Views for people: text, charts, and HTML pages."""

from __future__ import annotations

from importlib.util import find_spec


def page_lacks() -> list[str]:
    """Return the names of packages that the live page needs and that are not installed."""
    return [name for name in ("starlette", "uvicorn", "jinja2") if find_spec(name) is None]
