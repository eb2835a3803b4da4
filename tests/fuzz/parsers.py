"""Every reader of what another user or another program wrote: how its inputs are made, and what must hold of it.

A reader may refuse an input with the error that its docstring names, in a message that is short and printable, or take
it; then what it gives is within the bounds that others count on. Everything else is a finding.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ones_db.jobs import decode_limits, encode_limits
from ones_db.shape import Shape
from ones_wrapper import protocol
from ones_wrapper.protocol import ProtocolError
from ones_wrapper.protocol import limits as told
from ones_wrapper.protocol.hostlist import MOST as MOST_HOSTS
from ones_wrapper.protocol.hostlist import expand
from slurm_ones.jobs import reports as reading
from slurm_ones.learn.step_time import layout_of
from slurm_ones.policy.contract import Limits
from slurm_ones.policy.shapes import bounds, quanta
from slurm_ones.rules.job_rules import size_rules
from slurm_ones.slurm.client import SlurmError
from slurm_ones.slurm.model import SlurmJob, Snapshot
from slurm_ones.text import described
from tests.fuzz.mutate import LONGEST, TEXTS, Make, Rng, damaged, of_json, of_lines, of_text
from tests.simulate.profiles import write_profile, write_workload
from tests.slurm.make import DATA, job_of, recorded_jobs
from tests.slurm.test_squeue import RUNNING

NOW = 2_000_000.0
MESSAGE = 1_000
"""Characters of a refusal."""


T = TypeVar("T")


class Broken(AssertionError):
    """What must hold of a reader did not."""


@dataclass(frozen=True)
class Parser:
    name: str
    share: float
    """Of the inputs, in proportion to the others'."""
    make: Make
    run: Callable[[bytes], object]
    """Raises where something must not happen."""


def hold(true: object, what: str) -> None:
    if not true:
        raise Broken(what)


def refused(error: BaseException) -> None:
    """Its message may go into a log, a table and a database."""
    text = str(error)
    hold(len(text) <= MESSAGE, f"a message of {len(text)} characters: {text[:80]!r}…")
    hold(all(line.isprintable() for line in text.split("\n")), f"a message that is not printable: {text[:200]!r}")


def taken(refusal: type[Exception], reader: Callable[..., T], *arguments: Any) -> T | None:
    """What a reader makes of an input; None if it refuses it."""
    try:
        return reader(*arguments)
    except refusal as error:
        refused(error)
        return None


def storable(value: Any) -> None:
    """Every database takes it: numbers within 64 bits and finite, texts of characters."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        hold(-(2**63) <= value < 2**63, f"a number of {value.bit_length()} bits")
    elif isinstance(value, float):
        hold(math.isfinite(value), f"a number that is not finite: {value}")
    elif isinstance(value, str):
        value.encode()
        hold("\0" not in value, f"NUL in a text: {value[:80]!r}")
    elif isinstance(value, (tuple, list, frozenset)):
        for item in value:
            storable(item)
    elif is_dataclass(value):
        for item in vars(value).values():
            storable(item)


def room() -> str | None:
    """Where directories of one's own are made: in memory, where there is such a place."""
    return os.environ.get("ONES_FUZZ_ROOM") or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@cache
def scratch() -> Path:
    """A directory of this process."""
    return Path(tempfile.mkdtemp(prefix="ones-fuzz-", dir=room()))


def clean() -> None:
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


# What job and companion say to each other

