"""Messages between job and companion: files in the job's directory.

The directory lies on the shared file system and belongs to the job's user::

    spec.json                what the job can do (`Spec`), replaced atomically by the job
    reports-<restart>.jsonl  one file a run, one numbered report a line, appended by the job
    orders.json              the order in force (`Order`), replaced atomically by the companion
    checkpoints/step-<n>/    complete checkpoints; a name that starts with a dot is not complete
    hot/                     who leads a job of blocks (`ones_wrapper.membership`); the job's own business

The directory is `ones-<job id>`, in the directory that the job was submitted from. If the job's directory is elsewhere,
a file `ones-<job id>.where` there holds its path.

A job of blocks is a job array. A block is one start of one task; the blocks that train together are a membership,
numbered by generations. The block with rank 0 leads, for a term. Reports and orders have a term's number in place of a
plain job's restart.

Both sides share only this module and `limits`. The module needs only the standard library and opens no file. It checks
every value it parses: a report is another user's input, and an order steers a week of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, get_args

from ones_wrapper.protocol.fields import MAX_BLOCKS as MAX_BLOCKS
from ones_wrapper.protocol.fields import MAX_INT as MAX_INT
from ones_wrapper.protocol.fields import MAX_TEXT as MAX_TEXT
from ones_wrapper.protocol.fields import ProtocolError as ProtocolError
from ones_wrapper.protocol.fields import build, object_of, types_of, value_of
from ones_wrapper.protocol.limits import StrategyLimits

SPEC = "spec.json"
ORDERS = "orders.json"
FUSION = "fusion.json"
"""File in which a job reports that it may train other jobs of its sweep (`Fusion`)."""
CHECKPOINTS = "checkpoints"
RUN_URL = "run-url"
"""File with the address of a job's run in W&B or MLflow."""
MANIFEST = "manifest.json"
"""Written last into a checkpoint: a directory without it is not complete."""

MAX_LINE = 16_384
"""Longest line of reports, and longest order, in bytes; readers ignore longer ones."""
MAX_SPEC = 131_072
"""Largest spec in bytes: the limits of a strategy make a spec long."""

LOOK_SIGNAL = "URG"
"""Signal to a job's steps, sent once an order to drain is written, so that they read the order at once. Losing the
signal costs half a second, and programs without a handler ignore the signal."""

DRAIN_WAIT_S = 60.0
"""Time that a drained job waits for its requeue before it carries on training."""


def directory_name(job_id: int) -> str:
    """Name of the job's directory inside the job's working directory."""
    return f"ones-{job_id}"


def pointer_name(job_id: int) -> str:
    """Name of the file that holds the path of a job's directory, if that is not in the submit directory."""
    return f"ones-{job_id}.where"


MAX_POINTER = 4_096
"""Largest pointer file in bytes: one absolute path and a newline."""


def encode_pointer(path: str) -> bytes:
    """Return the content of a pointer file for the directory `path`. Raises `ProtocolError`."""
    text = path.encode("utf-8", "surrogateescape") + b"\n"
    decode_pointer(text)
    return text


def decode_pointer(text: bytes) -> str:
    """Return the directory that a pointer file names; raises `ProtocolError`. The directory's owner is not checked."""
    if len(text) > MAX_POINTER:
        raise ProtocolError(f"longer than {MAX_POINTER} bytes")
    path = text.removesuffix(b"\n").decode("utf-8", "surrogateescape")
    if not path.startswith("/") or not path.isprintable() or ".." in path.split("/"):
        raise ProtocolError(f"{path!r:.100} is not an absolute path without control characters and ..")
    return path


def reports_name(restart: int) -> str:
    """Name of the report file of one run."""
    return f"reports-{restart}.jsonl"


HOT = "hot"
"""Folder, in the directory of a job of blocks, in which the blocks find each other."""


def spool_order_name(job_id: int) -> str:
    """Name of a job's order file in the site's spool, used if the companion cannot write into the job's directory."""
    return f"orders-{job_id}.json"


SPOOL_MARK = "companion"
"""File by which a spool shows that its companion acts: renewed at each tick, removed when the companion ends."""
SPOOL_FILE = "/etc/slurm-ones/spool"
"""File with one line, the path of the site's spool, put on compute nodes by an administrator. Jobs believe the file
only if root owns the file and its folder, and nobody else may write there."""


