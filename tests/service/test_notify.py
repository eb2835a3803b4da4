"""People are notified of what is new, by a receiver that answers, is slow, refuses or is away; a tick never waits."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ones_db import ResizeRecord
from ones_db.reasons import NO_REASON, reason
from ones_db.shape import Shape
from ones_wrapper.protocol.optin import BadComment, parse_comment
from slurm_ones.config import NotifySettings, parse
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.learn.nodes import SlowNode
from slurm_ones.policy.contract import Schedule
from slurm_ones.rules.plan import PartitionSchedule
from slurm_ones.service import notify
from slurm_ones.service.notify import (
    AGAIN_S,
    Happenings,
    Message,
    NotDelivered,
    Notice,
    Notifications,
    Outbox,
    as_json,
    as_mail,
    as_slack,
    deliver,
)
from tests.act.make import elastic, history
from tests.service.test_metrics import tick
from tests.test_hostile_names import NAME
from tests.waiting import until

ONE, TWO = Shape(1, 1), Shape(1, 2)
ANYTHING = st.text(max_size=30)
MESSAGE = Message("here", (Notice("resized", "grew", 1.0, 7, "train", "alice"),), 0)


def job(job_id: int = 7, **changes: Any) -> Elastic:
    return elastic(job_id, ONE, "n1", **{"name": "train", "user": "alice", **changes})


def ended(state: str = "done", code: str = "", **changes: Any) -> ResizeRecord:
    outcome = reason(code, **changes) if code else NO_REASON
    return ResizeRecord(7, 0, ONE, 32, TWO, 64, state, 1.0, ended=2.0, outcome=outcome)


def decided(code: str, **arguments: Any) -> list[PartitionSchedule]:
    return [PartitionSchedule("gpu", Schedule({}, {7: reason(code, **arguments)}), 0.1, {})]


@pytest.mark.parametrize(
    ("before", "now", "kind", "words"),
    [
        ({}, {"ended": [ended()]}, "resized", "1x1"),
        ({}, {"ended": [ended("rolled_back", "queued_too_long", seconds=300.0)]}, "cannot_resize", "waited longer"),
        ({}, {"ended": [ended("rolled_back", "block_preempted", task=3)]}, None, ""),
        ({}, {"outcomes": {7: reason("near_time_limit", seconds=300.0)}}, "limited", "near its time limit"),
        ({}, {"outcomes": {7: reason("user_cap", user="alice", gpus=4, setting="x")}}, "held_back", "alice"),
        ({}, {"decided": decided("growth_stops", job=9)}, "held_back", "job 9 waits"),
        (
            {},
            {"decided": decided("idle_returns", percent=4.0, minutes=30.0, before=8, gpus=2)},
            "held_back",
            "from 8 to 2 GPUs",
        ),
        ({}, {"decided": decided("gpus_idle", ranks=1, gpus=4)}, "cannot_resize", "uses 1 of its 4 GPUs"),
        ({}, {"outcomes": {7: reason("begins")}}, None, ""),
        ({}, {"slow_nodes": {"n1": SlowNode("n1", 0.6, 0.1, 4, 2)}}, "slow_node", "n1 trains at 60%"),
        (
            {"slow_nodes": {"n1": SlowNode("n1", 0.6, 0.1, 4, 2)}},
            {"slow_nodes": {"n1": SlowNode("n1", 0.5, 0.1, 4, 2)}},
            None,
            "",
        ),
        (
            {"histories": {7: history(7, preempted=(5.0,))}},
            {"histories": {7: history(7, preempted=(5.0, 8.0, 9.0))}},
            "taken",
            "Slurm took 2 blocks",
        ),
    ],
)
def test_what_is_new_is_an_event(before: dict[str, Any], now: dict[str, Any], kind: str | None, words: str) -> None:
    """Nothing is reported that was so before the companion came; what goes on is reported once."""
    happenings = Happenings()
    assert happenings.of(tick(0.0, job(), **before)) == []
    found = happenings.of(tick(60.0, job(), **now))
    assert [one.kind for one in found] == ([kind] if kind else [])
    assert all(words in str(one) and (one.user == "alice" or one.job_id is None) for one in found)
    assert happenings.of(tick(120.0, job(), **{**now, "ended": []})) == []


def test_a_reason_is_told_again_after_hours_and_to_a_new_job() -> None:
    """An owner who comes back next day hears of it; one whose job is refused as asked does not."""
    happenings, refused = Happenings(), job(8)
    refused = replace(refused, refusal=reason("not_requeueable"))
    assert happenings.of(tick(0.0, job())) == []
    assert [one.job_id for one in happenings.of(tick(60.0, job(), refused))] == [8]
    assert happenings.of(tick(120.0, job(), refused)) == []
    assert [one.job_id for one in happenings.of(tick(60.0 + AGAIN_S, job(), refused))] == [8]
    assert happenings.of(tick(180.0 + AGAIN_S, replace(job(), refusal=reason("resize_off")), refused)) == []


@given(ANYTHING, ANYTHING, ANYTHING)
@example(NAME, NAME, NAME)
@example("<!channel>", "a\r\nBcc: b@c", "\nx")
def test_names_of_users_are_text_alone(name: str, user: str, words: str) -> None:
    """No form of a message takes a name for a line, a header, markup or a call."""
    message = Message("here", (Notice("resized", words, 1.0, 7, name, user),) * 2, 1)
    assert len(json.loads(as_json(message))["events"]) == 2
    slack = json.loads(as_slack(message))["text"]
    assert not {"<", ">"} & set(slack) and slack.count("\n") == 3
    mail = as_mail(message, "slurm-ones", "alice")
    assert mail["To"] == "alice" and len(mail.get_content().splitlines()) == 3
    assert mail.as_bytes().count(b"\nTo:") <= 1


# -- A receiver that answers, is slow, refuses, leads elsewhere, or is away --------------------------------------------


class Receiver(HTTPServer):
    """A web hook on this machine: `answer` is its status, 0 for one that says a byte a moment for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.answer, self.got, self.ended = 200, list[Any](), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class _Hook(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.answer
        while answer == 0 and not self.server.ended.wait(0.02):
            self.wfile.write(b"H")
        if answer:
            self.server.got.append((self.path, json.loads(body)))
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [(200, ""), (204, ""), (500, "answered 500"), (302, "answered 302"), (0, "."), (-1, "refused")],
    ids=["well", "well-without-words", "refuses", "redirects", "slow", "away"],
)
def test_a_receiver(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, answer: int, words: str) -> None:
    """A delivery ends in time, however the receiver is, and goes where the settings say alone."""
    monkeypatch.setattr(notify, "LIMIT_S", 0.3 if answer == 0 else 60.0)
    receiver.answer, url = answer, receiver.url
    started = time.monotonic()
    with closing(socket.socket()) as bound, pytest.raises(NotDelivered, match=words) if words else nullcontext():
        if answer == -1:
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}/hook"
        deliver(NotifySettings(url=url), url, "", MESSAGE)
    assert time.monotonic() - started < 30.0
    assert [path for path, _ in receiver.got] == (["/hook"] if answer > 0 else [])


