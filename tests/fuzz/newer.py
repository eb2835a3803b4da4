"""What ranks send each other, what people ask of the page, what is sent to people, and other files of people."""

from __future__ import annotations

import asyncio
import contextlib
import email
import email.policy
import io
import json
import os
import re
import selectors
import socket
import string
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np

from ones_db import Store, migrate
from ones_wrapper import protocol
from slurm_ones.config import ConfigError, NotifySettings, parse
from slurm_ones.simulate import BadInput
from slurm_ones.slurm.client import SlurmError
from tests.db.make import job
from tests.fuzz import parsers
from tests.fuzz.mutate import Make, Rng, damaged, of_json, of_text
from tests.fuzz.parsers import NAMES, NOW, POINTERS, Parser, hold, scratch, storable, taken

# What ranks send each other


def _framed(rng: Rng) -> bytes:
    from ones_wrapper.network.frames import fields, frame

    parts = [rng.choice(REQUESTS) for _ in range(rng.choice((1, 1, 2, 5)))]
    sound = b"".join(frame(fields(*request)) for request in parts)
    found = [damaged(part, rng) if rng.random() < 0.4 else part for request in parts for part in request]
    name = rng.choice(REQUESTS)[0]
    return rng.choice((sound, damaged(sound, rng), frame(fields(*found)), frame(fields(name, *found))))


REQUESTS = [
    (b"set", b"plan-1", b"{}"),
    (b"get", b"1", b"plan-1"),
    (b"get", b"2000", b"plan-1", b"here-2"),
    (b"add", b"count", b"1"),
    (b"append", b"log", b"x"),
    (b"swap", b"plan-1", b"{}", b"[]"),
    (b"peek", b"plan-1", b"none"),
    (b"keys", b"p"),
    (b"follow", b"plan", b"here"),
    (b"sign", b"a", b"0"),
    (b"ages", b"a", b"b"),
    (b"will", b"gone-1", b"1"),
    (b"delete", b"plan-1"),
    (b"get", b"9" * 400, b"none"),
]


def requests(data: bytes) -> None:
    """To a store, of somebody who has proved himself: it serves on."""
    from ones_wrapper.network import server
    from ones_wrapper.network.frames import FrameError

    store = server.StoreServer.__new__(server.StoreServer)
    store._places, store._members, store._waiting = {}, set(), set()
    store._selector = selectors.DefaultSelector()
    mine, other = socket.socketpair()
    with mine, other, contextlib.closing(store._selector):
        other.setblocking(False)
        mine.setblocking(False)
        _enter(store, server, other)
        (member,) = store._members
        with contextlib.suppress(FrameError):
            member.frames.feed(data)
            store._serve(member)
        hold(all(type(value) is bytes for value in member.place.values.values()), "a value that is no bytes")


def _enter(store: Any, server: Any, connection: socket.socket) -> None:
    place = store._places.setdefault("board", server._Place())
    member = server._Member(connection, "board", place, True)
    place.members.add(member)
    store._members.add(member)
    store._selector.register(connection, selectors.EVENT_READ, member)


def strangers(data: bytes) -> None:
    """The first message of somebody who may be anybody."""
    from ones_wrapper.network.frames import FrameError, Frames
    from ones_wrapper.network.proof import MOST_UNPROVEN, Challenge, ProofError
    from ones_wrapper.network.secret import JobSecret

    frames = Frames(MOST_UNPROVEN)
    with contextlib.suppress(FrameError):
        frames.feed(data)
        while (body := frames.take()) is not None:
            if (challenge := taken(ProofError, Challenge, JobSecret(bytes(32)), body)) is not None:
                hold(not challenge.met_by(body), "a proof without the secret")


def _hello(rng: Rng) -> bytes:
    from ones_wrapper.network.frames import fields, frame

    sound = frame(fields(b"ones network 1", b"member", b"board-3", bytes(32)))
    return rng.choice((sound, damaged(sound, rng), damaged(sound, rng), _framed(rng)))


