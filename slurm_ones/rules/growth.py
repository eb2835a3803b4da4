"""Growth that goes back to pending jobs. Growth is all GPUs of a job beyond those that its user asked for.

A pending job may wait for something that growth holds: GPUs, CPUs, memory, a node, a licence, or the limit of its
account or QOS. Then no job grows in any partition where the pending job could start. Jobs give growth back, the
youngest growth first, until the pending job has room. A job of blocks drops blocks; a plain job goes back to its
requested size by one requeue.

If free resources and all growth together do not suffice for a pending job, no growth is given back for it. Slurm might
start such a job on requested GPUs of a plain job, which are all free during its requeue. So a plain job that could lose
requested GPUs gives nothing back. The next tick decides again.

Guests (blocks in a queue that Slurm preempts, `[guests]`) count as free and may grow, since Slurm preempts them itself.
If a pending job has waited for long, Slurm evidently does not preempt them for it. Then jobs give guests back too, and
do not grow on the pending job's nodes, if that lets it start.

A pending elastic job gets no growth back, since its policy decides about it. The use of an account's or QOS's limit is
not known exactly. So growth under this limit is given back until it covers the pending job's request, or until none is
left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from ones_db import JobHistory
from ones_db.reasons import reason
from ones_db.shape import PARKED, Shape
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.policy.contract import ClusterView, NodeView
from slurm_ones.policy.ledger import Resources
from slurm_ones.policy.shapes import shape_of, takes
from slurm_ones.rules.blocks import RunningBlock, hot, task_of, training
from slurm_ones.rules.gate import LOOK_S, GivenBack, Growth, Round
from slurm_ones.rules.job_rules import parts
from slurm_ones.rules.quotas import amount_of
from slurm_ones.rules.views import limits_of
from slurm_ones.slurm.fields import ANY_OF
from slurm_ones.slurm.model import Node, Quota, SlurmJob

MOST = 50
"""Largest number of pending jobs for which growth is given back in one tick, in Slurm's order."""
_ROOM = re.compile(r"$|None$|Resources|Priority|Reservation$|ReqNodeNotAvail(?!.*maintenance)|Nodes.required")
"""Pattern of Slurm's reasons for a job that waits for resources. Growth may hold these. Other reasons are a hold, a
dependency, a begin time, a user's own limit, missing hardware."""
_LIMIT = re.compile(r"(AssocGrp)|(QOSGrp|Max\w+PerAccount)|(Licenses)")
_SHARED = {1: "account", 2: "qos", 3: "licenses"}
"""Field of a job that names its limit. The key is the number of the group in `_LIMIT` that matches Slurm's reason."""


@dataclass(frozen=True)
class WaitingJob:
    """A pending job and what it needs: room, or a part of a shared limit."""

    job: SlurmJob
    on: Sequence[Mapping[str, Resources]] = ()
    """Nodes on which the job can start, with the resources that it takes on each; one mapping for each of its
    partitions."""
    shared: str = ""
    """Field of the job that names its limit (account, qos or licenses); empty if the job waits for room."""
    unserved: bool = True
    """True if Slurm does not preempt guests for the job: it waits for a limit, or has waited for long."""
    limits: Collection[str] = ()
    """Names of the accounts or QOS whose limit is used up."""
    under: Callable[[SlurmJob], frozenset[str]] = field(default=lambda job: frozenset(), compare=False)
    """Function that returns the names of the accounts or QOS whose limits bind a job."""

    @property
    def what(self) -> str:
        """Resource that the job waits for, in words."""
        if self.shared:
            return "licences" if self.shared == "licenses" else f"the limit of its {self.shared}"
        gpus = self.job.gpus_each
        return f"{Shape(self.job.nodes, gpus)} GPUs" if gpus else "CPUs or memory"

    def shares(self, job: SlurmJob) -> bool:
        """Tell whether growth of `job` may use a part of the limit. Only blocks use a limit on the number of jobs."""
        if "Jobs" in self.job.reason and not job.array_id:
            return False
        if self.shared == "licenses":
            return not (dict(self.job.licenses).keys() - {ANY_OF[0]}).isdisjoint(dict(job.licenses))
        if "PerAccount" in self.job.reason and self.job.account != job.account:
            return False
        return not self.under(job).isdisjoint(self.limits)

    def amount(self, job: SlurmJob, gpus: int) -> Counter[str]:
        """Return how much of the limit `job` uses with this number of GPUs."""
        if self.shared == "licenses":
            return Counter({name: count for name, count in job.licenses if name in dict(self.job.licenses)})
        if "Jobs" in self.job.reason:
            return Counter({f"jobs of {self.shared} {getattr(self.job, self.shared)}": 1})
        by_gpus = self.job.gpus_each > 0
        name = f"{'GPUs' if by_gpus else 'CPUs'} of {self.shared} {getattr(self.job, self.shared)}"
        return Counter({name: gpus if by_gpus else max(job.cpus, 1)})


