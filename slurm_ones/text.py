"""Safe display of users' text (no terminal escapes, no markup, bounded length), and formatting of numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.markup import escape

from ones_db import BlockRecord, JobSummary, MembershipRecord, PromiseRecord, ResizeRecord, RunRecord
from ones_db.reasons import Reason, reason
from ones_db.shape import PARKED, Shape
from ones_wrapper.protocol.limits import StrategyLimits


def plain(text: str, width: int = 200) -> str:
    """Return the text with unprintable characters replaced, cut to `width` characters."""
    if len(text) <= width and text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else "?" for c in text[: width + 1])
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def safe(text: str, width: int = 200) -> str:
    """Return the text made plain (see `plain`), with rich's markup escaped."""
    shown = escape(plain(text, width))
    # Otherwise the last backslash would escape the markup that follows.
    return shown + "\\" * ((len(shown) - len(shown.rstrip("\\"))) % 2)


def resized(
    old: Shape,
    new: Shape,
    old_batch: int | None = None,
    new_batch: int | None = None,
    old_kind: str = "",
    new_kind: str = "",
) -> str:
    """Describe a resize by its shapes, such as `1x2 → 2x4` or `1x2 → 2x4, batch 64 → 256`. Other forms:
    `1x1, batch 32 → 128` (same shape), `1x2 → 1x2 a100` (another GPU type), `1x2 → parked` (no GPUs)."""
    if new == PARKED:
        return f"{old} → parked"
    kind = f" {new_kind or 'of any type'}" if old_kind != new_kind else ""
    if new_batch is None or old_batch == new_batch:
        return f"{old} → {new}{kind}"
    batch = f"batch {old_batch or '?'} → {new_batch}"
    return f"{old}, {batch}" if old == new and not kind else f"{old} → {new}{kind}, {batch}"


def changed(resize: ResizeRecord) -> str:
    """Describe a stored resize in the form of `resized`."""
    return resized(
        resize.old_shape, resize.new_shape, resize.old_batch, resize.new_batch, resize.old_kind, resize.new_kind
    )


def seconds(value: float | None) -> str:
    """Format a number of seconds: 0.021 s, 42 s, 3 m 05 s, 2 h 10 m, 3 d 4 h."""
    if value is None:
        return "–"
    whole = round(value)
    if whole < 60:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def hours(value: float) -> str:
    """Format GPU hours: 12.3, or 0.045."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def clock(at: float | None) -> str:
    """Format a Unix time as local date and time, to the second."""
    return "–" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def minute(at: float) -> str:
    """Format a Unix time as local date and time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def phases(run: RunRecord) -> str:
    """Describe how long each phase of a run's start took: `queue 3.1 s, launch 4.0 s (imports 2.5 s), …`; empty without
    a report."""
    if run.launch_s is None:
        return ""
    imports = f" (imports {seconds(run.import_s)})" if run.import_s else ""
    found = [f"queue {seconds(run.queue_s)}"] if run.queue_s else []
    found += [f"launch {seconds(run.launch_s)}{imports}", f"process group {seconds(run.group_s)}"]
    found += [f"load {seconds(run.load_s)}"] if run.checkpoint else []
    found += [f"first step {seconds(run.first_step_s)}"] if run.first_step_s is not None else []
    return ", ".join(found)


def starts(resizes: Sequence[ResizeRecord], runs: Mapping[tuple[int, int], RunRecord]) -> dict[int, str]:
    """Describe the phases of the start after each resize by requeue, by resize id. The keys of `runs` are (job id,
    restart count).

    Of several resizes begun during one run, only the last is described, since all earlier ones were rolled back.
    """
    requeued = [resize for resize in resizes if resize.restart >= 0 and resize.mechanism == "requeue"]
    led = {(resize.job_id, resize.restart): resize.id for resize in requeued}
    found = {id_: runs.get((job_id, restart + 1)) for (job_id, restart), id_ in led.items()}
    return {id_: text for id_, run in found.items() if run is not None and (text := phases(run))}


def shape(job: JobSummary) -> str | None:
    """Return the shape of the running job; None if the job waits or has ended."""
    return str(job.shape) if job.running and job.shape else None


def progress(job: JobSummary) -> str:
    """Describe the progress of training: `3.4/10` is 3 full epochs and 0.4 of the fourth, of 10 declared."""
    if job.epoch is None or job.batch == 0:  # the batch is 0 if the script reports no samples
        return "–"
    part = f".{10 * job.cursor // job.dataset}" if job.cursor and job.dataset and job.cursor < job.dataset else ""
    within = job.epochs and job.epoch + bool(part) <= job.epochs  # not beyond what it declared
    return f"{job.epoch}{part}/{job.epochs}" if within else f"{job.epoch}{part}"


def throughput(job: JobSummary) -> str:
    """Format the throughput: `184.8`; `measuring` if a running job has reported none at its size yet; empty if the job
    waits."""
    if job.samples_per_s is None:
        return "measuring" if job.running and job.batch else ""
    return f"{job.samples_per_s:.1f}" if job.running or job.end_time is not None else ""


def left_s(job: JobSummary) -> float | None:
    """Return the remaining seconds of a running job, from its present throughput and declared epochs; None if
    unknown."""
    if not (job.running and job.samples_per_s and job.epochs and job.dataset) or job.epoch is None:
        return None
    left = (job.epochs - job.epoch) * job.dataset - (job.cursor or 0)
    return left / job.samples_per_s if left >= 0 else None