def _plain(rng: Rng) -> bytes:
    from ones_wrapper.network.frames import fields

    text = _PLAIN(rng)
    return rng.choice((fields(text, bytes(24), b"xy"), fields(text, bytes(16)), damaged(fields(text, bytes(8)), rng)))


_PLAIN = of_json(
    [
        {"dict": [["a", {"tensor": 0, "dtype": "float32", "shape": [2, 3]}], ["b", {"bytes": 1}]]},
        {"tuple": [1, {"array": 0, "dtype": "<f8", "shape": [3]}, {"number": 0, "dtype": "<i8", "shape": []}]},
        [1, None, "x", True, 0.5],
    ]
)


def plain(data: bytes) -> None:
    from ones_wrapper.network.plain import decode, encode

    try:
        found = decode(data)
    except ValueError as error:
        hold(len(str(error)) <= 400, "a long message")
        return
    with np.errstate(all="ignore"), contextlib.suppress(TypeError, RecursionError, ValueError):
        encode(found)


MEMBER = {"task": 1, "restart": 0, "uid": "a1", "ranks": 4, "nodes": 1, "ranks_per_node": 4, "max_local": 32}
PLAN = {
    "generation": 3, "term": 1, "members": [MEMBER, MEMBER | {"task": 2, "uid": "b2"}], "order": 1_700_000_000_000,
    "batch": 256, "why": "order", "ready_s": 2.5, "moves": False,
}  # fmt: skip
COMING = {"plan": PLAN, "began": NOW, "at": NOW, "array": 7}


def plan(data: bytes) -> None:
    from ones_wrapper.membership.plan import MAX_RANKS, decode_member, decode_plan, encode

    text = data.decode("utf-8", "replace")
    for read in (decode_plan, decode_member):
        with contextlib.suppress(RecursionError):
            if (found := taken_short(read, text)) is None:
                continue
            hold(read(encode(found)) == found, "written and read again it is another")
            members = getattr(found, "members", (found,))
            hold(all(1 <= one.ranks < MAX_RANKS for one in members), "ranks")


def taken_short(read: Callable[..., Any], *arguments: Any) -> Any:
    """What a rank of the same job sent: its refusal is logged, and never shown to others."""
    with contextlib.suppress(ValueError):
        return read(*arguments)
    return None


def coming(data: bytes) -> None:
    from ones_wrapper.membership.coming import find_coming
    from ones_wrapper.membership.files import COMING as NAME
    from ones_wrapper.membership.files import HotFolder

    folder = HotFolder(scratch() / "run", 7)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / NAME).write_bytes(data)
    with contextlib.redirect_stderr(io.StringIO()):
        find_coming(folder, None)


def fusion(data: bytes) -> None:
    found = taken(protocol.ProtocolError, protocol.decode_fusion, data)
    if found is not None:
        storable(found)


# What Slurm says

GPU_USE = [
    b"7.batch|cpu=00:00:01,gres/gpumem=1024M,gres/gpuutil=87,mem=1G\n8.0|gres/gpumem=2T,gres/gpuutil=399\n",
    b"7.0|gres/gpuutil=1,gres/gpumem=999999999999999T\n",
    b"7_3.extern|cpu=0\n9.interactive|gres/gpuutil=0,gres/gpumem=0\n",
]
SITES = [
    b"LicenseName=matlab@s Total=10 Used=3 Free=7 Reserved=0 Remote=no\nLicenseName=x Total=1 Used=0 Free=1\n",
    b"SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-4]\nSwitchName=top Level=1 Switches=s0\n",
    b"BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nAggregatedBlock=b12 Nodes=n[1-4]\n",
]


def gpu_use(data: bytes) -> None:
    from slurm_ones.slurm.command import parse_gpu_use

    for use in parse_gpu_use(data.decode("utf-8", "replace")).values():
        hold(use.gpus >= 0, "less than nothing in use")
        storable(tuple(use))