class Piece(NamedTuple):
    """Growth that can only be given back as a whole: one block, or all growth of a plain job."""

    job_id: int
    part: SlurmJob
    held: Mapping[str, Resources]
    keeps: Shape
    """Shape that a plain job has left after giving the piece back; `PARKED` (no GPUs) for a block."""
    guest: bool = False
    """True for a guest, which Slurm may preempt by itself."""

    @property
    def gpus(self) -> int:
        return sum(one.gpus for one in self.held.values()) - self.keeps.gpus

    def kept(self, wanted: Mapping[str, int]) -> list[str]:
        """Return the nodes that a plain job keeps: those of lowest rank in `wanted`, the pending job's ranking of
        nodes. A node without a rank is kept first."""
        return sorted(self.held, key=lambda name: (wanted.get(name, 0), name))[: self.keeps.nodes]

    def gives(self, wanted: Mapping[str, int]) -> Iterator[tuple[str, Resources]]:
        """Yield each node with the GPUs, CPUs and memory that become free there. `wanted` is as in `kept`."""
        kept = self.kept(wanted)
        for name, held in self.held.items():
            left = self.keeps.gpus_per_node if name in kept else 0
            yield name, Resources(*(have - -(-have * left // max(held.gpus, 1)) for have in held))


class Grown(NamedTuple):
    """A running job with more GPUs than its user asked for."""

    elastic: Elastic
    history: JobHistory
    blocks: tuple[RunningBlock, ...]
    pieces: tuple[Piece, ...]
    """Pieces of its growth, the youngest first."""

    def stay(self, gone: Collection[Piece]) -> list[RunningBlock]:
        """Return the job's blocks that remain if these pieces are given back."""
        tasks = {task_of(piece.part) for piece in gone if piece.part.array_tasks}
        return [block for block in self.blocks if block.task not in tasks]

    def may_keep(self, gone: Collection[Piece], site: ClusterView) -> bool:
        """Tell whether the job could train on if these pieces were given back."""
        if not self.blocks:
            return True
        stay = [block.shape for block in self.stay(gone)]
        limits = limits_of(self.elastic, site, self.history.spec, self.history)
        gpus = sum(shape.gpus for shape in stay)
        if not takes(limits, gpus) or not self.elastic.allows(gpus):
            return False
        return not limits.rules or (gpus in limits.gpus and not parts(limits.at(gpus), stay))


def with_growth(round_: Round) -> Round:
    """Return the round with its `growth`: which jobs give GPUs back, and which must not grow."""
    waiting = _waiting(round_)
    if not waiting and not round_.seen.idle:
        return round_
    returns = _Returns(round_)
    returns.give_idle_back(round_.seen.idle)
    contested: dict[str, int] = {}
    unserved: dict[str, int] = {}
    limited: dict[int, int] = {}
    helped = {one.job.job_id for one in waiting if returns.serve(one)}
    for one in reversed({one.job.job_id: one for one in waiting}.values()):  # of several, the first is named
        sharing = [id_ for id_, other in round_.seen.elastic.items() if one.shares(other.job.home)]
        limited |= dict.fromkeys(sharing, one.job.job_id)
        for nodes in one.on:
            contested |= dict.fromkeys(nodes, one.job.job_id)
            waits_for_guests = one.unserved and one.job.job_id in helped
            unserved |= dict.fromkeys(nodes if waits_for_guests else (), one.job.job_id)
    return replace(round_, growth=Growth(returns.given_back(), contested, unserved, limited))


class _Returns:
    """State of a tick in which pending jobs get growth back in order: free resources, and growth given back so far."""

    def __init__(self, round_: Round) -> None:
        self._coming = _coming(round_)
        """Pieces that become free without a further resize."""
        self._free = _free(round_, self._coming)
        self._limits = Counter(round_.seen.snapshot.licenses)
        """Remaining amount of each limit, as far as it is known."""
        self._site = cache(lambda name: _site(round_, name))
        self._grown = _grown(round_, self._site) if round_.settings.resize.shrink else {}
        pieces = (piece for one in self._grown.values() for piece in one.pieces)
        self._pieces = sorted(pieces, key=lambda piece: (not piece.guest, -piece.part.start_time, -piece.part.job_id))
        """Pieces that have not been given back: guests first, then all other pieces; the youngest first in both."""
        self._gone: dict[int, list[tuple[Piece, list[str]]]] = {}
        """Growth that each job gives back, by job id: pairs of a `Piece` and the nodes that a plain job then keeps."""
        self._first: dict[int, WaitingJob] = {}
        """First pending job for which each job gives growth back, by id of the giving job. No entry for a job that is
        only idle."""
        self._unused = round_.unused
        self._idle = round_.seen.idle
        ended = max((one.last_resize_end or 0.0 for one in round_.histories.values()), default=0.0)
        self._settled = not round_.under_way and round_.now - ended > LOOK_S
        self._taken: list[tuple[str, Resources]] = []
        """Nodes and resources that the pending jobs served so far will take, in order."""
        self._not_served: list[tuple[WaitingJob, int]] = []
        """Pending jobs that cannot start even with all growth, each with the length of `_taken` when it was tried."""

    def give_idle_back(self, idle: Collection[int]) -> None:
        """Give back all growth of idle jobs."""
        for piece in [piece for piece in self._pieces if piece.job_id in idle]:
            self._go(None, piece, {})
            self._coming.append(piece)

    def serve(self, one: WaitingJob) -> bool:
        """Give growth back until the pending job can start. If that is impossible, give nothing back and return
        False."""
        if one.shared:
            return self._serve_limit(one)
        served = any(self._serve_room(one, nodes) for nodes in one.on)
        self._not_served += [] if served else [(one, len(self._taken))]
        return served

    def _serve_limit(self, one: WaitingJob) -> bool:
        wants = one.amount(one.job, one.job.nodes * one.job.gpus_each)
        short, going = wants - self._limits, list[Piece]()
        for piece in (*self._coming, *self._pieces):
            if short and one.shares(piece.part):
                short -= one.amount(piece.part, piece.gpus)
                going.append(piece)
        if short and one.shared == "licenses":
            return False
        for piece in going:
            self._limits += one.amount(piece.part, piece.gpus)
            if piece in self._coming:
                self._coming.remove(piece)
            else:
                self._go(one, piece, {})
        self._limits -= wants
        return True

    def _serve_room(self, one: WaitingJob, nodes: Mapping[str, Resources]) -> bool:
        free = dict(self._free)
        fits = {name for name, need in nodes.items() if free[name].cover(need)}
        named = {*one.job.requested_nodes}
        wanted = {name: 1 + (name in named) for name in nodes if name not in fits}
        going: list[Piece] = []

        def change(piece: Piece, by: Callable[[Resources, Resources], Resources]) -> None:
            for name, given in piece.gives(wanted):
                if name in nodes:
                    free[name] = by(free[name], given)
                    (fits.add if free[name].cover(nodes[name]) else fits.discard)(name)

        def enough() -> bool:
            return len(fits) >= one.job.nodes and named <= fits

        if enough() and one.job.reason == "Resources" and self._settled:
            # Slurm says that the job does not fit, for a reason that is not known here.
            going = [piece for piece in self._pieces if not nodes.keys().isdisjoint(piece.held)][:1]
        for piece in self._pieces:
            if enough():
                break
            if not wanted.keys().isdisjoint(piece.held):
                going.append(piece)
                change(piece, Resources.plus)
        if not enough():
            return False
        for piece in reversed(going.copy()) if wanted else ():  # pieces that are not needed stay, the oldest first
            change(piece, Resources.without)
            if enough():
                going.remove(piece)
            else:
                change(piece, Resources.plus)
        for piece in going:
            self._go(one, piece, wanted)
        for name in sorted(fits, key=lambda name: (name not in named, free[name], name))[: one.job.nodes]:
            self._free[name] = self._free[name].without(nodes[name])
            self._taken.append((name, nodes[name]))
        return True

    def _go(self, one: WaitingJob | None, piece: Piece, wanted: Mapping[str, int]) -> None:
        """Give the piece back for the pending job `one`; if that is None, because the piece's job is idle. A guest that
        Slurm will preempt only counts as free."""
        if one is None or one.unserved or not piece.guest:
            self._gone.setdefault(piece.job_id, []).append((piece, piece.kept(wanted)))
            if one is not None:
                self._first.setdefault(piece.job_id, one)
        self._pieces.remove(piece)
        for name, given in piece.gives(wanted):
            if name in self._free:
                self._free[name] = self._free[name].plus(given)

    def given_back(self) -> dict[int, GivenBack]:
        """Return the new size of each job that gives growth back. If a job cannot train at this size, it gives back
        more."""
        found = {}
        for job_id, grown in self._grown.items():
            gone = [piece for piece, _ in self._gone.get(job_id, ())]
            rest = [piece for piece in grown.pieces if piece not in gone] if gone else []
            site = self._site(grown.elastic.partition) if gone else ClusterView(())
            while rest and not grown.may_keep(gone, site):
                gone.append(rest.pop(0))
            if gone and grown.may_keep(gone, site) and (grown.blocks or not self._loses_base(job_id)):
                found[job_id] = self._given_back(grown, gone)
        return found

    def _loses_base(self, job_id: int) -> bool:
        """Tell whether a pending job of `_not_served` might take GPUs that this plain job's user asked for, during its
        requeue."""
        free = dict(self._free)
        for piece, nodes in self._gone[job_id]:
            for name, given in piece.gives({name: name not in nodes for name in piece.held}):
                if name in free:
                    free[name] = free[name].plus(piece.held[name].without(given))
        for one, before in self._not_served:
            left = dict(free)
            for name, need in self._taken[before:]:
                left[name] = left[name].plus(need)
            for on in one.on:
                fits = {name for name, need in on.items() if left[name].cover(need)}
                if len(fits) >= one.job.nodes and fits.issuperset(one.job.requested_nodes):
                    return True
        return False

    def _given_back(self, grown: Grown, gone: Sequence[Piece]) -> GivenBack:
        job_id, before = grown.elastic.job.job_id, grown.elastic.shape.gpus
        blocks = grown.stay(gone)
        kept = Counter[str]()
        for block in blocks:
            kept.update(dict.fromkeys(block.nodes, block.shape.gpus_per_node))
        for piece, nodes in self._gone[job_id]:
            kept.update(dict.fromkeys(nodes, piece.keeps.gpus_per_node))
        each = {*kept.values()}
        shape = Shape(len(kept), each.pop()) if len(each) == 1 else Shape(1, kept.total())
        if job_id in self._idle:
            why = self._unused(self._idle[job_id], shape.gpus, before)
        else:
            first = self._first[job_id]
            why = reason("growth_returns", before=before, gpus=shape.gpus, job=first.job.job_id, what=first.what)
        return GivenBack(shape, dict(kept), tuple(block.task for block in blocks), why)


# -- who waits --------------------------------------------------------------------------------------------------------


def _waiting(round_: Round) -> list[WaitingJob]:
    """Return the pending jobs that wait for something that growth may hold, in Slurm's order."""
    jobs = [job for job in round_.seen.snapshot.jobs.values() if job.pending and _counts(job, round_)]
    places = cache(lambda want: _places(want, round_))
    found: list[WaitingJob] = []
    for job in sorted(jobs, key=lambda job: (-job.priority, job.job_id)):
        one = _wants(job, round_, places)
        if one is not None:
            tasks = min(len(job.array_tasks) or 1, job.throttle or MOST)
            found += [one] * min(tasks, MOST - len(found))
        if len(found) == MOST:
            break
    return found


def _counts(job: SlurmJob, round_: Round) -> bool:
    if job.held or job.completing or job.eligible_time > round_.seen.snapshot.time:
        return False
    if not (_ROOM.match(job.reason) or _LIMIT.match(job.reason)):
        return False
    elastic = round_.seen.elastic
    one = elastic.get(job.array_id)
    if one is not None and one.job.by_blocks:
        # An array that the companion may not change waits like any other job. Its guests are left out, since they only
        # use what is free.
        return one.refusal is not None and not one.job.is_guest(job)
    one = elastic.get(job.job_id)
    # A job that trains within another waits for that job.
    return one is None or (one.refusal is not None and one.refusal.code != "fused")


def _wants(job: SlurmJob, round_: Round, places: Callable[[_Want], Mapping[str, Resources]]) -> WaitingJob | None:
    """Return the pending job with the resources or the limit that it waits for; None if it could never start."""
    if limit := _LIMIT.match(job.reason):
        shared = _SHARED[limit.lastindex or 0]
        if shared == "licenses":
            return WaitingJob(job, shared=shared)
        under = _under(shared, round_)
        full = {getattr(quota, shared) for quota in round_.quotas.all if _is_full(quota, shared, job)} - {""}
        return WaitingJob(job, shared=shared, limits=under(job) & full or {getattr(job, shared)}, under=under)
    if job.gpus_total and not job.gpus_per_node:
        # For a total GPU count (--gpus) Slurm shows one node, and uses as many as it needs.
        of_node = max((round_.seen.snapshot.gpus_of_node.get(name, 0) for name in job.partitions), default=0)
        job = replace(job, nodes=max(job.nodes, -(-job.gpus_total // max(of_node, 1))))
    found = []
    for part in (round_.seen.snapshot.partitions.get(name) for name in job.partitions):
        too_long = part is not None and 0 < part.max_time_s < job.time_limit_s
        if part is None or not part.up or too_long or 0 < part.max_nodes < job.nodes:
            continue
        whole = job.exclusive or part.whole_nodes or part.name in round_.settings.whole_node_gpus
        each = Resources(job.gpus_each, -(-job.cpus // max(job.nodes, 1)), job.memory_mb)
        kind = job.kind if job.of_one_kind else ""
        nodes = places(_Want(part.name, whole, each, kind, job.reservation))
        if job.excluded_nodes or job.features:
            known = round_.seen.snapshot.nodes
            nodes = {name: need for name, need in nodes.items() if known[name].takes(job)}
        if len(nodes) >= job.nodes > 0 and nodes.keys() >= {*job.requested_nodes}:
            found.append(nodes)
    since = max(job.submit_time, job.eligible_time)
    return WaitingJob(job, found, unserved=round_.now - since > LOOK_S) if found else None


def _under(shared: str, round_: Round) -> Callable[[SlurmJob], frozenset[str]]:
    if shared == "account":
        return lambda job: frozenset({job.account, *round_.quotas.above(job.account)})
    partitions = round_.seen.snapshot.partitions
    return lambda job: frozenset({job.qos, *(partitions[name].qos for name in job.partitions if name in partitions)})


def _is_full(quota: Quota, shared: str, job: SlurmJob) -> bool:
    if quota.user or quota.per_job or quota.most - quota.used >= amount_of(job, quota.resource):
        return False
    return not quota.qos if shared == "account" else quota.account in ("", job.account)


class _Want(NamedTuple):
    """Request of a pending job."""

    partition: str
    whole: bool
    each: Resources
    kind: str
    reservation: str


def _places(want: _Want, round_: Round) -> dict[str, Resources]:
    """Return the nodes on which a job with this request could start if they were empty, each with the resources it
    needs."""
    snapshot, (_, whole, each, kind, reservation) = round_.seen.snapshot, want
    own = reservation.split(",")
    reserved = {name for one in snapshot.reservations if one.name in own for name in one.node_names}
    found = {}
    for name in snapshot.partitions[want.partition].node_names:
        node = snapshot.nodes.get(name)
        if (
            node is None
            or not (name in reserved if reservation else node.usable)
            or (kind and node.kind not in ("", kind))
        ):
            continue
        has = _capacity(node, round_)
        need = Resources(each.gpus, each.cpus if has.cpus else 0, each.memory_mb if has.memory_mb else 0)
        if has.cover(need):
            found[name] = has if whole else need
    return found


# -- who holds what ---------------------------------------------------------------------------------------------------


def _capacity(node: Node, round_: Round) -> Resources:
    given = round_.settings.whole_node_gpus
    gpus = node.gpus or max((given[name] for name in node.partitions if name in given), default=0)
    return Resources(gpus, node.cpus, node.memory_mb)


def _free(round_: Round, coming: Sequence[Piece]) -> dict[str, Resources]:
    """Return the resources of each node that are free, or will be without a further resize."""
    free = {}
    for name, node in round_.seen.snapshot.nodes.items():
        has = _capacity(node, round_)
        used = Resources(
            node.gpus_used if node.gpus else has.gpus * (not node.idle), node.cpus_used, node.memory_used_mb
        )
        free[name] = has.without(used.at_most(has))
    for name, given in (given for piece in coming for given in piece.gives({})):
        if name in free:
            free[name] = free[name].plus(given)
    return free


def _coming(round_: Round) -> list[Piece]:
    """Return the pieces that become free because blocks are ending or resizes are open."""
    found = []
    for job_id, one in round_.seen.elastic.items():
        # A block that takes longer to end may hang.
        ending = [job for job in one.job.blocks if job.completing and round_.now - job.end_time <= LOOK_S]
        move = round_.under_way.get(job_id)
        if move is not None and move.moves is not None:
            ending += [job for job in one.job.running_blocks if task_of(job) in move.moves.dropped]
        elif move is not None and one.job.running and move.target.gpus < one.shape.gpus:
            found.append(_piece(one, one.job.first, move.target))
        found += [_piece(one, job) for job in ending]
    return found


def _piece(one: Elastic, part: SlurmJob, keeps: Shape = PARKED) -> Piece:
    each = Resources(one.shape_of(part).gpus_per_node, part.cpus // max(len(part.node_list), 1), part.memory_mb)
    return Piece(one.job.job_id, part, dict.fromkeys(part.node_list, each), keeps)


def _grown(round_: Round, site: Callable[[str], ClusterView]) -> dict[int, Grown]:
    """Return, by job id, the running jobs with growth that they may give back now."""
    found = {}
    for job_id, one in round_.seen.elastic.items():
        history = round_.histories.get(job_id)
        if history is None or one.optin is None or not one.job.running:
            continue
        if one.shape.gpus > history.job.requested_shape.gpus and round_.against_shrinking(one) is None:
            blocks = training(one, history) if hot(one) else ()
            pieces = _blocks(one, history, blocks) if blocks else _rest(one, history, site(one.partition))
            found[job_id] = Grown(one, history, blocks, pieces)
    return found


def _site(round_: Round, name: str) -> ClusterView:
    partition = round_.seen.snapshot.partitions.get(name)
    if partition is None:
        return ClusterView(())
    full, whole = round_.full_node(name)
    return ClusterView(tuple(NodeView(node, full) for node in partition.node_names), whole, full)


def _blocks(one: Elastic, history: JobHistory, blocks: Sequence[RunningBlock]) -> tuple[Piece, ...]:
    """Return the blocks that are growth, the youngest first: all blocks besides the leader and the oldest ones that
    together have the requested GPUs."""
    before, asked = accumulate((block.shape.gpus for block in blocks), initial=0), history.job.requested_shape.gpus
    growth = [one.job.tasks[block.task] for block, gpus in zip(blocks, before, strict=False) if gpus >= asked]
    return tuple(_piece(one, job)._replace(guest=one.job.is_guest(job)) for job in reversed(growth))


def _rest(one: Elastic, history: JobHistory, site: ClusterView) -> tuple[Piece, ...]:
    """Return all growth of a plain job as one piece; empty if no smaller shape fits on its nodes."""
    limits, asked = limits_of(one, site, history.spec, history), history.job.requested_shape.gpus
    now = one.shape
    sizes = (gpus for gpus in limits.gpus if asked <= gpus < now.gpus and takes(limits, gpus))
    keeps = next((shape for gpus in sizes if (shape := shape_of(site, gpus)) is not None), None)
    if keeps is None or keeps.nodes > len(one.job.node_list) or keeps.gpus_per_node > now.gpus_per_node:
        return ()
    return (_piece(one, one.job.first, keeps),)