def test_a_program_gets_the_message_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell, no text of users among its words, no secret in its environment; one that hangs is ended."""
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setattr(notify, "LIMIT_S", 60.0)
    program, out = tmp_path / "tell", tmp_path / "out"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ), sys.stdin.read()], open({str(out)!r}, 'w'))\n"
    )
    program.chmod(0o755)
    event = Notice("resized", "$(touch x); `id`", 1.0, 7, "; rm -rf /", "alice")
    deliver(NotifySettings(command=f"{program} 'a b'"), "", "", Message("here", (event,), 0))
    words, environment, text = json.loads(out.read_text())
    assert words == ["a b"] and "PGPASSWORD" not in environment
    assert json.loads(text)["events"][0]["name"] == "; rm -rf /"
    for command, why in (("/bin/false", "ended with 1"), ("/no/such", "No such"), ("/bin/sleep 60", "took longer")):
        monkeypatch.setattr(notify, "LIMIT_S", 0.2 if "sleep" in command else 60.0)
        with pytest.raises(NotDelivered, match=why):
            deliver(NotifySettings(command=command), "", "", MESSAGE)


class Posts:
    """What was delivered, in place of `deliver`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, str, Message]] = []
        self.fails = False
        monkeypatch.setattr(notify, "deliver", self)

    def __call__(self, settings: NotifySettings, address: str, to: str, message: Message) -> None:
        if self.fails:
            raise NotDelivered("away")
        self.sent.append((address, to, message))


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> Posts:
    return Posts(monkeypatch)


def outbox(now: list[float], **settings: Any) -> Outbox:
    """One that is emptied by hand."""
    return Outbox("site", NotifySettings(**{"url": "https://h/x", **settings}), "here", lambda: now[0])


def test_what_happens_meanwhile_comes_together(posts: Posts) -> None:
    now = [0.0]
    box = outbox(now)
    for at in range(6):
        now[0] = at * 20.0
        box.put(Notice("resized", str(at), now[0], 7, "train", "alice"))
        box.send()
    assert [[one.text for one in message.events] for _, _, message in posts.sent] == [["0", "1"], ["2", "3", "4"]]
    for now[0] in (200.0, 300.0, 400.0):
        box.send()
    assert len(posts.sent) == 3 and not box._boxes


def test_a_receiver_that_is_away_costs_bounded_room_and_ever_rarer_tries(posts: Posts) -> None:
    """What is left out is counted; when it is back, the newest come first to last."""
    now, tries = [0.0], 0
    box, posts.fails = outbox(now), True
    for number in range(3 * notify.KEPT):
        box.put(Notice("resized", str(number), 0.0))
    for now[0] in map(float, range(1, 4 * 3600, 30)):
        before = {key: one.due for key, one in box._boxes.items()}
        box.send()
        tries += before != {key: one.due for key, one in box._boxes.items()}
    assert 5 <= tries <= 12
    posts.fails, now[0] = False, 1e6
    box.send()
    ((_, _, message),) = posts.sent
    assert (len(message.events), message.left_out) == (notify.KEPT, 2 * notify.KEPT)
    assert message.events[-1].text == str(3 * notify.KEPT - 1)
    assert "older events" in message.text