def site(data: bytes) -> None:
    from slurm_ones.slurm.parse import parse_licenses, parse_topology

    text = data.decode("utf-8", "replace")
    for read in (parse_licenses, parse_topology):
        for name, value in (taken(SlurmError, read, text) or {}).items():
            storable((name, value))


# Files of people

NOTIFY = [
    b'[notify.ops]\ncommand = "/usr/bin/logger -t ones"\nevents = ["resized"]\nusers = ["alice"]\nevery_s = 30\n',
    b'[notify.chat]\nurl = "https://hooks.example.org/services/x"\nform = "slack"\n',
    b'[notify.mail]\nurl = "smtp://localhost:25"\nform = "mail"\nto = "root@example.org"\nsender = "ones"\n',
    b'[notify.own]\nown = ["https://hooks.example.org/services/"]\n[limits]\nidle_use = 0.1\nidle_s = 600\n',
]


def notify(data: bytes) -> None:
    try:
        settings = parse(data.decode("utf-8", "replace"))
    except ConfigError:
        return
    for one in settings.notify.values():
        hold(not one.command or Path(one.argv[0]).is_absolute(), "a program without its place")
        with contextlib.suppress(ConfigError):
            storable(one.address)
    _ = (settings.wake_folder, settings.interval_s)


def address(data: bytes) -> None:
    """The file with a secret address."""
    path = scratch() / "address"
    path.write_bytes(data)
    path.chmod(0o600)
    found = taken(ConfigError, lambda: NotifySettings(url_file=path).address)
    hold(found is None or found.startswith(("http://", "https://")), f"{found!r:.80}")


def wake(data: bytes) -> None:
    """What a directory that all may touch can show, and whatever stands in its place."""
    from slurm_ones.service.wake import Waking

    place = scratch() / "wake"
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    kind, when = data[:1], int.from_bytes(data[1:8], "little", signed=True)
    if kind < b"\x40":
        place.write_bytes(data)
    elif kind < b"\x60":
        place.symlink_to("/dev/full")
    elif kind < b"\x80":
        os.mkfifo(place)
    waking = Waking(clock=lambda: NOW)
    waking._folder = place
    waking.look()
    hold(not waking._asked.is_set(), "the first look is no question")
    if place.is_dir() and not place.is_symlink():
        with contextlib.suppress(OSError, OverflowError):
            os.utime(place, ns=(0, when))
        waking.look()
    waking.due(1.0)


TRACES = [
    b"u_id,gpu_num,node_num,interval,run_time,new_status\na,1,1,0,10,COMPLETED\nb,8,2,5.5,20,FAILED\n",
    b"job_id,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time\n"
    b"a,8,8,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:01:00,2020-04-01 02:00:00\n",
    b"job_id,gpu_num,state,submit_time,start_time,end_time\n"
    b"7,8,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-02-28 16:20:51+00:00\n",
    b"name,cpu_milli,num_gpu,gpu_milli,creation_time,scheduled_time,deletion_time\np,1,1,500,0,5,100\n",
    b"; MaxNodes: 4\n; MaxProcs: 16\n1 0 5 100 4 -1 -1 4 200 -1 1 1 1 1 1 1 -1 -1\n",
    b'[{"jobid": "a", "submitted_time": "2017-10-09 07:01:55", "attempts": [{"start_time": "2017-10-09 07:02:00", '
    b'"end_time": "2017-10-09 08:02:00", "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}]}]}]',
    b"JobID|Submit|Start|End|State|AllocTRES|NNodes|Partition|Cluster|ReqTRES|ExitCode|Restarts|Timelimit|User\n"
    b"7|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:00:00|COMPLETED|gres/gpu=4|1|gpu|c|gres/gpu=4|0:0|0|60|a\n",
]