REPORTS: tuple[protocol.Report, ...] = (
    protocol.Hello(1, 4, 4, 256, 1.0, 64, 1024, 50_000, 90, 3, 120, 700, "step-000000700", "a note", noise=812.5),
    protocol.First(701, 2.5),
    protocol.Throughput(3, 710, 2_680, 2_560, 2.01, 256, 1.0, 0.71, 800.0, 170_000.0, 1),
    protocol.Epoch(3, 780, 50_000, 0.7, 0.81),
    protocol.Checkpoint("step-000000780", 4, 0, 780, 10**9, 12.5, 0.4, 1_700_000_000_000),
    protocol.Batch(780, 512, 1.41, 1_700_000_000_001, 2, 100),
    protocol.Bye("drained", 790, 0, "as it was told"),
)
SPEC = protocol.Spec(64, 1024, 64, 50_000, 90, 4)
STRATEGY = told.StrategyLimits(
    "ring", tuple(told.SizeLimits(n, n // 2, n, 2, 3, 4, 5, 6) for n in (2, 4, 8)), 2**34, False, True, ("a",), ("b",)
)
ORDER = protocol.Order(1_700_000_000_000, 1, 512, True)
LINES = [protocol.encode_report(n, NOW, report)[:-1] for n, report in enumerate(REPORTS, 1)]
_LINES = of_json([json.loads(line) for line in LINES])


def report(data: bytes) -> None:
    if (read := taken(ProtocolError, protocol.decode_report, data)) is None:
        return
    number, time, found = read
    hold(0 <= number <= protocol.MAX_INT and 0 <= time <= protocol.MAX_INT, "its number or time")
    _sound(found)
    again = protocol.decode_report(protocol.encode_report(number, time, found)[:-1])
    hold(again[2] == found, "written and read again it is another")


def _sound(found: Any) -> None:
    for value in vars(found).values():
        storable(value)
        if isinstance(value, str):
            hold(value.isprintable() and len(value) <= protocol.MAX_TEXT, f"a text: {value[:80]!r}")


def spec(data: bytes) -> None:
    if (found := taken(ProtocolError, protocol.decode_spec, data)) is None:
        return
    _sound(found)
    if found.limits is None:
        return
    hold(decode_limits(encode_limits(found.limits)) == found.limits, "its limits are others in the database")
    hold(all(str(line).isprintable() for line in described(found.limits)), "what its strategy holds it to")
    rules = size_rules(found, 4)
    limits = Limits(tuple(rule.gpus for rule in rules), 1, 2**31, 64, 1, rules, found.limits.strategy)
    sizes = np.array([1, *limits.gpus], dtype=np.int64)
    bounds(limits, sizes), quanta(limits, sizes, even=True)
    where = sizes.astype(np.float64)
    layout = layout_of(found)
    sent = layout.sent(where, where, where) if layout.wired else ()
    hold(all(np.isfinite(values).all() for values in (*layout.split(where), *sent)), "a step of no length")


def order(data: bytes) -> None:
    from ones_wrapper.files.job_io import OrderReader

    folder = scratch() / "inbox"
    folder.mkdir(exist_ok=True)
    (folder / protocol.ORDERS).write_bytes(data)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        found = OrderReader(folder, 1, folder, 7).poll()
    hold(all(line.isprintable() for line in told.getvalue().split("\n")), f"it says {told.getvalue()[:200]!r}")
    if found is not None:
        _sound(found)
        hold(found.batch is None or found.batch >= 1, "a batch below one")


def job_at(place: Path, **changes: Any) -> SlurmJob:
    """A running job of this user whose wrapper keeps its files under `place`."""
    base = job_of(Shape(1, 4), uid=os.geteuid(), work_dir=str(place), restart=1, submit_time=NOW - 600, held=False)
    return replace(base, **changes)


_SPLIT = b"\n--8<--\n"


def _directory(rng: Rng) -> bytes:
    files = [of_lines(_LINES, LINES)(rng), of_lines(_LINES, LINES)(rng), _SPECS(rng)]
    return _SPLIT.join(files)


_SPECS = of_json([vars(SPEC), asdict(replace(SPEC, limits=STRATEGY))])


def directory(data: bytes) -> None:
    """A whole job directory, read in two looks, the second after the file has changed."""
    from slurm_ones.jobs.elastic import WholeJob

    first, _, rest = data.partition(_SPLIT)
    second, _, said = rest.partition(_SPLIT)
    place = scratch() / "job"
    folder = place / protocol.directory_name(7)
    folder.mkdir(parents=True, exist_ok=True)
    job = WholeJob.of(job_at(place))
    (folder / protocol.SPEC).write_bytes(said)
    offset = after = 0
    for text in (first, first + second if len(data) % 3 else second):
        (folder / protocol.reports_name(1)).write_bytes(text)
        piece, problem = reading.read_reports(job, 1, offset, after, now=NOW, most=4)
        hold(offset <= piece.offset <= max(offset, len(text)), f"it reads on at {piece.offset} of {len(text)}")
        hold(len(piece.lines) <= 4 and len(problem) <= reading.MAX_PROBLEM, "too much at once")
        hold(problem.isprintable(), f"a complaint: {problem!r}")
        for line in piece.lines:
            hold(after < line.number <= reading.highest_number(job, 1, NOW), "numbers out of order, or too many")
            hold(line.time <= NOW + 300, "the future")
            after = line.number
            _sound(line.report)
        offset = piece.offset


def stored(data: bytes) -> None:
    """The same directory through the observer into a database, which then is asked."""
    from slurm_ones.jobs.elastic import WholeJob
    from slurm_ones.jobs.observer import job_record

    first, _, rest = data.partition(_SPLIT)
    observer, store = _observer()
    place = scratch() / "stored"
    folder = place / protocol.directory_name(7)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _number[0] += 1
    # A submission of its own for each input.
    job = job_at(place, submit_time=NOW - 600 + _number[0] / 1000, name=rest.decode("utf-8", "replace"))
    store.record_jobs([job_record(_elastic(job), "")])
    (folder / protocol.SPEC).write_bytes(rest.partition(_SPLIT)[2])
    (folder / protocol.reports_name(1)).write_bytes(first)
    observer.collect([WholeJob.of(job)], now=NOW)
    (found,) = store.job_summaries([7])
    hold(found.name.isprintable(), f"a name in the database: {found.name!r}")
    for value in vars(found).values():
        storable(value)
    store.histories([7])


_number = [0]


def _elastic(job: SlurmJob) -> Any:
    from slurm_ones.jobs.elastic import Elastic, WholeJob

    return Elastic(WholeJob.of(job), None, 4, False)


@cache
def _observer() -> tuple[Any, Any]:
    from ones_db import Store, migrate
    from slurm_ones.config import Settings
    from slurm_ones.jobs.observer import Observer

    url = f"sqlite:///{scratch() / 'fuzz.sqlite'}"
    migrate.upgrade(url)
    store = Store.open(url, "fuzz")
    return Observer(None, store, Settings()), store  # type: ignore[arg-type]


COMMENTS = [b"ones: gpus=1-16 batch=32-1024 resize=off", b"ones: nodes=2-4 batch=256", b"Ones:gpus=8,resize=on"]


def pointer(data: bytes) -> None:
    if (path := taken(ProtocolError, protocol.decode_pointer, data)) is None:
        return
    hold(path.startswith("/") and path.isprintable() and ".." not in path.split("/"), "a path that leads elsewhere")


def comment(data: bytes) -> None:
    from ones_wrapper.protocol.optin import MAX_BATCH, BadComment, parse_comment

    found = None
    with contextlib.suppress(UnicodeDecodeError):
        found = taken(BadComment, parse_comment, data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace"))
    for low, high in [] if found is None else filter(None, (found.gpus, found.nodes, found.batch)):
        hold(1 <= low <= high <= MAX_BATCH, "a range")


# What Slurm says

QUEUES = [{"jobs": [job], "errors": []} for release in ("22.05", "26.05") for job in recorded_jobs(release)]
RECORDS = [
    line for release in ("22.05", "26.05") for line in (DATA / f"scontrol-{release}.txt").read_bytes().splitlines()
]


def queue(data: bytes) -> None:
    from slurm_ones.slurm import parse

    try:
        said = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return
    parse.json_fault(said)
    _jobs(taken(SlurmError, parse.parse_jobs, said) or {})


def _jobs(jobs: dict[int, SlurmJob]) -> None:
    from slurm_ones.jobs.elastic import WholeJob, elastic_job

    snapshot = Snapshot(NOW, jobs, {}, {})
    for job in jobs.values():
        for value in vars(job).values():
            storable(value)
        _ = (job.ended, job.running, job.completing)
        if (elastic := elastic_job(WholeJob.of(job), snapshot, {}, None)) is not None:
            _ = (elastic.shape.gpus, elastic.gpu_range)
            storable(str(elastic.refusal))


_BETWEEN = "~0123456789abcdef~"


def _queue_fields(rng: Rng) -> bytes:
    from slurm_ones.slurm.parse import columns_of

    found = []
    for _ in range(rng.choice((1, 1, 2))):
        job = [RUNNING[name].encode() for name in columns_of((26, 5))]
        for _ in range(rng.choice((0, 1, 2, 5))):
            job[rng.randrange(len(job))] = damaged(rng.choice(job), rng, job)
        found.append(b"".join(text + _BETWEEN.encode() for text in job))
    data = b"\n".join(found) + b"\n"
    return damaged(data, rng) if rng.random() < 0.2 else data[:LONGEST]


def queue_fields(data: bytes) -> None:
    from slurm_ones.slurm.parse import columns_of, parse_queue

    text = data.decode("utf-8", "replace")
    _jobs(taken(SlurmError, parse_queue, text, columns_of((26, 5)), _BETWEEN) or {})


def records(data: bytes) -> None:
    from slurm_ones.slurm import parse

    text = data.decode("utf-8", "replace")
    try:
        nodes = parse.parse_nodes(text)
        found: list[Any] = [*nodes.values(), *parse.parse_partitions(text).values(), *parse.parse_reservations(text)]
        parse.nodes_of(nodes, {}, parse.parse_reservations(text), NOW)
        for quota in parse.parse_quotas(text).all:
            storable(quota.resource + quota.account + quota.user + quota.qos)
        parse.parse_usage_factors(text)
    except SlurmError as error:
        refused(error)
        return
    for one in found:
        for value in vars(one).values():
            storable(value)


_SEPARATOR = "|1f2e3d4c|"
_ROW = (
    "7", "here", "1000", "1010", "1500", "COMPLETED", "0:0", "2", "billing=8,gres/gpu:a100=8,gres/gpu=8,node=2",
    "billing=2,gres/gpu:a100=4,node=1", "n[1-2]", "60", "alice", "lab", "gpu", "2", "train",
)  # fmt: skip


def _row(rng: Rng) -> bytes:
    found = [text.encode() for text in _ROW]
    for _ in range(rng.choice((0, 1, 2))):
        found[rng.randrange(len(found))] = damaged(rng.choice(found), rng, found)
    line = _SEPARATOR.encode().join(found)
    return damaged(line, rng) if rng.random() < 0.2 else line


def rows(data: bytes) -> None:
    from slurm_ones.slurm.sacct import LONGEST as ROW
    from slurm_ones.slurm.sacct import Rejected, parse_rows

    for found in parse_rows(io.BytesIO(data), _SEPARATOR, "here", restarts=True):
        if isinstance(found, Rejected):
            hold(len(found.why) <= MESSAGE and len(found.text) <= 200, "a long complaint")
            found.why.encode()
            continue
        for value in vars(found).values():
            storable(value)
        hold(len(found.name) <= 2 * ROW, "a long name")


HOSTS = [b"n[1-3,5],gpu07", b"r[1-2]n[01-02]", b"login,n[0001-0100]", b"a[1-9][1-9]b,c"]


def hosts(data: bytes) -> None:
    found = taken(ValueError, expand, data.decode("utf-8", "replace")) or ()
    hold(len(found) <= MOST_HOSTS, "too many hosts")


# Files of people

CONFIGS = [
    b'cluster = "here"\nmode = "act"\nspool = "/shared/ones"\ntick_s = 30.5\n[whole_node_gpus]\nrtx = 4\n'
    b"[resize]\ndwell_s = 600\nshrink = false\n",
    b'database = "postgresql://ones@server/ones"\npolicy = "ones"\n[policy_options]\npopulation = 20\n',
]


def config(data: bytes) -> None:
    from slurm_ones.config import ConfigError, parse

    try:
        parse(data.decode("utf-8", "replace"))
    except ConfigError as error:
        for line in str(error).split("\n")[:3]:
            hold(len(line) <= 4 * MESSAGE, "a long message")


SCRIPTS = [
    b"#!/bin/bash\n#SBATCH --nodes=1-4 --gres=gpu:2\n#SBATCH --comment='ones: gpus=1-8'\n#SBATCH --time=1:00:00\n",
    b"#SBATCH --ntasks=4 --gpus=4 --begin=now+2hours # a comment\n#SBATCH --partition=gpu --hold --array=1-4\n",
]


def script(data: bytes) -> None:
    from tests.slurm.sbatch import read_request

    with contextlib.suppress(SlurmError):
        read_request(data.decode("utf-8", "replace"), (), now=NOW, work_dir="/", user="u", uid=1)


WORKLOADS = [
    b"name,time,application,num_replicas,batch_size\na,0,net,1,64\nb,12.5,net,4,256\n",
    b'name,time,application,num_replicas,batch_size\n"x ""y""",3,net,2,64\n',
]


def workload(data: bytes) -> None:
    from slurm_ones.simulate import BadInput
    from slurm_ones.simulate.workloads.profiles import read_workload

    path = scratch() / "jobs.csv"
    path.write_bytes(data)
    with contextlib.suppress(BadInput):
        for one in read_workload(path, {"net": None}).submissions:  # type: ignore[dict-item]
            hold(one.gpus >= 1 and one.batch >= 1 and math.isfinite(one.time), "a submission")


@cache
def _profile() -> dict[str, bytes]:
    folder = write_profile(scratch() / "sound")
    write_workload(scratch() / "unused.csv", [])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _profiles(rng: Rng) -> bytes:
    files = dict(_profile())
    name = rng.choice(sorted(files))
    files[name] = damaged(files[name], rng, list(files.values()))
    if rng.random() < 0.1:
        files[f"validation-{rng.choice(['0', '²', 'x', '9' * 99, '-1'])}.csv"] = files["validation-64.csv"]
    return _SPLIT.join(b"\n".join((key.encode(), value)) for key, value in sorted(files.items()))


def profile(data: bytes) -> None:
    import warnings

    from slurm_ones.simulate import BadInput
    from slurm_ones.simulate.workloads.profiles import read_profile

    folder = scratch() / "net"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part in data.split(_SPLIT):
        name, _, text = part.partition(b"\n")
        (folder / name.decode().replace("/", "_")).write_bytes(text)
    with contextlib.suppress(BadInput), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers of 1e308 overflow
        read_profile(folder)


# What lies in a job's directory for its own next run


def _tensors() -> list[Any]:
    kind = {"format": "pt", "DCP_VERSION": "1.0"}
    return [
        {
            "__metadata__": kind | {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}})},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        }
    ]


