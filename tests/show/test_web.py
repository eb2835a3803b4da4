"""The live page on a real server: who sees what, how a tick reaches viewers, and what hostile input becomes."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from ones_db import HealthRecord, Store, StoreError, TimelineRow
from ones_db.shape import Shape
from ones_wrapper.protocol import RUN_URL, directory_name
from slurm_ones.config import Settings
from slurm_ones.show import app as web_app
from slurm_ones.show import connections, live
from slurm_ones.show.app import address
from slurm_ones.show.feed import TickFeed
from slurm_ones.show.logs import Logs
from slurm_ones.show.pictures import MOST_SHAPES, gpus_over_time
from tests.commands import call
from tests.db.make import job
from tests.show.conftest import TOKEN, Page
from tests.waiting import until

Serve = Callable[..., Page]
OURS = {
    *("html", "head", "meta", "title", "link", "script", "body", "header", "nav", "main", "section", "h1", "h2"),
    *("a", "b", "i", "p", "div", "span", "small", "ul", "li", "label", "input", "table", "thead", "tbody", "tr", "th"),
    *("td", "figure", "figcaption", "svg", "rect", "line", "polyline", "circle", "text", "defs", "pattern", "dl", "dt"),
    *("dd", "code"),
}
PAGES = ("/", "/decisions", "/jobs/7", "/jobs/9", "/jobs/10")


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_cluster_at_a_glance(serve: Serve) -> None:
    """Protects the first page: how the companion is, why a job waits, who is on which node."""
    page = serve()
    status, _, text = page.get("/")
    assert status == 200
    assert "The companion runs in mode act" in text and "Waiting jobs, and why" in text
    assert "waits-for-gpus" in text and "reason 8" in text
    assert (
        'href="/jobs/10"' in text
        and "n3" in text
        and 'class="gpus"><i class="held ' + page.web.feed.moment.colour(10) in text
    )
    # Numbers and picture, then who runs, who waits and why, who ended, and the nodes.
    places = [text.index(f'<section id="{one}"') for one in ("health", "gpus", "jobs", "waiting", "ended", "nodes")]
    assert places == sorted(places) and text.count("<rect") >= 1


def test_a_job(serve: Serve) -> None:
    """Protects the page of a job: why, throughput by size, loss, resizes with their steps."""
    page = serve()
    _, _, trains = page.get("/jobs/10")
    assert "Why this size?" in trains and "reason 10" in trains and "Useful throughput by size" in trains
    assert "Loss" in trains and "Accuracy" in trains and trains.count('<circle class="point"') == 9
    _, _, resized = page.get("/jobs/7")
    assert "1x1 → 1x4, batch 64 → 256" in resized and "drained 100.0 s" in resized and "running at 1x4" in resized
    assert page.get("/jobs/4711")[0] == 404
    assert page.get("/jobs/x")[0] == 404 and page.get(f"/jobs/{'9' * 300}")[0] == 404


@pytest.mark.parametrize("path", PAGES)
def test_names_are_text_and_nothing_else(serve: Serve, path: str) -> None:
    """Protects viewers' browsers from names, reasons and comments: no element, attribute or style but ours."""
    _, headers, text = serve().get(path)
    found = Elements(text)
    assert "\x1b" not in text and "\x07" not in text
    assert set(found.tags) <= OURS
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "style"]
    assert found.tags.count("script") == 1
    assert "default-src 'none'" in headers["content-security-policy"] and headers["x-content-type-options"] == "nosniff"


def test_only_with_the_token(serve: Serve) -> None:
    """Protects a site's jobs from other users of the machine on which the page is served."""
    page = serve()
    for path in (*PAGES, "/events", "/?token=wrong", "/?token="):
        status, _, text = page.get(path, Cookie=page.cookie + "x")
        assert status == 403 and "trains" not in text
    status, headers, _ = page.get(f"/decisions?token={TOKEN}", Cookie="")
    assert status == 303 and headers["location"] == "/decisions"
    # A link on another site's page is to work: a browser keeps a stricter cookie back there.
    assert "HttpOnly" in headers["set-cookie"] and "samesite=lax" in headers["set-cookie"].lower()
    assert page.get("/?" + "x" * 3000)[0] == 414
    assert page.get("/static/style.css")[0] == 200
    assert page.get("/static/..%2fapp.py")[0] == 404 and page.get("/static/app.py")[0] == 404


