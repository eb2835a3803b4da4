"""What people read of a job of blocks: which of them train together, how that came, and where each of them ran."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ones_db import BlockRecord, MembershipRecord, PromiseRecord, ResizeRecord

_WHY = {"lost": "blocks were lost", "leaving": "a block had to leave", "order": "by order"}


def trains_on(members: Sequence[MembershipRecord], blocks: Sequence[BlockRecord]) -> str:
    """`trains on blocks 0,3: 1x2 + 2x4; last change 0.21 s, grew from 2 to 10 GPUs`; `members` are newest first."""
    if not members:
        return "no block of it has reported that it trains"
    shapes = {(block.task, block.restart): str(block.shape) for block in blocks}
    now = members[0].report
    named = zip(now.blocks, now.restarts, strict=False)
    which = f"block{'s' * (len(now.blocks) != 1)} {','.join(map(str, now.blocks))}"
    sizes = " + ".join(shapes.get(block, "?") for block in named)
    return f"trains on {which}: {sizes}" + (f"; last change {change(*members[:2])}" if len(members) > 1 else "")


def change(new: MembershipRecord, old: MembershipRecord) -> str:
    """`0.21 s, grew from 2 to 10 GPUs`: how long nobody trained, and what it brought."""
    before, after = old.report.world, new.report.world
    size = f"kept {after} GPU{'s' * (after != 1)}"
    if before != after:
        size = f"{'grew' if after > before else 'shrank'} from {before} to {after} GPU{'s' * (after != 1)}"
    why = _WHY.get(new.report.why, "")
    return f"{pause(new.report.pause_s)}, {size}" + (f" ({why})" if why and new.report.why != "order" else "")


def pause(value: float) -> str:
    """A length of time that may be far below a second."""
    return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"


def planned(resize: ResizeRecord) -> str:
    """Which blocks a resize adds and drops: `adds 3 (2x4), drops 0`; empty for one by requeue."""
    if resize.mechanism != "blocks":
        return ""
    added = ", ".join(f"{task} ({shape})" for task, shape in resize.added)
    dropped = ", ".join(map(str, resize.dropped))
    return ", ".join(part for part in (f"adds {added}" if added else "", f"drops {dropped}" if dropped else "") if part)


def ran(block: BlockRecord) -> str:
    """`block 3: 2x4 on n2,n3, RUNNING`."""
    again = f" (start {block.restart + 1})" if block.restart else ""
    nodes = ",".join(block.node_list)
    return f"block {block.task}{again}: {block.shape} on {nodes or 'nodes unknown'}, {block.state}"


def deadline(said: PromiseRecord) -> str:
    """Its deadline, and whether it is promised: `deadline 2026-12-01 18:00: promised on …, since …`."""
    word = "promised" if said.given else "not promised"
    return f"deadline {_moment(said.deadline)}: {word} ({_moment(said.time)}): {said.reason}"


def open_deadline(at: float) -> str:
    """A deadline of which nothing was said."""
    return f"deadline {_moment(at)}: nothing is promised yet; its speed has to be known first, and by a policy that can"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
