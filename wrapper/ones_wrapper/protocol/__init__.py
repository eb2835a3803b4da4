"""Messages between job and companion: files in the job's directory.

The directory is on the shared file system, and the job's user owns it::

    spec.json                what the job can do (`Spec`), replaced atomically by the job
    reports-<restart>.jsonl  reports of one run, one numbered report a line, appended by the job
    orders.json              the newest order (`Order`), replaced atomically by the companion
    checkpoints/step-<n>/    complete checkpoints; a name that starts with a dot is not complete
    hot/                     address of the leader, by which the blocks of a job find each other; only they use it

By default the directory is `ones-<job id>` in the directory from which the job was submitted. If it is elsewhere, a
file `ones-<job id>.where` in the submit directory holds its path.

A job of blocks is a job array. A block is one start of one task. The blocks that train together are a membership; each
change of it begins a new generation. The block with rank 0 leads: its time is a term. Reports and orders of such a job
have the term's number in place of the restart count.

Job and companion share only this package. It needs only the standard library and opens no file. It checks every value
that it parses: a report comes from another user, and an order affects a week of training.
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
"""File that is written last into a checkpoint: a directory without it is not complete."""

MAX_LINE = 16_384
"""Largest length in bytes of an order, and of a line of reports. Readers reject longer ones."""
MAX_SPEC = 131_072
"""Largest length of a spec in bytes. It is larger than `MAX_LINE` since a spec holds a strategy's limits."""

LOOK_SIGNAL = "URG"
"""Signal to a job's Slurm steps after an order to drain was written, so that they read the order at once. If the signal
is lost, they read it half a second later. Programs without a handler ignore this signal."""

DRAIN_WAIT_S = 60.0
"""Seconds that a drained job waits for its requeue. After that it continues to train."""


def directory_name(job_id: int) -> str:
    """Return the name of the job's directory inside the submit directory."""
    return f"ones-{job_id}"


def pointer_name(job_id: int) -> str:
    """Return the name of the file, in the submit directory, that holds the path of a job's directory elsewhere."""
    return f"ones-{job_id}.where"


MAX_POINTER = 4_096
"""Largest pointer file in bytes: one absolute path and a newline."""


def encode_pointer(path: str) -> bytes:
    """Return the content of a pointer file for the directory `path`. Raises `ProtocolError`."""
    text = path.encode("utf-8", "surrogateescape") + b"\n"
    decode_pointer(text)
    return text


def decode_pointer(text: bytes) -> str:
    """Return the directory that a pointer file names. Raises `ProtocolError`. The directory's owner is not checked."""
    if len(text) > MAX_POINTER:
        raise ProtocolError(f"longer than {MAX_POINTER} bytes")
    path = text.removesuffix(b"\n").decode("utf-8", "surrogateescape")
    if not path.startswith("/") or not path.isprintable() or ".." in path.split("/"):
        raise ProtocolError(f"{path!r:.100} is not an absolute path without control characters and ..")
    return path


def reports_name(restart: int) -> str:
    """Return the name of the report file of one run."""
    return f"reports-{restart}.jsonl"


HOT = "hot"
"""Folder, in the directory of a job of blocks, in which the blocks find each other."""


def spool_order_name(job_id: int) -> str:
    """Return the name of a job's order file in the site's spool, for a companion that cannot write into the job's
    directory."""
    return f"orders-{job_id}.json"


SPOOL_MARK = "companion"
"""File in a spool that a companion writes again at each tick and removes at its end. A recent time of the file shows
that a companion uses the spool."""
SPOOL_FILE = "/etc/slurm-ones/spool"
"""File on compute nodes in which an administrator names the path of the site's spool, in one line. Jobs use it only if
root owns the file and its folder, and no other user may write to either."""


@dataclass(frozen=True)
class Spec:
    """Sizes that a job can take, and facts about its training, from its script and its wrapper."""

    base_batch: int
    """Global batch, in samples, for which the script's learning rate was chosen."""
    max_batch: int
    """Largest global batch that the job accepts."""
    max_local_batch: int
    """Largest number of samples per GPU per forward pass. The job lowers this number if a GPU runs out of memory."""
    dataset: int
    """Samples in an epoch; 0 if unknown."""
    epochs: int
    """Number of epochs to train; 0 if unknown."""
    max_passes: int = 1
    """Largest number of accumulation steps (forward passes) per optimizer step. The largest global batch is
    `max_passes` × `max_local_batch` × world size."""
    term: int = 0
    """Number of the present leader's term in a job of blocks. Its reports have the term in place of the restart
    count."""
    hot: bool = False
    """True if new blocks get the state from other blocks' memory. If False, each change of blocks begins a term from a
    checkpoint."""
    multiple_of: int = 1
    """Divisor of global batches, unless the GPUs hold fewer samples than this."""
    limits: StrategyLimits | None = None
    """Limits of the job's strategy; None for plain data parallel, which can use any number of GPUs."""
    gradient_bytes: int = 0
    """Bytes of the gradients of one optimizer step, which plain data parallel averages over all ranks; 0 if unknown."""
    rule: str = ""
    """Rule by which learning rate and momentum follow the batch: `sgd`, `adam` or `other`, depending on the optimizers'
    class. `none` if the script adapts the rate itself. Empty while unknown."""
    grown: int = 0
    """Largest global batch that needs no more samples than the base batch (`growth`), by `rule` and the measured
    gradient noise scale."""