def test_pages_of_one_host_do_not_log_each_other_out(serve: Serve) -> None:
    """Protects whoever has two pages open: a browser sends all cookies of a host to each of its ports and paths."""
    pages = [serve(), serve("another"), serve("third", root="/node/n1/8675")]
    jar: dict[str, str] = {}
    for page, token in zip(pages, (TOKEN, "another", "third"), strict=True):
        _, headers, _ = page.get(f"/?token={token}", Cookie="")
        name, _, value = headers["set-cookie"].split(";")[0].partition("=")
        jar[name] = value
    for page in pages:
        assert page.get("/", Cookie="; ".join(f"{name}={value}" for name, value in jar.items()))[0] == 200


def test_a_proxys_user_sees_their_own_jobs_alone(serve: Serve) -> None:
    """Protects users from each other behind a proxy that names them; nobody is seen where nobody is named."""
    page = serve("", "X-User")
    _, _, text = page.get("/", **{"X-User": "bob"})
    assert "trains" in text and "job7" not in text and "owned" not in text
    assert page.get("/jobs/7", **{"X-User": "bob"})[0] == 404
    assert page.get("/jobs/7", **{"X-User": "alice"})[0] == 200
    for query in ("", "?before=999"):
        _, _, decided = page.get(f"/decisions{query}", **{"X-User": "bob"})
        assert "reason 10" in decided and "reason 7" not in decided
    for query in ("?before=1", "?changes=1&before=1"):
        assert "There are none." in page.get(f"/decisions{query}", **{"X-User": "bob"})[2]
    assert page.get("/")[0] == 403