def trace(data: bytes) -> None:
    from slurm_ones.simulate.workloads.formats import read_trace
    from slurm_ones.simulate.workloads.trace import MOST_GPUS, MOST_S

    path = scratch() / "trace"
    path.write_bytes(data)
    try:
        jobs = read_trace(path).jobs
    except BadInput as error:
        hold(path.name in str(error), "an error that does not name the file")
        return
    times = [one.submitted for one in jobs]
    hold(times and times == sorted(times), "no jobs, or none in their order")
    for one in jobs:
        storable(one)
        hold(0 < one.run_s <= MOST_S and 1 <= one.gpus <= MOST_GPUS and one.nodes >= 0, f"{one}")
        hold(one.began >= one.submitted and one.limit_s >= 0, f"{one}")


SCRIPTS = [
    b"#!/bin/bash\n#SBATCH --array=0-7 --gres=gpu:2\n#SBATCH --comment='ones: gpus=1-8'\nsrun ones-run a.py \\\n -x\n",
    b"#!/bin/sh\n#SBATCH -N 2\ncat <<EOF\nx\nEOF\nfor i in 1 2; do torchrun --nnodes=$SLURM_NNODES a.py & done; wait\n",
    b"#!/bin/bash\nif [ -f x ]; then bash -c \"ones-run 'a b.py' $(date)\"; fi\nscontrol requeue $SLURM_JOB_ID\n",
]


def batch_script(data: bytes) -> None:
    from slurm_ones.cli.batch_script import calls, commands, hands_on, read_script, requeues_itself

    script = read_script(data.decode("utf-8", "replace"))
    found = commands(script)
    calls(found), requeues_itself(found), hands_on(found)
    for finding in script.findings:
        hold(len(finding.text) <= 1_000, "a long finding")


# What is sent to people, and what they ask


def sent(data: bytes) -> None:
    """Names of a user's choice in messages: no header, markup or line more than of others."""
    from slurm_ones.service.notify import KEPT, Message, Notice, Outbox, as_json, as_mail, as_slack

    text = parsers._text(data)
    event = Notice("resized", text, NOW, 7, text, text, text)
    message = Message(text, (event, event), 3)
    hold(json.loads(as_json(message))["left_out"] == 3, "its JSON")
    hold(not re.search("[<>]", json.loads(as_slack(message))["text"]), "markup")
    mail = email.message_from_bytes(as_mail(message, "ones", "alice").as_bytes(), policy=email.policy.default)
    names = [name.lower() for name in mail]
    hold(len(names) == len({*names}) and {*names} <= _MAIL and mail["To"] == "alice", f"headers {names}")
    box = Outbox("x", NotifySettings(own=["https://hooks.example.org/s/"]), "here", lambda: NOW)
    box.put(event)
    for key, kept in box._boxes.items():
        hold(key[0].startswith("https://hooks.example.org/s/") and len(kept.events) <= KEPT, f"sent to {key!r:.80}")


_MAIL = {
    "from", "to", "subject", "auto-submitted", "content-type", "content-transfer-encoding", "mime-version",
}  # fmt: skip
QUESTIONS = [
    b"/api/v1/jobs\n\n", b"/api/v1/jobs/7\npart=1\nauthorization: Bearer t", b"/api/v1/openapi.json\ntoken=t",
    b"/api/v1/nodes\n\nx-user: alice", b"/\nspan=day&by=user&part=1\naccept-encoding: gzip", b"/jobs/8\n\nx-user: bob",
    b"/decisions\n\ncookie: slurm-ones-8080=t", b"/static/live.js\n", b"/node/n1/8675/api/v1/decisions\n",
]  # fmt: skip