@dataclass(frozen=True)
class Spec:
    """Limits of a job, by its script and its wrapper."""

    base_batch: int
    """Global batch that the script's learning rate was chosen for, in samples."""
    max_batch: int
    """Largest global batch the job takes."""
    max_local_batch: int
    """Most samples per GPU per forward pass; the job lowers this number if its GPUs turn out to hold less."""
    dataset: int
    """Samples in an epoch; 0 if unknown."""
    epochs: int
    """Epochs that the script means to train; 0 if unknown."""
    max_passes: int = 1
    """Most accumulation steps (forward passes) per optimizer step. The largest global batch is this × `max_local_batch`
    × world size."""
    term: int = 0
    """Term of the present leader, for a job of blocks; reports carry this number as their restart."""
    hot: bool = False
    """True if a job of blocks sends its state from memory to memory as blocks join and leave. Otherwise each change
    begins a term, from a checkpoint."""
    multiple_of: int = 1
    """Divisor of global batches, if the GPUs can take that many samples."""
    limits: StrategyLimits | None = None
    """Limits of the job's strategy; None for plain data parallel, at any number of GPUs."""
    gradient_bytes: int = 0
    """Bytes of the gradients that an optimizer step averages over all ranks, for plain data parallel; 0 if unknown."""
    rule: str = ""
    """Rule by which optimizer steps follow the batch: `sgd`, `adam` or `other`, by the optimizers' class; `none` if the
    script adapts the rate itself. Empty while unknown."""
    grown: int = 0
    """Largest global batch at no cost in samples (`growth`), by the rule and the gradient noise scale measured."""


@dataclass(frozen=True)
class FusedMember:
    """Job of a sweep that another job of the sweep trains."""

    job_id: int
    arguments: tuple[str, ...] = ()
    """Arguments of the member's batch script, as Slurm has them."""


@dataclass(frozen=True)
class Fusion:
    """Report of a job that `ones-run --fuse` started."""

    restart: int
    asks: bool
    """True while the job waits for an order that names members."""
    members: tuple[int, ...] = ()
    """Ids of the other jobs that this job trains."""


@dataclass(frozen=True)
class Order:
    """Order of the companion to a job. The order with the highest number is in force."""

    number: int
    """Number that rises with each order of the job, also after the companion restarts (milliseconds of its clock)."""
    restart: int
    """Run for which the order was written; a drain concerns only that run."""
    batch: int | None = None
    """Global batch in samples, from now on and in later runs; None leaves the job's own batch."""
    drain: bool = False
    """True to checkpoint at the next step boundary, report the checkpoint, and wait for the requeue."""
    blocks: tuple[int, ...] | None = None
    """Tasks of a job of blocks that are to train together, preferred leaders first; None leaves the choice to the job.
    With tasks, `batch` holds from the step at which they train together."""
    gain: float | None = None
    """Expected ratio of useful samples per second after the resize to those before, for the job's log."""
    members: tuple[FusedMember, ...] | None = None
    """Members of the fused training that the job asked for, the job itself first; empty if it trains only itself."""


@dataclass(frozen=True)
class Hello:
    """First report of a run: its size, settings and position in the training."""

    kind: ClassVar[str] = "hello"
    nodes: int
    gpus_per_node: int
    world: int
    batch: int
    """Global batch in samples; 0, like every unknown number here, if the script never calls `ones.init`."""
    lr_factor: float
    """Ratio of the learning rate to the rate that the script set for `Spec.base_batch`."""
    base_batch: int
    max_batch: int
    dataset: int
    epochs: int
    epoch: int
    """Epoch in which the run begins, from 0."""
    cursor: int
    """Samples of that epoch already used."""
    step: int
    checkpoint: str
    """Name of the checkpoint loaded, or empty."""
    note: str = ""
    """Message for people, for example that a damaged checkpoint was passed over."""
    queue_s: float = 0.0
    """Time from the last report of the run before to the batch script's `ones-run`; 0 in a first run."""
    launch_s: float = 0.0
    """Time from the batch script's `ones-run` to the ranks' first line, imports included."""
    import_s: float = 0.0
    """Part of `launch_s` spent on imports."""
    group_s: float = 0.0
    """Time to build the process group."""
    load_s: float = 0.0
    """Time to load the checkpoint."""
    noise: float | None = None
    """Gradient noise scale in samples, tr(Σ)/|G|² (McCandlish et al. 2018). A sample at batch M counts as (noise +
    M0)/(noise + M) samples at the base batch M0."""
    progress: float | None = None
    """Progress since the job's first run, in samples of the base batch: the sum of each sample's worth. Readers believe
    no progress above the number of samples used."""
    resizes: int = 0
    """Runs of this job so far that began at another world size than the previous run ended with."""
    attempt: int = 0
    """Number of times that the ranks were started again within this run, since a rank died or hung."""
    directory: str = ""
    """The job's directory; empty if the wrapper is too old to report a directory."""
    spool: str = ""
    """Spool from which the job reads orders besides its directory; empty if there is none, or `directory` is empty."""