def per_gpu(job: JobSummary) -> str:
    """Describe the samples per GPU and step: `64`, or `2 × 32` for two forward passes of 32."""
    if job.local_batch is None or job.passes is None:
        return "–"
    return f"{job.passes} × {job.local_batch}" if job.passes > 1 else str(job.local_batch)


def troubles(job: JobSummary) -> list[str]:
    """Describe the problems in a job's training for its owner, a sentence each."""
    found = []
    if job.nonfinite:
        steps = f"{job.nonfinite} step{'s' * (job.nonfinite != 1)}"
        found.append(
            f"the loss was not a finite number (NaN or infinite) in {steps}, last near step {job.nonfinite_step}; "
            "what it has learned since may be worth nothing: look at its learning rate and data"
        )
    if job.attempts:
        times = "once" if job.attempts == 1 else f"{job.attempts} times"
        found.append(f"its ranks were started again {times} within a run, after one died or hung")
    return found


MOST_NAMED = 12
"""Longest list of sizes that a sentence has in full."""


class WithGpus(Protocol):
    """Object with a number of GPUs, such as a strategy's limits at one size."""

    @property
    def gpus(self) -> int: ...


def counts(rows: Sequence[WithGpus]) -> str:
    """List the numbers of GPUs that a strategy can use: `1, 2, 4 or 8`. A long list is cut to its ends."""
    found = [row.gpus for row in rows]
    if len(found) > MOST_NAMED:
        return f"{', '.join(map(str, found[: MOST_NAMED - 1]))} … {found[-1]}"
    *others, last = map(str, found)
    return f"{', '.join(others)} or {last}" if others else last


def described(limits: StrategyLimits) -> tuple[Reason, ...]:
    """Describe the limits that a strategy sets for its job, for the job's owner, a sentence each."""
    name, said = limits.strategy, []
    if limits.sizes:
        said.append(reason("strategy_sizes", strategy=name, counts=counts(limits.sizes)))
    if limits.batch_fixed:
        said.append(reason("strategy_batch_fixed", strategy=name))
    if limits.min_steps:
        said.append(reason("strategy_every", strategy=name, steps=limits.min_steps))
    if limits.carries or limits.resets:
        kept, lost = ", ".join(limits.carries) or "nothing more", ", ".join(limits.resets) or "nothing"
        said.append(reason("strategy_carries", strategy=name, carries=kept, resets=lost))
    if not limits.exact:
        said.append(reason("strategy_inexact", strategy=name))
    return tuple(said)


_CHANGES = {"lost": "blocks were lost", "leaving": "a block had to leave", "order": "by order"}


def trains_on(members: Sequence[MembershipRecord], blocks: Sequence[BlockRecord]) -> str:
    """Describe a job's blocks: `trains on blocks 0,3: 1x2 + 2x4; last change 0.21 s, grew from 2 to 10 GPUs`. `members`
    are the memberships that the job reported, newest first."""
    if not members:
        return "no block of it has reported that it trains"
    shapes = {(block.task, block.restart): str(block.shape) for block in blocks}
    now = members[0].report
    named = zip(now.blocks, now.restarts, strict=False)
    which = f"block{'s' * (len(now.blocks) != 1)} {','.join(map(str, now.blocks))}"
    sizes = " + ".join(shapes.get(block, "?") for block in named)
    return f"trains on {which}: {sizes}" + (f"; last change {change(*members[:2])}" if len(members) > 1 else "")


def change(new: MembershipRecord, old: MembershipRecord) -> str:
    """Describe a change of membership by the pause of training and the numbers of GPUs:
    `0.21 s, grew from 2 to 10 GPUs`."""
    before, after = old.report.world, new.report.world
    size = f"kept {after} GPU{'s' * (after != 1)}"
    if before != after:
        size = f"{'grew' if after > before else 'shrank'} from {before} to {after} GPU{'s' * (after != 1)}"
    why = _CHANGES.get(new.report.why, "")
    return f"{seconds(new.report.pause_s)}, {size}" + (f" ({why})" if why and new.report.why != "order" else "")


def planned(resize: ResizeRecord) -> str:
    """Describe the blocks that a resize adds and drops: `adds 3 (2x4), drops 0`; empty for a requeue."""
    if resize.mechanism != "blocks":
        return ""
    added = ", ".join(f"{task} ({shape})" for task, shape in resize.added)
    dropped = ", ".join(map(str, resize.dropped))
    return ", ".join(part for part in (f"adds {added}" if added else "", f"drops {dropped}" if dropped else "") if part)


def ran(block: BlockRecord) -> str:
    """Describe one start of a block: `block 3: 2x4 on n2,n3, RUNNING`."""
    again = f" (start {block.restart + 1})" if block.restart else ""
    nodes = ",".join(block.node_list)
    return f"block {block.task}{again}: {block.shape} on {nodes or 'nodes unknown'}, {block.state}"


def deadline(said: PromiseRecord) -> str:
    """Describe a job's deadline and the answer to it: `deadline 2026-12-01 18:00:00: promised (2026-12-01 09:00:00):
    …`."""
    word = "promised" if said.given else "not promised"
    return f"deadline {clock(said.deadline)}: {word} ({clock(said.time)}): {said.reason}"


def open_deadline(at: float) -> str:
    """Describe a deadline to which no policy has given an answer yet."""
    return f"deadline {clock(at)}: nothing is promised yet; its speed has to be known first, and by a policy that can"