@dataclass(frozen=True)
class FusedMember:
    """A job of a sweep that another job of the sweep trains."""

    job_id: int
    arguments: tuple[str, ...] = ()
    """Arguments of the member's batch script, as Slurm has them."""


@dataclass(frozen=True)
class Fusion:
    """Report of a job that `ones-run --fuse` started: it may train other jobs of its sweep within itself."""

    restart: int
    asks: bool
    """True while the job waits for an order that names the jobs to train."""
    members: tuple[int, ...] = ()
    """Ids of the other jobs that this job trains."""


@dataclass(frozen=True)
class Order:
    """Order of the companion to a job. The order with the highest number counts."""

    number: int
    """Number that rises with each order of the job. It is the companion's clock in milliseconds, so that it rises after
    a restart, too."""
    restart: int
    """Restart count of the run for which the order was written. `drain` concerns only that run."""
    batch: int | None = None
    """Global batch in samples, from now on and in later runs; None for the job's own batch."""
    drain: bool = False
    """True to checkpoint at the next step boundary, report the checkpoint, and wait for the requeue."""
    blocks: tuple[int, ...] | None = None
    """Tasks whose blocks are to train together, preferred leaders first; None if the job chooses. `batch` then takes
    effect at the first step of these blocks."""
    gain: float | None = None
    """Expected useful samples per second after the resize, divided by those before it; for the job's log."""
    members: tuple[FusedMember, ...] | None = None
    """Jobs to train together as one (`Fusion`), this job first; empty if it trains only itself. None in an order that
    is not for a sweep."""


@dataclass(frozen=True)
class Hello:
    """First report of a run: its size, settings and position in the training."""

    kind: ClassVar[str] = "hello"
    nodes: int
    gpus_per_node: int
    world: int
    batch: int
    """Global batch in samples. If the script never calls `ones.init`, this and all other unknown numbers are 0."""
    lr_factor: float
    """Learning rate that the optimizer uses, divided by the rate that the script set for `Spec.base_batch`."""
    base_batch: int
    max_batch: int
    dataset: int
    epochs: int
    epoch: int
    """Epoch in which the run begins, from 0."""
    cursor: int
    """Samples of epoch `epoch` that earlier runs used."""
    step: int
    checkpoint: str
    """Name of the checkpoint loaded, or empty."""
    note: str = ""
    """Message for people, for example that a damaged checkpoint was skipped."""
    queue_s: float = 0.0
    """Seconds from the previous run's last report to the start of `ones-run`; 0 in a first run."""
    launch_s: float = 0.0
    """Seconds from the start of `ones-run` to the script's call of `init` on the ranks, imports included."""
    import_s: float = 0.0
    """Part of `launch_s` spent on imports."""
    group_s: float = 0.0
    """Seconds to build the process group."""
    load_s: float = 0.0
    """Seconds to load the checkpoint."""
    noise: float | None = None
    """Gradient noise scale in samples, tr(Σ)/|G|² (McCandlish et al. 2018). A sample at batch M makes as much progress
    as (noise + M0)/(noise + M) samples at the base batch M0."""
    progress: float | None = None
    """Progress since the job's first run, in samples of the base batch: each sample used counts with its statistical
    efficiency. Readers reject progress above the number of samples used."""
    resizes: int = 0
    """Number of this job's runs that began at another world size than the previous run's last."""
    attempt: int = 0
    """Number of earlier starts of the ranks within this run. Each ended when a rank died or hung."""
    directory: str = ""
    """Path of the job's directory; empty from old wrappers."""
    spool: str = ""
    """Spool from which the job also reads orders; empty if there is none, or if `directory` is empty."""


@dataclass(frozen=True)
class First:
    """Report that a run's first step has ended."""

    kind: ClassVar[str] = "first"
    step: int
    seconds: float
    """Seconds from the hello to the end of the first step."""