_HEADERS = of_json(_tensors())


def _tensor_file(rng: Rng) -> bytes:
    text = _HEADERS(rng)
    length = len(text) if rng.random() < 0.9 else rng.choice((0, 2**63, 2**64 - 1, 10**8, len(text) + 40))
    return length.to_bytes(8, "little") + text + bytes(32)


def tensors(data: bytes) -> None:
    from ones_wrapper.checkpoint.safetensors import decode

    path = scratch() / "tensors-00000.safetensors"
    path.write_bytes(data)
    try:
        decode(path)
    except ValueError as error:
        hold(len(str(error)) <= 4 * LONGEST, "a long message")


@cache
def _manifests() -> Make:
    from ones_wrapper.checkpoint.folder import FORMAT
    from ones_wrapper.data.progress import TrainingProgress

    progress = asdict(TrainingProgress())
    return of_json([{"format": FORMAT, "job_id": 7, "restart": 0, "progress": progress, "files": {"rest.pt": [0, 0]}}])


def manifest(data: bytes) -> None:
    from ones_wrapper.checkpoint.folder import Folder
    from ones_wrapper.files import checksums

    place = scratch() / "run"
    checkpoint = place / protocol.CHECKPOINTS / "step-000000007"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "rest.pt").touch()
    (checkpoint / protocol.MANIFEST).write_bytes(data)
    folder = Folder(place, 7, 0, 2)
    checksums.damage(folder.path("step-000000007"))
    with contextlib.suppress(ValueError):
        folder.manifest("step-000000007")