@pytest.mark.parametrize(
    ("settings", "event", "address"),
    [
        ({}, Notice("resized", "", 0.0, 7, "", "alice"), ("https://h/x", "")),
        ({"events": ["taken"]}, Notice("resized", "", 0.0, 7, "", "alice"), None),
        ({"users": ["bob"]}, Notice("resized", "", 0.0, 7, "", "alice"), None),
        ({"users": ["bob"]}, Notice("companion", "", 0.0), ("https://h/x", "")),
        ({"form": "mail", "url": "smtp://h"}, Notice("resized", "", 0.0, 7, "", "alice"), ("smtp://h", "alice")),
        ({"form": "mail", "url": "smtp://h"}, Notice("companion", "", 0.0), None),
        ({"form": "mail", "url": "smtp://h"}, Notice("resized", "", 0.0, 7, "", "a@b, root"), None),
        ({"form": "mail", "url": "smtp://h"}, Notice("resized", "", 0.0, 7, "", "-oQ/tmp"), None),
        ({"form": "mail", "url": "smtp://h", "to": "ops@h"}, Notice("companion", "", 0.0), ("smtp://h", "")),
    ],
)
def test_who_is_told(settings: dict[str, Any], event: Notice, address: tuple[str, str] | None) -> None:
    assert outbox([0.0], **settings)._key(event) == address


OWN = {"url": "", "own": ["https://hooks.example.org/services/", "http://chat:8080/in/"]}


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        ("https://hooks.example.org/services/T1", True),
        ("http://chat:8080/in/a?b=c", True),
        ("https://hooks.example.org/other", False),
        ("http://hooks.example.org/services/T1", False),
        ("https://hooks.example.org.evil.org/services/", False),
        ("https://hooks.example.org/services/../admin", False),
        ("https://hooks.example.org/services/%2e%2e/admin", False),
        ("https://hooks.example.org:1/services/", False),
        ("https://hooks.example.org@evil.org/services/", False),
        ("https://evil.org/https://hooks.example.org/services/", False),
        ("https://evil.org\\@hooks.example.org/services/x", False),
        ("http://169.254.169.254/latest/meta-data", False),
        ("http://localhost:6379/", False),
        ("file:///etc/passwd", False),
        ("smtp://hooks.example.org", False),
        ("/bin/sh", False),
        ("http://chat:80800000/in/", False),
        ("https://hooks.example.org/services/T1#x", False),
    ],
)
def test_an_address_of_a_user_is_within_what_the_site_allows(named: str, taken: bool) -> None:
    """The companion posts to no machine, and no place on it, that its administrators did not name."""
    try:
        optin = parse_comment(f"ones: gpus=1-4 notify={named}")
    except BadComment:
        assert not taken
        return
    assert optin is not None
    event = Notice("resized", "", 0.0, 7, "", "alice", optin.notify)
    assert outbox([0.0], **OWN)._key(event) == ((named, "alice") if taken else None)
    assert outbox([0.0])._key(event) == ("https://h/x", "")


def test_nobody_shuts_the_way_for_others_by_many_addresses(posts: Posts) -> None:
    box = outbox([0.0], **OWN)
    for number in range(100):
        box.put(Notice("resized", "", 0.0, 7, "", "mallory", f"http://chat:8080/in/{number}"))
    box.put(Notice("resized", "", 0.0, 8, "", "alice", "http://chat:8080/in/alice"))
    assert [user for _, user in box._boxes] == ["mallory"] * notify.BOXES_OF_ONE + ["alice"]


def test_a_slow_receiver_does_not_keep_a_tick(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """A hundred ticks end at once; errors of the companion are reported, and those of the way itself are not."""
    receiver.answer = 0
    settings = parse(f'[notify.hook]\nurl = "{receiver.url}"\nevery_s = 0').notify
    sent = Notifications(settings, "here", "act")
    started = time.monotonic()
    for number in range(100):
        sent.ticked(tick(60.0 * number, job(), ended=[ended()]))
    logging.getLogger("slurm_ones.test").error("the database is away")
    sent.ticked(tick(6000.0, ended=[None]))
    assert time.monotonic() - started < notify.LIMIT_S
    receiver.answer = 200
    receiver.ended.set()
    until(lambda: receiver.got, "a message", within_s=20.0)
    sent.close(5.0)
    sent.close()
    texts = [one["text"] for _, body in receiver.got for one in body["events"]]
    assert "looks after here (mode act)" in texts[0] and sum("resized" in text for text in texts) == 100
    assert "the companion reports: the database is away" in texts
    assert "this tick is missing in notifications" in caplog.text
