"""Notifications of a tick's events, by a program, a web hook or mail (see `config.NotifySettings`).

A tick only puts events into boxes, one for each address. A thread for each section of the settings sends the events in
a box as one message. If that fails, it tries again after growing delays. A full box drops its oldest events and counts
them. Events that are not sent by the end of the companion are lost.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import smtplib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from html import escape
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from ones_db import RESIZE_DONE, RESIZE_OVERTAKEN, RESIZE_PREEMPTED
from ones_db.reasons import NO_REASON, SITE_LIMITS, WRONG, Reason
from slurm_ones.companion import Tick
from slurm_ones.config import EventKind, NotifySettings
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.service.logs import RateLimitFilter
from slurm_ones.text import changed, plain

log = logging.getLogger(__name__)

AGAIN_S = 6 * 3600.0
"""Shortest time between two notifications of a job's owner about the same reason, in seconds."""
GROWTH = ("growth_returns", "growth_stops", "growth_rests", "idle_returns", "idle_stays")
KINDS: dict[str, EventKind] = {
    **dict.fromkeys((*SITE_LIMITS, *GROWTH), "held_back"),
    **dict.fromkeys(WRONG, "cannot_resize"),
    "near_time_limit": "limited",
}
"""Kind of event by the code of its reason."""
AS_ASKED = frozenset({"resize_off", "fused", "other_user", "site_acts", "owner_acts", "accounting_only", "opted_out"})
"""Codes of refusals that a user or the site asked for; they are no events."""


class Notice(NamedTuple):
    """Event for a notification."""

    kind: EventKind
    text: str
    time: float
    job_id: int | None = None
    name: str = ""
    user: str = ""
    own: str = ""
    """Address from the job's comment (`notify=`)."""

    def __str__(self) -> str:
        job = "" if self.job_id is None else f"job {self.job_id} ({plain(self.name, 60)}) of {plain(self.user, 40)}: "
        return job + plain(self.text, 500)


class Happenings:
    """Finder of each tick's events, except in the first tick."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, str], float] = {}
        """Time at which each reason was last reported, by (job, code)."""
        self._preempted: dict[int, float] = {}
        self._slow: frozenset[str] = frozenset()
        self._first = True

    def of(self, tick: Tick) -> list[Notice]:
        """Return the events of a tick."""
        jobs, now = tick.observation.elastic, tick.observation.snapshot.time
        found = [*self._ended(tick, now), *self._preemptions(tick, now)]
        for job_id, kind, why in _reasons(tick):
            if now - self._reported.get((job_id, why.code), -math.inf) >= AGAIN_S:
                self._reported[job_id, why.code] = now
                if not self._first:
                    found.append(_about(jobs[job_id], kind, str(why), now))
        self._reported = {key: at for key, at in self._reported.items() if key[0] in jobs}
        slow = frozenset(tick.slow_nodes)
        found += [
            Notice("slow_node", f"node {name} trains at {tick.slow_nodes[name].factor:.0%} of the usual speed", now)
            for name in sorted(slow - self._slow)
            if not self._first
        ]
        self._slow, self._first = slow, False
        return found

    def _ended(self, tick: Tick, now: float) -> Iterator[Notice]:
        for resize in tick.ended:
            one = tick.observation.elastic.get(resize.job_id)
            if one is None or resize.outcome.code in (RESIZE_OVERTAKEN, RESIZE_PREEMPTED):
                continue
            if resize.state == RESIZE_DONE:
                yield _about(one, "resized", f"resized, {changed(resize)}", now)
            else:
                why = str(resize.outcome) or resize.state.replace("_", " ")
                yield _about(one, "cannot_resize", f"was not resized ({changed(resize)}): {why}", now)

    def _preemptions(self, tick: Tick, now: float) -> Iterator[Notice]:
        for job_id, history in tick.histories.items():
            last, one = self._preempted.get(job_id), tick.observation.elastic.get(job_id)
            new = sum(at > last for at in history.preempted) if last is not None else 0
            self._preempted[job_id] = max(history.preempted, default=0.0)
            if new and one is not None:
                yield _about(one, "taken", f"Slurm took {new} block{'s' * (new != 1)} of it for others", now)
        self._preempted = {id_: at for id_, at in self._preempted.items() if id_ in tick.histories}


def _reasons(tick: Tick) -> Iterator[tuple[int, EventKind, Reason]]:
    """Yield (job id, kind of event, first reason that is an event) for each job that is not resized."""
    given = {id_: why for one in tick.decided for id_, why in one.schedule.reasons.items()}
    for job_id, one in tick.observation.elastic.items():
        if one.refusal is not None:
            if one.refusal.code not in AS_ASKED:
                yield job_id, "cannot_resize", one.refusal
            continue
        for why in (tick.outcomes.get(job_id, NO_REASON), given.get(job_id, NO_REASON)):
            if why.code in KINDS:
                yield job_id, KINDS[why.code], why
                break


def _about(one: Elastic, kind: EventKind, text: str, now: float) -> Notice:
    job = one.job
    own = one.optin.notify if one.optin is not None else ""
    return Notice(kind, text, now, job.job_id, job.home.name, job.user, own)


LIMIT_S = 10.0
"""Longest attempt to send a message, in seconds."""
KEPT = 200
"""Largest number of events in a box; beyond it the oldest are dropped."""
BOXES, BOXES_OF_ONE = 500, 4
"""Largest numbers of addresses: in one section of the settings, and named by one user in it."""
LONGEST_WAIT_S = 3600.0
"""Longest wait before a failed message is sent again, in seconds."""
CLOSE_S = 5.0
"""Seconds for sending the last messages when the companion ends."""
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Pattern of user names that can get mail, so that no name acts as an address list or an option."""