def test_the_log_and_the_logger_of_ones_own_job(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Protects a page from the job's log as markup, from another's file, and a link from anything but an address."""
    (folder := tmp_path / directory_name(10)).mkdir()
    link = folder / RUN_URL
    link.write_text("https://wandb.example.org/lab/x/runs/<b>7")
    found = Logs(Settings(), own_only=True)
    assert found.address(10, str(tmp_path)) == link.read_text()
    for other in ("javascript:alert(1)", "https://a b", "\nhttp://x\ny"):
        link.write_text(other)
        assert found.address(10, str(tmp_path)) == ""
    assert found.address(11, str(tmp_path)) == ""
    monkeypatch.setattr(found, "tail", lambda job_id, most, work_dir: ["step 3 <b>"])
    monkeypatch.setattr(found, "address", lambda job_id, work_dir: "https://wandb.example.org/?a=<b>")
    _, _, text = serve(logs=found).get("/jobs/10")
    assert "step 3 &lt;b&gt;</pre>" in text and 'href="https://wandb.example.org/?a=&lt;b&gt;"' in text
    assert "End of its log" not in serve().get("/jobs/10")[2]


def test_a_log_that_cannot_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that is closed, or whose name no file system takes: all else of the page is shown."""
    found = Logs(Settings())
    monkeypatch.setattr("slurm_ones.show.logs.connect", lambda settings: Mock(details=lambda job_ids: {}))
    assert found.tail(7, 3, f"/{'x' * 300}") == ["Slurm no longer knows where the log of job 7 is"]


def test_below_a_proxys_path(serve: Serve) -> None:
    page = serve(root="/node/n1/8675/")
    _, _, text = page.get("/")
    assert 'href="/node/n1/8675/jobs/10"' in text and 'data-root="/node/n1/8675"' in text
    assert 'src="/node/n1/8675/static/live.js"' in text and '="/static' not in text and '="/jobs' not in text
    _, headers, _ = page.get(f"/?token={TOKEN}", Cookie="")
    assert headers["location"] == "/node/n1/8675/" and "Path=/node/n1/8675" in headers["set-cookie"]
    assert address("::1", 1, "/a/", "t&t") == "http://[::1]:1/a/?token=t%26t"


@pytest.mark.parametrize("below", ["", "/node/n1/8675"])
def test_a_proxy_may_take_its_path_away_or_pass_it_on(serve: Serve, below: str) -> None:
    page = serve(root="/node/n1/8675/")
    for path in (*PAGES, "/static/live.js"):
        assert page.get(below + path)[0] == 200, path
    _, headers, _ = page.get(f"{below}/jobs/7?token={TOKEN}", Cookie="")
    assert headers["location"] == "/node/n1/8675/jobs/7"


def test_a_user_that_is_named_twice_is_nobody(serve: Serve) -> None:
    """Protects users from each other where a proxy adds its header to the client's own."""
    page = serve("", "X-User")
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.putrequest("GET", "/")
    for user in ("alice", "bob"):
        connection.putheader("X-User", user)
    connection.endheaders()
    assert connection.getresponse().status == 403
    assert "the jobs of bob alone" in page.get("/", **{"X-User": "bob"})[2]


def test_a_companion_that_falls_silent(serve: Serve) -> None:
    """Protects viewers from a companion that has died, of which no tick tells."""
    page = serve()
    assert "The companion runs" in page.get("/")[2]
    with Store.open(page.url, "gres") as store:
        health = store.health()
        assert health is not None and health.tick_time is not None
        store.record_health(health._replace(interval_s=0.5))
    until(lambda: "The companion is silent: its last tick was at" in page.get("/")[2])


def test_what_failed_once_is_made_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects viewers from one failure that stays until the next tick, and the watcher from any failure."""
    page = serve()
    opened = page.web._opened

    def away() -> Store:
        raise StoreError("away")

    page.web._opened = away
    assert page.get("/jobs/7")[0] == 503
    page.web._opened = opened
    assert page.get("/jobs/7")[0] == 200

    def odd() -> object:
        raise ValueError("odd")

    monkeypatch.setattr(page.web.feed, "_look", odd)
    until(lambda: "cannot be read: odd" in page.get("/")[2])
    monkeypatch.undo()
    until(lambda: "cannot be read" not in page.get("/")[2])


def test_many_jobs_are_drawn_to_the_end() -> None:
    """Protects the picture of a large cluster: bounded, and the jobs that run now are in it."""
    rows = [
        TimelineRow(n, f"job{n}", "alice", "gpu", 1, 0, Shape(1, 1), float(n), float(n + 100) if n < 900 else None)
        for n in range(1000)
    ]
    drawn = str(gpus_over_time(rows, 128, 0.0, 1000.0))
    assert drawn.count("<path") <= 1000 and drawn.count("M") <= MOST_SHAPES
    assert "job 5 job5: 1 GPUs" in drawn and "job 990 job990: 1 GPUs" in drawn


@pytest.mark.slow
@pytest.mark.parametrize(("host", "then"), [("127.0.0.1", "From your own machine: ssh -L "), ("127.0.0.2", "Ctrl-C")])
def test_ctrl_c_ends_it_while_browsers_listen(url: str, host: str, then: str) -> None:
    """Protects a user who stops it, by hand or by systemd, from waiting for every browser to be closed; and one who
    lets it choose its port: no other process has it, and one that another has is refused with a sentence. A tunnel to
    localhost is printed only if it leads there."""
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "slurm_ones.cli", "web", "--port", "0", "--host", host, "--database", url]
    environment = {**os.environ, "SLURM_ONES_WEB_TOKEN": TOKEN, "SSH_CONNECTION": "there"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = re.fullmatch(rf"The live page: http://{host}:(\d+)/\?token={TOKEN}\n", process.stdout.readline())
        assert told is not None and process.stdout.readline().startswith(then)
        refused = call("web", "--port", told[1], "--host", host, "--database", url)
        assert refused.exit_code == 1
        assert f"port {told[1]} (Address already in use); name another --port" in refused.output
        connection = http.client.HTTPConnection(host, int(told[1]), timeout=60)
        connection.request("GET", "/events", headers={"Cookie": f"slurm-ones-{told[1]}={TOKEN}"})
        assert connection.getresponse().readline().startswith(b"retry")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def listener(page: Page) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", "/events", headers={"Cookie": page.cookie})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.readline()
    assert answer.readline().startswith(b"data: ")
    answer.readline()
    return answer


def told(answer: http.client.HTTPResponse) -> bytes:
    """The next event, past signs of life."""
    while not (line := answer.readline()).startswith(b"data: "):
        assert line in (b": here\n", b"\n"), line
    return line


@pytest.mark.slow
def test_one_look_a_tick_for_a_hundred_viewers(serve: Serve) -> None:
    """Protects the database: each tick is read once, and each page made once, whatever the number of viewers."""
    page = serve()
    listeners = [listener(page) for _ in range(100)]
    looks, made = page.web.feed.looks, []
    render = web_app.pages.overview
    web_app.pages.overview = lambda moment, **rest: made.append(moment.number) or render(moment, **rest)
    try:
        with Store.open(page.url, "gres") as store:
            store.record_jobs([job(11, name="newcomer", state="PENDING")])
        page.tick(time.time() + 1)
        for answer in listeners:
            assert told(answer)
            assert "newcomer" in page.get("/?part=1")[2]
    finally:
        web_app.pages.overview = render
    assert page.web.feed.looks == looks + 1 and len(made) == 1


def test_viewers_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the server from a page that is opened too often; who leaves makes room."""
    monkeypatch.setattr(web_app, "VIEWERS", 2)
    monkeypatch.setattr(web_app, "BEAT_S", 0.1)
    page = serve()
    first, second = listener(page), listener(page)
    assert page.get("/events")[0] == 503
    assert second.fp is not None
    second.close()
    until(lambda: page.web._viewers < 2)
    listener(page)
    assert first.readline() == b": here\n"


def test_a_database_that_is_away(serve: Serve, tmp_path: Path) -> None:
    """Protects viewers from old figures that pass for new ones; the page comes back by itself."""
    page = serve()
    file = tmp_path / "ones.sqlite"
    file.rename(tmp_path / "away")
    until(lambda: "cannot be read" in page.get("/")[2])
    (tmp_path / "away").rename(file)
    until(lambda: "cannot be read" not in page.get("/")[2])


def test_another_file_in_the_place_of_the_database(serve: Serve, tmp_path: Path, empty_sqlite: Path) -> None:
    """Protects viewers from a connection that stays with a file which was replaced, as by a restored copy."""
    page = serve()
    copy = f"sqlite:///{tmp_path / 'copy.sqlite'}"
    shutil.copy(empty_sqlite, tmp_path / "copy.sqlite")
    with Store.open(copy, "gres") as store:
        store.record_jobs([job(21, name="restored", state="PENDING")])
        store.record_health(HealthRecord(time.time(), "act", 60.0, time.time(), 0.25, 0, 1, 0))
    (tmp_path / "copy.sqlite").rename(tmp_path / "ones.sqlite")
    until(lambda: "restored" in page.get("/")[2])
    assert "waits-for-gpus" not in page.get("/")[2]


def test_a_database_that_is_upgraded_meanwhile(serve: Serve, tmp_path: Path) -> None:
    """Protects viewers from what an older version makes of a newer schema: the connection stays, and is asked again."""
    page = serve()
    with closing(sqlite3.connect(tmp_path / "ones.sqlite")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    until(lambda: "schema 9999 is newer" in page.get("/")[2])


def test_the_jobs_that_ended_last_come_first(serve: Serve) -> None:
    """Protects the answer to "what has just ended": a job of days was submitted before all that ended while it ran."""
    page = serve()
    with Store.open(page.url, "gres") as store:
        ended = [job(n, name=f"short-{n}", state="COMPLETED", end_time=5000.0 + n) for n in range(31, 51)]
        store.record_jobs([*ended, job(30, name="of-days", state="COMPLETED", end_time=9000.0)])
    page.tick(time.time() + 1)
    until(lambda: "short-50" in page.get("/")[2])
    text = page.get("/")[2]
    assert text.index("of-days") < text.index("short-50") < text.index("short-32")
    assert "short-31" not in text


def test_a_job_that_ended_long_ago_still_has_its_page(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects links in old mails: of ended jobs only the last are kept at hand, and each can be looked up."""
    monkeypatch.setattr(live, "ENDED", 1)
    page = serve()
    with Store.open(page.url, "gres") as store:
        store.record_jobs([job(n, name=f"old-{n}", state="COMPLETED", end_time=5000.0 + n) for n in (30, 31)])
    page.tick(time.time() + 1)
    until(lambda: "old-31" in page.get("/")[2])
    assert "old-30" not in page.get("/")[2]
    assert page.get("/jobs/30")[0] == 200 and "old-30" in page.get("/jobs/30")[2]


@pytest.mark.slow
def test_a_user_sees_their_own_last_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects users of a busy site: jobs of others that ended since do not push theirs out, at one look for each user
    and none at a tick, but where more have ended between two ticks than a look takes."""
    monkeypatch.setattr(live, "ENDED", 3)
    monkeypatch.setattr(web_app.pages, "ENDED", 3)
    page = serve("", "X-User")

    def ended(user: str, *numbers: int) -> None:
        with Store.open(page.url, "gres") as store:
            jobs = [job(n, name=f"{user}-{n}.", user=user, state="COMPLETED", end_time=5000.0 + n) for n in numbers]
            store.record_jobs(jobs)
        number = page.web.feed.moment.number
        page.tick()
        until(lambda: page.web.feed.moment.number > number)

    def shown(user: str, known: range) -> list[int]:
        text = page.get("/", **{"X-User": user})[2]
        return [n for n in known if f"{user}-{n}." in text]

    ended("bob", 31, 32)
    ended("carol", 33, 34, 35)
    assert shown("bob", range(30, 99)) == [31, 32] and shown("carol", range(30, 99)) == [33, 34, 35]
    assert page.web.feed.looks_of_users == 2
    ended("bob", 36)
    assert shown("bob", range(30, 99)) == [31, 32, 36]
    ended("bob", 37)
    assert shown("bob", range(30, 99)) == [32, 36, 37]
    ended("carol", 38, 39)
    assert shown("bob", range(30, 99)) == [32, 36, 37]
    assert page.web.feed.looks_of_users == 2
    ended("bob", 40)
    ended("carol", 41, 42, 43)
    assert shown("bob", range(30, 99)) == [36, 37, 40] and page.web.feed.looks_of_users == 3
    assert page.get("/jobs/40", **{"X-User": "carol"})[0] == 404


def test_an_older_job_is_not_shown_to_another_user(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects users from each other also where a job is looked up by itself."""
    monkeypatch.setattr(live, "ENDED", 0)
    page = serve("", "X-User")
    with Store.open(page.url, "gres") as store:
        store.record_jobs([job(30, user="alice", state="COMPLETED", end_time=5000.0)])
    page.tick(time.time() + 1)
    until(lambda: page.get("/jobs/30", **{"X-User": "alice"})[0] == 200)
    assert page.get("/jobs/30", **{"X-User": "bob"})[0] == 404


def hang_up(connection: socket.socket) -> bool:
    """Wait until the server hangs up; tell whether it did within 25 s."""
    connection.settimeout(25)
    # Reset or ended, both will do.
    with suppress(ConnectionResetError):
        try:
            return connection.recv(100) == b""
        except TimeoutError:
            return False
    return True


def test_who_says_nothing_is_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects viewers from connections that ask for nothing, or for half of something, until none is left."""
    page = serve()
    listening = listener(page)
    monkeypatch.setattr(connections, "HEADER_S", 0.2)
    for said in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(("127.0.0.1", page.port), timeout=30) as silent:
            silent.sendall(said)
            assert hang_up(silent)
    page.tick(time.time() + 1)
    assert told(listening)


def test_who_opens_most_loses_the_oldest(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects viewers from a user who opens more connections than there are: theirs are not closed for his, not even
    one that has said nothing yet, nor one that listens."""
    monkeypatch.setattr(connections, "CONNECTIONS", 60)
    monkeypatch.setattr(connections, "HEADER_S", 60.0)
    others: set[int] = set()
    monkeypatch.setattr(connections, "user_of", lambda client, server: int(client[1] in others))
    page = serve()
    listening = listener(page)
    early = socket.create_connection(("127.0.0.1", page.port), timeout=60)
    with ExitStack() as opened:
        for _ in range(150):
            one = opened.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            others.add(one.getsockname()[1])
            one.connect(("127.0.0.1", page.port))
        assert page.get("/")[0] == 200
        early.sendall(f"GET / HTTP/1.0\r\nCookie: {page.cookie}\r\n\r\n".encode())
        assert b" 200 " in early.recv(20)
    early.close()
    page.tick(time.time() + 1)
    assert told(listening)


def test_a_peer_has_so_many_strangers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects viewers from a user who keeps the server busy by connections: more than a few are closed at once, and
    those of viewers count only until they are let in."""
    assert connections.OPTIONS["loop"] == "asyncio", "uvloop would not ask our socket"
    monkeypatch.setattr(connections, "STRANGERS", 5)
    monkeypatch.setattr(connections, "COUNT_S", 0.0)
    for limit in ("HEADER_S", "PATIENCE_S"):  # by which they would be closed, too
        monkeypatch.setattr(connections, limit, 600.0)
    page = serve()
    viewers = [listener(page) for _ in range(7)]
    # Of those that are accepted together a new count finds none.
    monkeypatch.setattr(connections, "COUNT_S", 600.0)
    with ExitStack() as opened:
        held = [opened.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=30)) for _ in range(12)]
        assert all(hang_up(one) for one in held[5:])
        monkeypatch.setattr(connections, "user_of", lambda client, server: 1)
        assert page.get("/")[0] == 200, "another user"
    page.tick(time.time() + 1)
    assert all(told(one) for one in viewers)


def test_the_kernel_knows_who_connects(serve: Serve) -> None:
    """Protects the rule above: by the other end's port, on loopback."""
    port = serve().port
    with socket.create_connection(("127.0.0.1", port)) as one:
        assert connections.user_of(one.getsockname(), ("127.0.0.1", port)) == os.geteuid()
    assert connections.user_of(("127.0.0.1", 1), ("127.0.0.1", port)) is None
    assert connections.user_of(("::1", 1), ("127.0.0.1", port)) is None


def test_a_request_says_its_length_once(serve: Serve) -> None:
    """Protects viewers behind a proxy that believes the other one, from a request hidden in the rest."""
    page = serve()
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as one:
        body = b"0\r\n\r\nGET /decisions HTTP/1.1\r\n\r\n"
        head = f"GET / HTTP/1.1\r\nHost: x\r\nCookie: {page.cookie}\r\nContent-Length: {len(body)}\r\n"
        one.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        answer = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


def test_strangers_fill_no_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Protects the log from whoever reaches the port: no request without the token writes a line, not even of numbers
    that Python refuses, nor of what is no request."""
    page = serve()
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    try:
        for path in ("/jobs/", "/api/v1/jobs/"):
            assert page.get(path + "9" * 5_000, Cookie="")[0] == 403
            assert page.get(path + "9" * 5_000)[0] == page.get(path + "x")[0] == 404
        with socket.create_connection(("127.0.0.1", page.port), timeout=30) as one:
            one.sendall(b"\0\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_page_that_was_there_before_the_companion(empty_url: str) -> None:
    """Protects the first one to look: a page over a new database shows the companion once there is one."""
    url = empty_url
    feed = TickFeed(lambda: Store.open(url, "gres", read_only=True))
    first = feed._look()
    assert first is not None and first.live.health is None
    with Store.open(url, "gres") as store:
        now = time.time()
        store.record_health(HealthRecord(now, "act", 60.0, now, 0.25, 2, 2, 6))
    then = feed._look()
    assert then is not None and then.live.health is not None
    feed._close()


def test_the_first_page_waits_for_the_first_read(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a reader who opens the address at once from a page that denies jobs and companion."""
    monkeypatch.setattr("slurm_ones.show.feed.FIRST_S", 60.0)
    feed = TickFeed(lambda: Store.open(empty_url, "gres", read_only=True))

    async def opened_at_once() -> bytes:
        page = asyncio.ensure_future(feed.once("", "overview", lambda moment: str(moment.number).encode()))
        await asyncio.sleep(0)
        reader = asyncio.ensure_future(feed.run())
        try:
            return await page
        finally:
            reader.cancel()

    assert asyncio.run(opened_at_once()) == b"1"
    feed._close()