def asked(data: bytes) -> None:
    """A request to the page and the API: answered or refused, and never as somebody else."""
    path, _, rest = data.partition(b"\n")
    query, _, lines = rest.partition(b"\n")
    headers = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines.split(b"\n") if b":" in line]
    text = path.decode("utf-8", "replace")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": text if text.startswith("/") else f"/{text}", "raw_path": quote_from_bytes(path).encode(),
        # h11 answers 400 to any other byte.
        "query_string": quote_from_bytes(query, string.punctuation).encode(),
        "headers": [(name.lower(), value) for name, value in headers], "root_path": "",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    if text.rstrip("/").endswith("/events"):
        return
    web, loop = _web()
    told: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    loop.run_until_complete(web.app(scope, receive, send))
    status = told[0]["status"]
    hold(status < 500, f"answered {status}")
    user = [value for name, value in headers if name.lower() == b"x-user"]
    body = b"".join(message.get("body", b"") for message in told[1:])
    if user not in ([b"alice"],):
        hold(b"secret-of-alice" not in body, "another one's job")


@cache
def _web() -> tuple[Any, asyncio.AbstractEventLoop]:
    from slurm_ones.show.app import Web

    url = f"sqlite:///{scratch() / 'web.sqlite'}"
    migrate.upgrade(url)
    with Store.open(url, "fuzz") as store:
        store.record_jobs([job(7, name="secret-of-alice", user="alice"), job(8, user="bob")])
    web = Web(lambda: Store.open(url, "fuzz", read_only=True), "", "/node/n1/8675", user_header="x-user")
    web.feed.moment = web.feed._look() or web.feed.moment
    return web, asyncio.new_event_loop()


REPORTS: tuple[protocol.Report, ...] = (
    protocol.Membership(3, (0, 2), (0, 1), 2, 4, 8, 700, 512, 0.07, 10**9, 0.02, 4.5, 1_700_000_000_000, "order"),
    protocol.Throughput(3, 710, 2_680, 2_560, 2.01, 256, 1.0, gpu_use=0.35, gpu_memory=10**10),
)
LINES: Make = of_json([json.loads(protocol.encode_report(n, NOW, one)) for n, one in enumerate(REPORTS, 1)])
_MEMBER = {"job_id": 7, "arguments": ["a.py", "--lr=0.1"]}
ORDERS = of_json(
    [
        asdict(protocol.Order(1_700_000_000_000, 1, 512, blocks=(0, 2), gain=1.4)),
        {"number": 1, "restart": 0, "members": [_MEMBER]},
    ]
)
COMMENTS = [
    b"ones: gpus=1-16 batch=32-1024 array=blocks guests=qos:low cost=1.5 notify=https://hooks.example.org/s/T1",
    b"ones: nodes=1-4 fuse=sweep deadline=2026-12-01T08:00 kinds=a100",
]

PARSERS = [
    Parser("requests to a store", 8, _framed, requests),
    Parser("strangers at a store", 8, _hello, strangers),
    Parser("plain data of ranks", 8, _plain, plain),
    Parser("plans and members", 8, of_json([PLAN, MEMBER]), plan),
    Parser("coming.json", 5, of_json([COMING]), coming),
    Parser("fusion.json", 5, of_json([{"restart": 1, "asks": True, "members": [7, 8]}]), fusion),
    Parser("reports of blocks and use", 12, LINES, parsers.report),
    Parser("orders to blocks", 6, ORDERS, parsers.order),
    Parser("comments of blocks", 10, of_text(COMMENTS), parsers.comment),
    Parser("sstat", 8, of_text(GPU_USE), gpu_use),
    Parser("licences and topology", 6, of_text(SITES), site),
    Parser("settings of notifications", 2, of_text(NOTIFY), notify),
    Parser("file of an address", 4, of_text([b"https://hooks.example.org/s/T1\n", *POINTERS]), address),
    Parser("wake", 4, lambda rng: rng.randbytes(9), wake),
    Parser("traces", 6, of_text(TRACES), trace),
    Parser("batch scripts", 4, of_text(SCRIPTS), batch_script),
    Parser("notifications", 2, of_text(NAMES), sent),
    Parser("page and API", 1.5, of_text(QUESTIONS), asked),
]
