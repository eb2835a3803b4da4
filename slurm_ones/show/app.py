"""Web application of the live page and its JSON API. It checks access, and notifies browsers of each tick."""

from __future__ import annotations

import asyncio
import gc
import gzip
import hmac
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import files
from urllib.parse import parse_qs, quote, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from ones_db import Store
from slurm_ones.show import api, pages
from slurm_ones.show.connections import ADMITTED, UnambiguousLength
from slurm_ones.show.feed import ERRORS, Moment, TickFeed
from slurm_ones.show.logs import Logs
from slurm_ones.text import plain

VIEWERS = 1_000
"""Largest number of browsers that are notified of ticks. Any further browser polls once a minute."""
BEAT_S = 20.0
"""Longest time without a line in the stream of ticks, in seconds. A comment line keeps proxies from closing it."""
QUERY = 2_000
"""Longest query of a URL, in bytes."""
STATIC = {"live.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Web:
    """Web application over one database. A proxy may serve it below a path `root`, such as `/node/n1/8675`."""

    def __init__(
        self, opened: Callable[[], Store], token: str, root: str = "", logs: Logs | None = None, user_header: str = ""
    ) -> None:
        """Serve the database that `opened` opens, and the logs that `logs` finds.

        A request with the secret `token` shows all jobs; an empty `token` is not checked. If `user_header` is given, a
        proxy names the user in this HTTP header, and the request shows only the user's jobs.
        """
        self.feed = TickFeed(opened)
        self._opened, self._token, self._logs, self._user_header = opened, token, logs, user_header
        self._root = "/" + root.strip("/") if root.strip("/") else ""
        self._viewers = 0
        routes = [
            Route("/", self._overview),
            Route("/jobs/{job_id}", self._job),
            Route("/decisions", self._decisions),
            Route(f"{api.BASE}/{{name}}", self._api),
            Route(f"{api.BASE}/jobs/{{job_id}}", self._api_job),
            Route("/events", self._events),
            Route("/static/{name}", self._static),
        ]
        # Some proxies take the path away before they pass a request on, and some do not.
        below = [Mount(self._root, routes=routes)] if self._root else []
        self.app = Starlette(
            routes=[*below, *routes], lifespan=self._lifespan, middleware=[Middleware(UnambiguousLength)]
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # What was imported stays: not to be gone through again at each collection.
        gc.collect()
        gc.freeze()
        watching = asyncio.ensure_future(self.feed.run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    def _refused(self, request: Request) -> Response | None:
        """Return the response if a request is refused, or redirected to hide its token; None if it is allowed."""
        if len(request.scope["query_string"]) > QUERY:
            return PlainTextResponse("the query is too long\n", 414, HEADERS)
        asked = _asked(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = asked.get("token", [""])[0] or bearer or request.cookies.get(cookie(request, self._root), "")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            said = "open the address that `slurm-ones web` printed: this one has no token, or a wrong one\n"
            return PlainTextResponse(said, 403, HEADERS)
        request.scope[ADMITTED] = True
        if not self._token or "token" not in asked:
            return None
        # The token leaves the address: it could be copied or logged there by accident.
        path: str = request.scope["path"]
        whole = bool(self._root) and path.startswith(self._root + "/")
        answer = RedirectResponse(path if whole else self._root + path, 303, HEADERS)
        # Lax: a link in a mail or on a portal's page comes from another site, and is to work. Requests that other
        # sites make behind the reader's back carry no cookie, and none would change anything.
        name = cookie(request, self._root)
        answer.set_cookie(name, self._token, path=self._root or "/", httponly=True, samesite="lax")
        return answer

    def _user(self, request: Request) -> str | None:
        """Return the only user whose jobs may be shown; "" for all users, None if the proxy does not name one."""
        if not self._user_header:
            return ""
        named = request.headers.getlist(self._user_header)
        # Of two one may be the client's own.
        return (named[0] or None) if len(named) == 1 else None

    async def _page(
        self, request: Request, part: str, title: str, make: Callable[[Moment], bytes | None], view: str = ""
    ) -> Response:
        alone = _asked(request).get("part") == ["1"]

        def made(moment: Moment) -> bytes | None:
            inner = make(moment)
            return inner if inner is None or alone else pages.frame(self._root, part, title, inner, moment)

        return await self._answer(request, f"{part}:{view}:{alone}", title, made)

    async def _answer(
        self, request: Request, key: str, title: str, make: Callable[[Moment], bytes | None], kind: str = "text/html"
    ) -> Response:
        """Return what `make` renders, or 404 for None. A rendered part is cached for each user until the next tick."""
        refused = self._refused(request)
        if refused is not None:
            return refused
        user = self._user(request)
        if user is None:
            return PlainTextResponse(f"no user, or several, in the header {self._user_header}\n", 403, HEADERS)

        def made(moment: Moment) -> bytes:
            whole = make(moment)
            return b"" if whole is None else gzip.compress(whole, 1, mtime=0)

        try:
            body = await self.feed.once(user, key, made)
        except ERRORS as error:
            return PlainTextResponse(f"the database cannot be read: {plain(str(error), 500)}\n", 503, HEADERS)
        if not body:
            return PlainTextResponse(f"{title}: not among the jobs that can be seen here\n", 404, HEADERS)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(gzip.decompress(body), headers=HEADERS, media_type=kind)
        return Response(body, headers={**HEADERS, "Content-Encoding": "gzip"}, media_type=kind)

    async def _api(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "openapi.json":
            return await self._answer(request, f"api/{name}", name, lambda moment: api.openapi(self._root), api.KIND)
        if name not in api.LISTS:
            return PlainTextResponse(f"no such list; {api.BASE}/openapi.json describes the API\n", 404, HEADERS)
        make = api.LISTS[name][1]
        return await self._answer(request, f"api/{name}", name, lambda moment: make(moment, self._opened), api.KIND)

    async def _api_job(self, request: Request) -> Response:
        job_id = _job_id(request)
        make = partial(api.job, opened=self._opened, job_id=job_id)
        return await self._answer(request, f"api/jobs/{job_id}", f"Job {job_id}", make, api.KIND)

    async def _overview(self, request: Request) -> Response:
        view = pages.PageView.of(_asked(request))
        make = partial(pages.overview, root=self._root, view=view, opened=self._opened)
        return await self._page(request, "", "Cluster", make, f"{view.span}:{view.by}")

    async def _decisions(self, request: Request) -> Response:
        view = pages.DecisionView.of(_asked(request))
        make = partial(pages.decisions, root=self._root, view=view, opened=self._opened)
        return await self._page(request, "decisions", "Decisions", make, f"{view.before}:{view.changes}")

    async def _job(self, request: Request) -> Response:
        job_id = _job_id(request)
        make = partial(pages.job, root=self._root, job_id=job_id, opened=self._opened, logs=self._logs)
        return await self._page(request, f"jobs/{job_id}", f"Job {job_id}", make)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("no such file\n", 404, HEADERS)
        text = files("slurm_ones.show").joinpath(f"static/{name}").read_bytes()
        return Response(text, headers={**HEADERS, "Cache-Control": "max-age=3600"}, media_type=STATIC[name])

    async def _events(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused is not None:
            return refused
        if self._viewers >= VIEWERS:
            return PlainTextResponse(f"{VIEWERS} browsers are notified of ticks already\n", 503, HEADERS)
        return StreamingResponse(self._ticks(), headers=HEADERS, media_type="text/event-stream")

    async def _ticks(self) -> AsyncIterator[bytes]:
        """Yield a line for each tick. Lines are not queued, so a slow reader misses ticks."""
        self._viewers += 1
        try:
            number = self.feed.moment.number
            yield f"retry: 5000\ndata: {number}\n\n".encode()
            while True:
                newest = await self.feed.after(number, BEAT_S)
                yield b": here\n\n" if newest == number else f"data: {newest}\n\n".encode()
                number = newest
        finally:
            self._viewers -= 1


def cookie(request: Request, root: str) -> str:
    """Return the name of the cookie with the token. It has port and path, since browsers share cookies among ports."""
    server = request.scope.get("server") or ("", "")
    return f"slurm-ones-{server[1]}{quote(root, safe='')}"


def _job_id(request: Request) -> int:
    """Return the job id in the path; -1, which no job has, if it is no number or too long."""
    text = request.path_params["job_id"]
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else -1


def _asked(request: Request) -> dict[str, list[str]]:
    """Return the values of the URL's query by name. Bytes that are not UTF-8 are accepted."""
    query: bytes = request.scope["query_string"]
    return parse_qs(query.decode("latin-1"))


def address(host: str, port: int, root: str, token: str) -> str:
    """Return the page's URL, with the token, for a browser."""
    shown = f"[{host}]" if ":" in host else host
    path = "/" + root.strip("/") + "/" if root.strip("/") else "/"
    return f"http://{shown}:{port}{path}" + (f"?{urlencode({'token': token})}" if token else "")