TRIES = {"job_id": 7, "requeues": 2, "requeued_at": "step-000000700", "restarts": 1, "failures": 1, "failed_at": ""}


def tries(data: bytes) -> None:
    from ones_wrapper.launch import restart_policy as again
    from ones_wrapper.launch import supervise as written
    from ones_wrapper.process.exit_codes import OUT_OF_MEMORY, STOP_CODE

    place = scratch() / "run"
    place.mkdir(exist_ok=True)
    (place / written.TRIES).write_bytes(data)
    found = written.read_tries(place, 7)
    for code in (137, OUT_OF_MEMORY, STOP_CODE):
        for warned in (True, False):
            end = again.StartOutcome(code, warned=warned, checkpoint="step-000000900", ours=True)
            again.decide(end, found, again.RestartLimits())


def told(data: bytes) -> None:
    from ones_wrapper.files import job_directory as jobdir

    place = scratch() / "run"
    place.mkdir(exist_ok=True)
    (place / protocol.reports_name(3)).write_bytes(data)
    (place / ".exit-3-0").write_bytes(data[:100])
    jobdir.summarize_reports(place, 3)
    jobdir.ExitCodes(place, 3).explaining()


POINTERS = [b"/scratch/alice/ones/ones-4711\n", "/arbeit/größer/ones-7\n".encode(), b"/a b/c\n"]
LEADER = {"term": 3, "host": "n1", "port": 23456, "token": "a-b_c", "task": 2, "restart": 1, "array": 7}