@dataclass(frozen=True)
class Throughput:
    """Report of the samples used in an interval of steps, at one world size and batch."""

    kind: ClassVar[str] = "throughput"
    epoch: int
    step: int
    """Optimizer steps since the job's first run."""
    cursor: int
    samples: int
    """Samples that all ranks used in the interval; 0, like `batch`, if the script never calls `ones.init`."""
    seconds: float
    """Length of the interval in seconds."""
    batch: int
    lr_factor: float
    loss: float | None = None
    noise: float | None = None
    """New measurement of the gradient noise scale, as in `Hello`."""
    progress: float | None = None
    """Progress at the end of the interval, as in `Hello`."""
    nonfinite: int = 0
    """Steps of the interval whose loss is not finite; `loss` is the mean without them."""
    gpu_use: float | None = None
    """Fraction of the interval in which rank 0's GPU computed, from 0 to 1; None if the driver does not report it."""
    gpu_memory: int | None = None
    """Bytes of rank 0's GPU memory in use; None if the driver does not report them."""
    tokens: int | None = None
    """Number of tokens in the interval's samples; None if the job does not count tokens."""


@dataclass(frozen=True)
class Epoch:
    """Report that an epoch has ended."""

    kind: ClassVar[str] = "epoch"
    epoch: int
    """Number of the epoch that ended, from 0."""
    step: int
    samples: int
    """Samples used in the epoch: the dataset's length, or slightly fewer with init's `shares="equal"`."""
    loss: float | None = None
    accuracy: float | None = None
    nonfinite: int = 0
    """Steps of the epoch whose loss is not a finite number."""


@dataclass(frozen=True)
class Checkpoint:
    """Report of a durable checkpoint: written, fsynced and renamed."""

    kind: ClassVar[str] = "checkpoint"
    name: str
    epoch: int
    cursor: int
    step: int
    bytes: int
    seconds: float
    """Seconds from the beginning of the checkpoint until it was durable."""
    stall_s: float | None = None
    """Seconds for which training paused; less than `seconds` if the checkpoint was written in the background."""
    order: int | None = None
    """Number of the order that requested the checkpoint; None without an order. After an order to drain, the job now
    waits for its requeue."""


@dataclass(frozen=True)
class Batch:
    """Report that the global batch, its learning rate or its momentum changed at a step boundary."""

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
    """Report that the blocks that train together changed at a step boundary."""

    kind: ClassVar[str] = "membership"
    generation: int
    """Number that rises with each change, over all terms of the job."""
    blocks: tuple[int, ...]
    """Tasks of the blocks in rank order; the first is the leader."""
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
    """Seconds from the end of the last step before the change to the end of the first step after it, minus a usual
    step's time."""
    bytes: int = 0
    """Bytes of state that were sent to new blocks."""
    transfer_s: float = 0.0
    """Part of `pause_s` in which the state was sent."""
    ready_s: float = 0.0
    """Seconds from the order until the last of the new blocks was ready to join, while training continued; 0 without
    new blocks."""
    order: int | None = None
    """Number of the order that requested the change; None if the job changed by itself, for example after a loss."""
    why: str = ""
    """Cause of the change: `order`, `lost`, `leaving` (a block reached its time limit, or its owner cancelled it) or
    `first`."""


@dataclass(frozen=True)
class Note:
    """Message for people during training."""

    kind: ClassVar[str] = "note"
    note: str
    step: int


@dataclass(frozen=True)
class Bye:
    """Last report of a run; a run that is killed sends none."""

    kind: ClassVar[str] = "bye"
    reason: str
    """Reason of the end: finished, drained, signal (also a time limit), error, stopped or moved. Stopped: by the owner,
    or by the script itself. Moved: the leader left, and training continues in the next term."""
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

    Fields that are None are left out, and so are numbers for which readers would reject the whole line, such as an
    infinite loss.
    """
    given = {name: value for name, value in vars(report).items() if value is not None}
    body = {name: value for name, value in given.items() if not isinstance(value, float) or abs(value) <= MAX_INT}
    line = {"n": number, "t": round(time, 3), "kind": report.kind, **body}
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_report(line: bytes) -> tuple[int, float, Report]:
    """Return number, time and report of a line in a report file. Raises `ProtocolError`; readers skip such a line."""
    data = _object(line)
    number = value_of("n", int, data.get("n"))
    time = value_of("t", float, data.get("t"))
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in REPORTS:
        raise ProtocolError(f"kind: {kind!r:.40} is none of {', '.join(REPORTS)}")
    return number, time, _build(REPORTS[kind], data)  # type: ignore[type-var]


def encode(value: Spec | Order | Fusion) -> bytes:
    """Return the content of `spec.json`, `orders.json` or `fusion.json`."""
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
