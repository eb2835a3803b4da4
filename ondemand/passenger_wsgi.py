"""Open OnDemand app: one page, which the browser fills from the JSON API behind the same host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("page.html")


def application(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer every request with the page, which holds nothing of a user's."""
    body = PAGE.read_bytes()
    policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response("200 OK", [*headers, ("Content-Security-Policy", policy)])
    return [body]