def leader(data: bytes) -> None:
    from ones_wrapper.membership.files import MOST_BYTES, OVER, HotFolder

    folder = HotFolder(scratch() / "run", 7)
    folder.path.mkdir(parents=True, exist_ok=True)
    for name in ("leader-3.json", OVER):
        (folder.path / name).write_bytes(data)
    with contextlib.redirect_stderr(io.StringIO()) as words:
        found = folder.newest()
        hold(folder.over() == (data.strip() == b"7" and len(data) <= MOST_BYTES), "whether the job has ended")
    hold(len(words.getvalue()) < 1000, "a flood of words")
    hold(folder.next_term(found) == (4 if found else 0), "the next term")
    if found is not None:
        hold(len(data) <= MOST_BYTES and found.term == 3 and 1 <= found.port < 65_536, f"{found}")
        hold(found.host.isprintable() and " " not in found.host and found.place.isprintable(), f"{found}")


def memory(data: bytes) -> None:
    from ones_wrapper.files.job_directory import MEMORY
    from ones_wrapper.run import memory as remembered

    place = scratch() / "run"
    place.mkdir(exist_ok=True)
    (place / MEMORY).write_bytes(data)
    with contextlib.redirect_stderr(io.StringIO()):
        found = remembered.look_up(place, 64, "cpu")
    hold(found is None or 1 <= found.samples <= 64, "a batch")