class Message(NamedTuple):
    """Message to one address, with the events in its box."""

    cluster: str
    events: tuple[Notice, ...]
    left_out: int
    """Number of older events that the box has dropped."""

    @property
    def title(self) -> str:
        """Subject of the message."""
        count = len(self.events)
        first = str(self.events[0]) if count == 1 else f"{count} events"
        return f"slurm-ones on {plain(self.cluster, 60)}: {plain(first, 120)}"

    @property
    def text(self) -> str:
        """Text of the message: one line for each event."""
        left = [f"({self.left_out} older events were left out)"] if self.left_out else []
        return "\n".join([*left, *map(str, self.events)])


def as_json(message: Message) -> bytes:
    """Return a message as JSON, for the setting `form = "json"`."""
    events = [
        {"event": one.kind, "time": one.time, "job_id": one.job_id, "name": plain(one.name, 60)}
        | {"user": plain(one.user, 40), "text": plain(one.text, 500)}
        for one in message.events
    ]
    return json.dumps({"cluster": message.cluster, "events": events, "left_out": message.left_out}).encode()


def as_slack(message: Message) -> bytes:
    """Return a message for Slack, in which users' text cannot act as markup, mention or link."""
    text = escape(f"slurm-ones on {plain(message.cluster, 60)}:\n{message.text}", quote=False)
    return json.dumps({"text": text, "mrkdwn": False, "link_names": False}).encode()


def as_mail(message: Message, sender: str, to: str) -> EmailMessage:
    """Return a message as a mail."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = sender, to, message.title
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text + "\n")
    return mail


class NotDelivered(Exception):
    """Error: the message could not be delivered."""


def deliver(settings: NotifySettings, address: str, to: str, message: Message) -> None:
    """Send a message to an address by the settings' program, web hook or mail server, within about `LIMIT_S` seconds.
    `to` is the receiver of a mail. Raises `NotDelivered`."""
    try:
        if settings.form == "mail":
            mail = as_mail(message, settings.sender, to)
            _send_mail(address, mail) if address else _run(settings.argv, mail.as_bytes())
            return
        body = as_slack(message) if settings.form == "slack" else as_json(message)
        _run(settings.argv, body) if settings.command else _post(address, body)
    except (OSError, HTTPException, subprocess.SubprocessError, ValueError) as error:
        raise NotDelivered(plain(str(error) or type(error).__name__, 200)) from None


def _run(argv: list[str], body: bytes) -> None:
    """Run the settings' program with the message as input, and without users' text in arguments or environment."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath, "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        process.communicate(body, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise NotDelivered(f"{argv[0]} took longer than {LIMIT_S:.0f} s") from None
    if process.returncode:
        raise NotDelivered(f"{argv[0]} ended with {process.returncode}")


def cut_off(sock: socket.socket, after_s: float) -> threading.Timer:
    """Start a timer that closes a connection after `after_s` seconds, even if it still receives bytes."""

    def cut() -> None:
        with suppress(OSError):
            # Below TLS, whose own way takes the connection apart under the thread that reads.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(after_s, cut)
    timer.daemon = True
    timer.start()
    return timer


def _post(address: str, body: bytes) -> None:
    """Send a POST request to exactly this address. A redirection is an error, and no proxy is used."""
    parts = urlsplit(address)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=LIMIT_S)
    with closing(connection), ExitStack() as stack:
        connection.connect()
        stack.callback(cut_off(connection.sock, LIMIT_S).cancel)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json", "User-Agent": "slurm-ones"})
        status = connection.getresponse().status
    if not 200 <= status < 300:
        raise NotDelivered(f"answered {status}")


def _send_mail(address: str, mail: EmailMessage) -> None:
    parts = urlsplit(address)
    with smtplib.SMTP(parts.hostname or "", parts.port or 25, timeout=LIMIT_S) as server, ExitStack() as stack:
        if server.sock is not None:
            stack.callback(cut_off(server.sock, LIMIT_S).cancel)
        server.send_message(mail)


@dataclass
class _Box:
    """Events that wait to be sent to one address."""

    due: float
    failed: int = 0
    """Number of attempts in a row that failed, up to the last."""
    events: list[Notice] = field(default_factory=list)
    left_out: int = 0

    def put(self, events: list[Notice]) -> None:
        over = max(len(self.events) + len(events) - KEPT, 0)
        self.events, self.left_out = [*self.events, *events][over:], self.left_out + over