@dataclass(frozen=True)
class First:
    """The first step of a run ended."""

    kind: ClassVar[str] = "first"
    step: int
    seconds: float
    """Time from the hello to the end of the step."""


@dataclass(frozen=True)
class Throughput:
    """Samples used over an interval of steps at one world size and batch."""

    kind: ClassVar[str] = "throughput"
    epoch: int
    step: int
    """Optimizer steps since the job's first run."""
    cursor: int
    samples: int
    """Samples used in the interval, over all ranks; 0, like `batch`, if the script never calls `ones.init`."""
    seconds: float
    """Length of the interval."""
    batch: int
    lr_factor: float
    loss: float | None = None
    noise: float | None = None
    """Noise scale as in `Hello`, newly measured."""
    progress: float | None = None
    """Progress as in `Hello`, at the end of the interval."""
    nonfinite: int = 0
    """Steps of the interval whose loss is not a finite number; `loss` leaves them out."""
    gpu_use: float | None = None
    """Share of the interval in which rank 0's GPU was busy, from 0 to 1; None if its driver does not report its use."""
    gpu_memory: int | None = None
    """Bytes in use of rank 0's GPU memory; None if its driver does not report its use."""
    tokens: int | None = None
    """Tokens of the interval's samples; None if batches do not tell their number of tokens."""


@dataclass(frozen=True)
class Epoch:
    """An epoch ended."""

    kind: ClassVar[str] = "epoch"
    epoch: int
    """The epoch that ended, from 0."""
    step: int
    samples: int
    """Samples used in the epoch: the dataset's length, unless something is wrong."""
    loss: float | None = None
    accuracy: float | None = None
    nonfinite: int = 0
    """Steps of the epoch whose loss is not a finite number."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint is durable: written, fsynced and renamed."""

    kind: ClassVar[str] = "checkpoint"
    name: str
    epoch: int
    cursor: int
    step: int
    bytes: int
    seconds: float
    """Time from the checkpoint's beginning until it was durable."""
    stall_s: float | None = None
    """Seconds for which training paused; fewer than `seconds` if the checkpoint was written in the background."""
    order: int | None = None
    """Number of the order that asked for the checkpoint; with a drain, the job now waits for its requeue."""


@dataclass(frozen=True)
class Batch:
    """Change of the global batch, or of the rate and momentum that belong to the batch, at a step boundary."""

    kind: ClassVar[str] = "batch"
    step: int
    batch: int
    lr_factor: float
    order: int | None = None
    passes: int = 1
    """Accumulation steps (forward passes) per optimizer step from now on."""
    momentum_power: float = 1.0
    """Exponent applied to the script's momentum from now on."""