# What people are shown

NAMES = [text.encode("utf-8", "surrogatepass") for text in TEXTS] + [b"resnet-50 run 3", b"alice"]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass" if _valid(data) else "replace")


def _valid(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def shown(data: bytes) -> None:
    import logging

    from slurm_ones.cli.common import console
    from slurm_ones.service.logs import OneLine, TerminalFormatter
    from slurm_ones.text import plain, safe

    text = _text(data)
    found = plain(text, 40)
    hold(found.isprintable() and len(found) <= 40, f"{found!r}")
    told = console.render_str(f"[bold]{safe(text, 40)}[/]")
    # Before a bracket rich takes a backslash for its own.
    hold(told.plain.replace("\\", "") == found.replace("\\", ""), f"markup of {text[:80]!r}")
    hold([span.style for span in told.spans] in ([], ["bold"]), f"markup in {text[:80]!r}")
    record = logging.LogRecord("x", logging.WARNING, "", 1, "job %d: %s", (7, text), None)
    for layout in (OneLine(journal=True), OneLine(journal=False)):
        hold(layout.format(record).isprintable(), "a log line")
    hold(all(line.isprintable() for line in TerminalFormatter().format(record).split("\n")), "a log line on a terminal")


class _Tags(HTMLParser):
    """What a browser would make of a page, without its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [key for key, _ in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)

    def handle_comment(self, data: str) -> None:
        self.found.append("comment")


def tags(html: str) -> list[object]:
    """The tags and attributes' names of a page."""
    parser = _Tags()
    parser.feed(html)
    parser.close()
    return parser.found


def _pages(text: str) -> Iterable[str]:
    from slurm_ones.show.pages import environment

    # A mean without an interval has one tag less: that is the template's.
    row = {"title": text, "cells": [(text, text or "–")], "recorded": text}
    elasticity = {
        "said": [text], "seeds": [text], "by_seed": [[text, text]], "assigned": [[text, text]], "more": 1,
        "listed": [[text, text, text, text]], "assumptions": [text], "left_out": [(text, 1)], "doubts": [text],
    }  # fmt: skip
    said = {"title": text, "run": {text: text}, "columns": [text], "rows": [row], "meanings": [(text, text)]}
    yield (
        environment()
        .get_template("study.html")
        .render(**said, errors=[text], elasticity=elasticity, pictures={}, written="")
    )


@cache
def _sound_tags() -> list[list[object]]:
    return [tags(html) for html in _pages("sound")]


def page(data: bytes) -> None:
    hold([tags(html) for html in _pages(_text(data))] == _sound_tags(), "a tag that the page's template has not")


QUESTIONS = [
    b"SELECT name FROM jobs WHERE name = 'a;b' -- c\n;",
    b"WITH a AS (SELECT 1) SELECT * FROM a WHERE 1 = :x",
    b"scaling",
    b"gpu_hours",
    b"job_id=7",
    b"DROP TABLE jobs",
    b"SELECT 1; DELETE FROM jobs",
    b"SELECT load_extension('x')",
    b"PRAGMA writable_schema=1",
]


def question(data: bytes) -> None:
    """SQL, names of views and of columns: answered, or refused; what is stored stays as it is."""
    from ones_db.backend import StoreError
    from ones_db.query import KINDS, QueryError, view_query
    from slurm_ones.cli.query import _value
    from slurm_ones.simulate import BadInput

    text = data.decode("utf-8", "replace")
    for name, where in ((text, ()), ("scaling", (text,))):
        with contextlib.suppress(QueryError):
            view_query(name, where)
    for kind in KINDS:
        with contextlib.suppress(QueryError, BadInput):
            _value("name", text, kind)
    asked, count = _asked()
    with contextlib.suppress(StoreError), asked.ask(text) as answer:
        for _, row in zip(range(10), answer.rows, strict=False):
            _ = row
    if len(data) % 64 == 0:
        with asked.ask("SELECT count(*) FROM jobs") as answer:
            hold(next(iter(answer.rows))[0] == count, "a question changed the database")


@cache
def _asked() -> tuple[Any, int]:
    from ones_db import Store, migrate
    from ones_db.query import Reader
    from tests.db.make import job

    url = f"sqlite:///{scratch() / 'asked.sqlite'}"
    migrate.upgrade(url)
    with Store.open(url, "fuzz") as store:
        store.record_jobs([job(7), job(8)])
    return Reader(url, timeout_s=0.2), 2


_TEXT = of_text(NAMES)

PARSERS = [
    Parser("report line", 24, _LINES, report),
    Parser("spec.json", 8, _SPECS, spec),
    Parser("orders.json", 6, of_json([vars(ORDER)]), order),
    Parser("job directory", 7, _directory, directory),
    Parser("reports in the database", 0.15, _directory, stored),
    Parser("pointer", 6, of_text(POINTERS), pointer),
    Parser("comment", 10, of_text(COMMENTS), comment),
    Parser("squeue --json", 3, of_json(QUEUES), queue),
    Parser("squeue fields", 8, _queue_fields, queue_fields),
    Parser("scontrol records", 6, of_text(RECORDS), records),
    Parser("sacct rows", 8, of_lines(_row, [_SEPARATOR.join(_ROW).encode()]), rows),
    Parser("host list", 8, of_text(HOSTS), hosts),
    Parser("config.toml", 2, of_text(CONFIGS), config),
    Parser("sbatch script", 2, of_text(SCRIPTS), script),
    Parser("workload CSV", 3, of_text(WORKLOADS), workload),
    Parser("profile", 0.1, _profiles, profile),
    Parser("safetensors header", 4, _tensor_file, tensors),
    Parser("manifest.json", 3, lambda rng: _manifests()(rng), manifest),
    Parser("tries.json", 3, of_json([TRIES]), tries),
    Parser("own reports", 2, of_lines(_LINES, LINES), told),
    Parser("leader file", 3, of_json([LEADER]), leader),
    Parser(".memory.json", 3, of_json([{"declared": 64, "found": 32, "device": "cpu"}]), memory),
    Parser("text for people", 8, _TEXT, shown),
    Parser("HTML pages", 0.7, _TEXT, page),
    Parser("SQL and names of views", 1.5, of_text([*QUESTIONS, *NAMES]), question),
]