Key = tuple[str, str]
"""Key of a box: (address, user), with user "" for the site's addresses."""


class Outbox(threading.Thread):
    """Thread that sends the events of one section of the settings, with a box for each address."""

    def __init__(
        self, name: str, settings: NotifySettings, cluster: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(name=f"notify.{name}", daemon=True)
        self._settings, self._cluster, self._clock = settings, cluster, clock
        self._address = settings.address
        self._boxes: dict[Key, _Box] = {}
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def put(self, event: Notice) -> None:
        """Put an event into its box, if this section sends such events."""
        key = self._key(event)
        if key is None:
            return
        with self._lock:
            box = self._boxes.get(key)
            if box is None:
                if len(self._boxes) >= BOXES or sum(user == key[1] != "" for _, user in self._boxes) >= BOXES_OF_ONE:
                    return
                box = self._boxes[key] = _Box(self._clock() + min(self._settings.every_s, 1.0))
            box.put([event])

    def _key(self, event: Notice) -> Key | None:
        """Return the key of the event's box; None if this section does not send it."""
        one = self._settings
        if (one.events and event.kind not in one.events) or (one.users and event.user not in ("", *one.users)):
            return None
        if one.own:
            return (event.own, event.user) if event.own and event.own.startswith(tuple(one.own)) else None
        if one.form == "mail" and not one.to:
            return (self._address, event.user) if USER.fullmatch(event.user) else None
        return self._address, ""

    def run(self) -> None:
        """Send each message when it is due. Once `stop` is set, send messages that are not due yet, and end."""
        while not self.stop.wait(self._pause()):
            self.send()
        self.send(last=True)

    def _pause(self) -> float:
        with self._lock:
            next_due = min((box.due for box in self._boxes.values()), default=math.inf)
        return min(max(next_due - self._clock(), 0.05), 1.0)

    def send(self, *, last: bool = False) -> None:
        """Send the messages that are due. With `last`, send all except those that failed before."""
        with self._lock:
            now = self._clock()
            due = [(key, box) for key, box in self._boxes.items() if box.due <= now or (last and not box.failed)]
            for key, box in due:
                if not box.events:
                    # Nothing came since its last message.
                    del self._boxes[key]
        for key, box in due:
            if box.events:
                self._send(key, box)

    def _send(self, key: Key, box: _Box) -> None:
        with self._lock:
            message = Message(self._cluster, tuple(box.events), box.left_out)
            box.events, box.left_out = [], 0
        wait_s, failed = self._settings.every_s, 0
        try:
            deliver(self._settings, key[0], self._settings.to or key[1], message)
        except NotDelivered as error:
            # Not at the level of errors, which the companion would report in turn; nor with the address, a secret.
            log.warning("%s: %d events were not delivered: %s", self.name, len(message.events), error)
            wait_s, failed = min(max(wait_s, 1.0) * 2 ** min(box.failed, 12), LONGEST_WAIT_S), box.failed + 1
        with self._lock:
            if failed:
                newer, box.events, box.left_out = box.events, [], box.left_out + message.left_out
                box.put([*message.events, *newer])
            box.due, box.failed = self._clock() + wait_s, failed


class _ErrorEvents(logging.Handler):
    """Log handler that turns logged errors into events, at a limited rate."""

    def __init__(self, put: Callable[[Notice], None]) -> None:
        super().__init__(logging.ERROR)
        self.addFilter(RateLimitFilter())
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        self._put(Notice("companion", f"the companion reports: {record.getMessage()}", record.created))


class Notifications:
    """Notifications of this companion while it leads: one `Outbox` for each section `[notify.NAME]` of the settings."""

    def __init__(self, settings: Mapping[str, NotifySettings], cluster: str, mode: str = "advise") -> None:
        """Start a thread for each section. Raises `ConfigError` if the file with an address is unreadable or unsafe."""
        self._boxes = [Outbox(name, one, cluster) for name, one in settings.items()]
        self._happenings = Happenings()
        self._errors = _ErrorEvents(self._put)
        if self._boxes:
            logging.getLogger().addHandler(self._errors)
            for box in self._boxes:
                box.start()
            words = f"the companion on {socket.gethostname()} looks after {cluster} (mode {mode})"
            self._put(Notice("companion", words, time.time()))

    def _put(self, event: Notice) -> None:
        for box in self._boxes:
            box.put(event)

    def ticked(self, tick: Tick) -> None:
        """Put the events of a tick into their boxes; an error here is only logged."""
        if not self._boxes:
            return
        try:
            for event in self._happenings.of(tick):
                self._put(event)
        except Exception as error:
            log.warning("this tick is missing in notifications: %s: %s", type(error).__name__, error)

    def close(self, wait_s: float = 0.0) -> None:
        """Stop the threads, and wait at most `wait_s` seconds for the last messages."""
        logging.getLogger().removeHandler(self._errors)
        for box in self._boxes:
            box.stop.set()
        until = time.monotonic() + wait_s
        for box in self._boxes:
            box.join(max(until - time.monotonic(), 0.0))