@dataclass(frozen=True)
class Membership:
    """Change of the blocks that train together, at a step boundary."""

    kind: ClassVar[str] = "membership"
    generation: int
    """Number that rises with each change, over all terms of the job."""
    blocks: tuple[int, ...]
    """Tasks of the blocks, in rank order; the first leads."""
    restarts: tuple[int, ...]
    """Slurm's restart count of each block's task."""
    nodes: int
    gpus_per_node: int
    """GPUs of each node; 0 if nodes have different numbers."""
    world: int
    step: int
    batch: int
    """Global batch from now on, in samples."""
    pause_s: float
    """Time from the last step before the change to the end of the first step after it, less a usual step."""
    bytes: int = 0
    """Bytes of state that were sent to new blocks."""
    transfer_s: float = 0.0
    """Part of `pause_s` that sending the state took."""
    ready_s: float = 0.0
    """Time from the order until the last new block was ready to join, while training went on; 0 if no block joined."""
    order: int | None = None
    """Number of the order that asked for the change; None if the job changed by itself, as after a loss."""
    why: str = ""
    """Cause of the change: order, lost, leaving (a block's time is over, or its owner cancelled it) or first."""


@dataclass(frozen=True)
class Note:
    """Message for people, while training goes on."""

    kind: ClassVar[str] = "note"
    note: str
    step: int


@dataclass(frozen=True)
class Bye:
    """Last report of a run; a run that is killed sends none."""

    kind: ClassVar[str] = "bye"
    reason: str
    """Reason: finished, drained, signal (or a time limit), error, stopped or moved. Stopped: the owner stopped the run,
    or the script left by itself. Moved: the leader left, and training goes on in the next term."""
    step: int
    exit_code: int = 0
    note: str = ""


Report = Hello | First | Throughput | Epoch | Checkpoint | Batch | Membership | Note | Bye
REPORTS: dict[str, type[Report]] = {cls.kind: cls for cls in get_args(Report)}

T = TypeVar("T", Spec, Order, Fusion, Hello, First, Throughput, Epoch, Checkpoint, Batch, Membership, Note, Bye)

# Looked up once: reading reports is what a busy companion does most.
_READ: tuple[Any, ...] = (Spec, Order, Fusion, *REPORTS.values())
_TYPES = {cls: types_of(cls) for cls in _READ}


def _build(cls: type[T], data: Mapping[str, Any]) -> T:
    return build(cls, _TYPES[cls], data)


def _object(text: bytes | str, most: int = MAX_LINE) -> dict[str, Any]:
    if len(text) > most:
        raise ProtocolError(f"longer than {most} bytes")
    return object_of(text)


def encode_report(number: int, time: float, report: Report) -> bytes:
    """Return one line of a report file. `number` counts lines from 1 in each run, `time` is the Unix time in seconds.

    Fields that are None are left out, and so are numbers that no reader takes (an infinite loss, or one of 1e30): such
    a number would cost the whole line.
    """
    given = {name: value for name, value in vars(report).items() if value is not None}
    body = {name: value for name, value in given.items() if not isinstance(value, float) or abs(value) <= MAX_INT}
    line = {"n": number, "t": round(time, 3), "kind": report.kind, **body}
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_report(line: bytes) -> tuple[int, float, Report]:
    """Return number, time and report of a line in a report file. Raises `ProtocolError`; a reader then skips only this
    line."""
    data = _object(line)
    number = value_of("n", int, data.get("n"))
    time = value_of("t", float, data.get("t"))
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in REPORTS:
        raise ProtocolError(f"kind: {kind!r:.40} is none of {', '.join(REPORTS)}")
    return number, time, _build(REPORTS[kind], data)  # type: ignore[type-var]


def encode(value: Spec | Order | Fusion) -> bytes:
    """Return the text of `spec.json`, `orders.json` or `fusion.json`."""
    return json.dumps(asdict(value), allow_nan=False, indent=1).encode() + b"\n"


def decode_spec(text: bytes) -> Spec:
    """Return the spec that a job wrote. Raises `ProtocolError`."""
    return _build(Spec, _object(text, MAX_SPEC))


def decode_fusion(text: bytes) -> Fusion:
    """Return the fusion report that a job wrote. Raises `ProtocolError`."""
    return _build(Fusion, _object(text, MAX_SPEC))


def decode_order(text: bytes) -> Order:
    """Return the order that a companion wrote. Raises `ProtocolError`."""
    order = _build(Order, _object(text))
    if order.batch is not None and order.batch < 1:
        raise ProtocolError(f"batch: {order.batch} is not a batch")
    if order.blocks is not None and len({*order.blocks}) != max(len(order.blocks), 1):
        raise ProtocolError("blocks: not task numbers, each once")
    return order
