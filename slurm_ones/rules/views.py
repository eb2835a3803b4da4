"""Input and answer of a policy: plain data about one partition and its elastic jobs, and the schedule cut to the
caps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ones_db import JobHistory
from ones_db.reasons import SITE_LIMITS, Reason, alone, reason
from ones_wrapper.protocol import Spec
from ones_wrapper.protocol.growth import SILENT
from slurm_ones.jobs.elastic import Elastic
from slurm_ones.learn.histories import own_noise
from slurm_ones.learn.learner import JobModel, Learner
from slurm_ones.policy.contract import Borrows, ClusterView, JobView, Limits, NodeView, Policy, Reserved, Schedule
from slurm_ones.policy.ledger import Ledger
from slurm_ones.policy.shapes import least_and_most, shape_of, strategy_counts, takes, valid_counts
from slurm_ones.rules.blocks import hot
from slurm_ones.rules.caps import Cap, CapUse, capped, entitled, narrowed, sizes_of
from slurm_ones.rules.cost import cost_caps, with_costs
from slurm_ones.rules.gate import GivenBack, JobRules, PartitionRules, Round
from slurm_ones.rules.job_rules import (
    ANY_BATCH,
    loss_s,
    near_end,
    parts,
    requeue_near_end_s,
    size_rules,
    switch_near_end_s,
)
from slurm_ones.slurm.model import Partition
from slurm_ones.text import counts

SAME_S = 1.0
"""Largest difference, in seconds, between two deadlines that count as the same."""


def decide_within(
    policy: Policy,
    cluster: ClusterView,
    jobs: Sequence[JobView],
    caps: Sequence[Cap],
    sizes: Mapping[int, int],
    now: float,
    rng: np.random.Generator,
) -> Schedule:
    """Return the policy's schedule cut to the caps, without side effects. `sizes` maps job ids to the GPUs that owners
    set by hand (`size=`). `Schedule.refused` names the jobs that got less because of a limit."""
    within = narrowed(jobs, caps)
    views = with_sizes(cluster, within, sizes, caps)
    schedule = capped(cluster, views, policy.decide(cluster, views, now, rng), caps)
    schedule = _explained(schedule, jobs, within, caps)
    if len(jobs) == 1:
        schedule = replace(schedule, reasons={job_id: alone(why) for job_id, why in schedule.reasons.items()})
    schedule = with_costs(schedule, jobs, caps)
    limited = {job.job_id: job.fixed for job in jobs if job.fixed and job.fixed.code in SITE_LIMITS}
    return replace(schedule, refused={**schedule.refused, **limited}) if limited else schedule


def _explained(schedule: Schedule, jobs: Sequence[JobView], within: Sequence[JobView], caps: Sequence[Cap]) -> Schedule:
    """Return the schedule with the cap as the reason of each job at the largest size that its caps allow."""
    use = CapUse(caps, {job.job_id: job.shape.gpus for job in jobs if job.shape is not None})
    found = {}
    for job, narrow in zip(jobs, within, strict=True):
        got = schedule.allocations.get(job.job_id)
        if narrow is job or got is None or job.fixed or job.job_id in schedule.refused:
            continue
        more = next((gpus for gpus in job.limits.gpus if gpus > max(narrow.limits.gpus)), 0)
        cap = use.hindering(job.job_id, more, entitled(job)) if got.shape.gpus == max(narrow.limits.gpus) else None
        if cap is not None:
            found[job.job_id] = cap.reason
    refused, reasons = {**schedule.refused, **found}, {**schedule.reasons, **found}
    return replace(schedule, refused=refused, reasons=reasons) if found else schedule


def cluster_view(round_: Round, rules: PartitionRules) -> ClusterView:
    """Return the partition's nodes, with the GPUs that its elastic jobs hold or may take.

    GPUs that open resizes are about to take are excluded. So are free GPUs on nodes that are drained or down, or on
    which pending jobs wait for room.
    """
    snapshot, elastic = round_.seen.snapshot, round_.seen.elastic
    part = snapshot.partitions.get(rules.name)
    if part is None:
        return ClusterView(())
    full, whole = round_.full_node(rules.name)
    held: Counter[str] = Counter()
    for job_id, one in elastic.items():
        if one.weighed:
            back = round_.growth.back.get(job_id)
            held.update(one.holdings if back is None else back.nodes)
    known, kinds = snapshot.nodes, rules.kinds.of
    nodes = tuple(
        NodeView(
            name,
            (0 if name in rules.contested else rules.free[name]) + held[name],
            kind=kinds.get(name, ""),
            leaf=known[name].leaf if name in known else "",
        )
        for name in part.node_names
        if name in rules.free and (not kinds or name in kinds)
    )
    each: dict[str, int] = {}
    for name, kind in kinds.items():
        each[kind] = max(each.get(kind, 0), known[name].gpus)
    return ClusterView(
        nodes, whole, full, gpus_of_kind=each, taper=round_.settings.taper, reserved=_reserved(round_, part, full)
    )


def bounds_of(
    round_: Round, rules: PartitionRules, cluster: ClusterView, views: Sequence[JobView]
) -> tuple[tuple[Cap, ...], dict[int, int]]:
    """Return the bounds on a decision in this partition: caps, and by job id the GPUs that owners set by hand."""
    caps = cost_caps(cluster, views, rules.jobs, round_.settings, round_.quotas.usage_factors)
    return (*rules.caps, *caps), {id_: job.asked for id_, job in rules.jobs.items() if job.asked is not None}


def job_models(round_: Round, learner: Learner) -> dict[int, JobModel]:
    """Return the models of each elastic job, for the kinds of GPU that it accepts, by job id."""
    known: dict[int, JobModel] = {}
    histories = round_.histories
    for partition in round_.partitions:
        kinds = round_.kinds(partition)
        here = {id_: one for id_, one in round_.seen.elastic.items() if one.partition == partition and one.weighed}
        mine = dict(sorted(here.items()))
        learner.look([histories[job_id] for job_id in mine if job_id in histories])
        for job_id, one in mine.items():
            accepted = kinds.accepted(one)
            known[job_id] = learner.about(histories.get(job_id), round_.now, blocks=one.job.by_blocks, kinds=accepted)
    return known


def job_views(
    round_: Round, rules: PartitionRules, cluster: ClusterView, models: Mapping[int, JobModel]
) -> list[JobView]:
    """Return the partition's elastic jobs as the policy gets them. `models` are their models by job id."""
    room = sorted(rules.free.values(), reverse=True)
    views = []
    for job_id, job in rules.jobs.items():
        if not job.elastic.weighed:
            continue
        known = models[job_id]
        limits = limits_of(job.elastic, cluster, known.spec, job.history)
        fixed = job.fixed
        if not fixed and limits.rules and not limits.gpus:
            fixed = reason("strategy_nowhere", strategy=limits.strategy, counts=counts(limits.rules))
        view = _view(job.elastic, limits, job.history, known, fixed, round_.now, rules.kinds.held(job.elastic))
        if job.given_back is not None:
            views.append(_dated(_smaller_for_others(view, job.given_back), job, round_))
            continue
        if hot(job.elastic):
            joins = rules.split_nodes and not rules.whole_nodes and bool(job.spare) and not limits.rules
            view = replace(
                view, smaller=_smaller(job, limits), joins=joins, borrows=_borrows(job, known, rules, round_)
            )
            view = view if job.asked is not None else _changeable(view, sum(rules.free.values()))
            if not rules.whole_nodes:
                view = replace(view, nodes_at=_nodes_at(view, room, rules.node_gpus))
        elif job.elastic.job.by_blocks and job.asked is None:
            view = replace(view, limits=_no_more(view.limits, view.requested))
        views.append(_dated(view, job, round_))
    changed = [v for v in views if v.fixed is None and rules.jobs[v.job_id].asked is None]
    ends = near_end([(view, _near_end_s(rules.jobs[view.job_id], view, round_)) for view in changed])
    ending = {view.job_id: end for view, end in zip(changed, ends, strict=True) if end is not None}
    return [replace(view, fixed=ending[view.job_id]) if view.job_id in ending else view for view in views]


def _borrows(job: JobRules, known: JobModel, rules: PartitionRules, round_: Round) -> Borrows | None:
    """Return the base GPUs of a job that grows by guests, the GPUs of a guest, and the expected loss by preemptions.
    Return None for any other job."""
    sizes = rules.guest_sizes(job)
    if sizes is None:
        return None
    base = sum(block.shape.gpus for block in job.blocks if block.task not in sizes.running)
    queue = round_.settings.guests[rules.name]
    partition = round_.seen.snapshot.partitions.get(queue.partition)
    grace_s = max(queue.grace_s, partition.grace_s if partition is not None else 0.0)
    rate = round_.lives.rate(rules.name, round_.now)
    return Borrows(max(sizes.asked, base), sizes.each, rate, loss_s(known, grace_s))


def _no_more(limits: Limits, gpus: int) -> Limits:
    """Return the limits with only the sizes up to `gpus`, the request of a waiting job of blocks. If all sizes are
    larger, keep the smallest."""
    most = max(gpus, min(limits.gpus, default=0))
    return replace(limits, gpus=tuple(n for n in limits.gpus if n <= most))


def _smaller_for_others(view: JobView, back: GivenBack) -> JobView:
    """Return the view of a job that gives GPUs back, at its new size, with the nearest batch allowed there."""
    least, most = least_and_most(view.limits, back.shape.gpus)
    quantum = 1 if view.limits.batch_fixed else math.lcm(view.limits.quantum, view.limits.at(back.shape.gpus).quantum)
    batch = max(least, min(view.batch, most) // quantum * quantum)
    return replace(view, shape=back.shape, nodes=back.nodes, batch=batch, fixed=back.reason)


def _dated(view: JobView, job: JobRules, round_: Round) -> JobView:
    """Return the view with the owner's deadline, and the companion's answer to it: promised, refused or none yet."""
    optin = job.elastic.optin
    if optin is None or optin.deadline is None:
        return view
    deadline = optin.deadline.after(view.submitted)
    said = round_.promises.get(view.job_id)
    known = said is not None and abs(said.deadline - deadline) < SAME_S
    return replace(view, deadline=deadline, promised=said.given if said is not None and known else None)


def _reserved(round_: Round, part: Partition, full: int) -> tuple[Reserved, ...]:
    """Return the coming reservations of nodes of this partition: begin, end and GPUs."""
    nodes = round_.seen.snapshot.nodes
    return tuple(
        Reserved(one.start_time, one.end_time or math.inf, gpus)
        for one in round_.seen.snapshot.reservations
        if one.start_time > round_.now
        and (gpus := sum(nodes[n].gpus or full for n in one.node_names if n in nodes and n in part.node_names))
    )


def _changeable(view: JobView, free: int) -> JobView:
    """Return the view without smaller sizes that the job can reach now neither by a subset of its blocks nor by new
    ones."""
    now, smaller = sum(view.nodes.values()), view.smaller or {}
    gpus = tuple(n for n in view.limits.gpus if n >= now or n in smaller or n <= free)
    return replace(view, limits=replace(view.limits, gpus=gpus))


def _nodes_at(view: JobView, room: Sequence[int], full: int) -> dict[int, int]:
    """Return the number of nodes on which a job of blocks would run, at each of its sizes. `room` is the free GPUs of
    each node, descending.

    At a smaller size these are the nodes of the blocks that stay. At a larger size new blocks replace all old ones, if
    the fewest nodes possible are free; otherwise new blocks join on further nodes.
    """
    now, smaller = sum(view.nodes.values()), view.smaller or {}
    found = {now: len(view.nodes)} if now else {}
    for gpus in view.limits.gpus:
        whole, rest = divmod(gpus, full)
        fewest = whole + (rest > 0)
        # `room` is descending: full nodes first, then a node with room for the rest.
        fits = len(room) >= fewest and all(gpus == full for gpus in room[:whole]) and (not rest or room[whole] >= rest)
        if gpus in smaller:
            found[gpus] = len(smaller[gpus])
        elif gpus > now:
            joined = len(view.nodes) - (-(gpus - now) // full)
            found[gpus] = fewest if fits else max(joined, fewest)
    return found


def _smaller(job: JobRules, limits: Limits) -> dict[int, dict[str, int]]:
    """Return the GPUs that the job keeps on each node, for each size that it can reach by blocks that leave."""
    found: dict[int, dict[str, int]] = {}
    for gpus, staying in job.staying.items():
        left = [block for block in job.blocks if block.task in staying]
        if not 0 < len(left) < len(job.blocks) or parts(limits.at(gpus), [block.shape for block in left]):
            continue
        kept: Counter[str] = Counter()
        for block in left:
            kept.update(dict.fromkeys(block.nodes, block.shape.gpus_per_node))
        found[gpus] = dict(kept)
    return found


def _near_end_s(job: JobRules, view: JobView, round_: Round) -> float:
    limits = round_.settings.limits
    if hot(job.elastic):
        return switch_near_end_s(view, round_.settings.resize, limits)
    return requeue_near_end_s(job.history, limits)


def limits_of(elastic: Elastic, cluster: ClusterView, spec: Spec | None, history: JobHistory | None = None) -> Limits:
    """Return the job's limits: sizes and batches that its owner allows, and at which its script and strategy can train.
    If the learning rate follows the batch by a rule (`Spec.rule`), the batch does not grow before the job has measured
    its gradient noise scale."""
    batch = history.batch if history is not None else None
    low, high = elastic.gpu_range
    rules = size_rules(spec, cluster.gpus_per_node)
    if not rules:
        gpus = tuple(n for n in valid_counts(cluster, low, high) if elastic.allows(n))
        # An odd size that the owner asks for, or at which the job runs, is valid.
        size = (elastic.optin.size if elastic.optin is not None else None) or 0
        asked = {size} if elastic.allows(size) and shape_of(cluster, size) else set()
        gpus = tuple(sorted({*gpus, *asked, elastic.shape.gpus} - {0}))
    base = spec.base_batch if spec is not None else 1
    if spec is not None and spec.limits is not None and spec.limits.batch_fixed:
        least = most = batch or base
    elif elastic.optin is not None and elastic.optin.batch is not None:
        least, most = elastic.optin.batch
        if spec is not None and least < most:
            most = max(least, min(most, spec.max_batch))
            if spec.rule not in ("", SILENT) and (history is None or own_noise(history) is None):
                most = max(least, min(most, max(base, batch or 0)))
    else:
        least = most = base
    name = spec.limits.strategy if spec is not None and spec.limits is not None else ""
    each = spec.max_local_batch * spec.max_passes if spec is not None else ANY_BATCH
    quantum = max(1, min(spec.multiple_of, ANY_BATCH)) if spec is not None else 1
    limits = Limits((), least, most, max(1, min(each, ANY_BATCH)), quantum, rules, name)
    if rules:
        gpus = tuple(n for n in strategy_counts(cluster, rules, low, high) if takes(limits, n) and elastic.allows(n))
    return replace(limits, gpus=gpus)


def _view(
    elastic: Elastic,
    limits: Limits,
    history: JobHistory | None,
    known: JobModel,
    fixed: Reason | None,
    now: float,
    held: str,
) -> JobView:
    """Return the job as the policy gets it. `held` is the kind of the GPUs that it holds."""
    job, spec = elastic.job, known.spec
    base = spec.base_batch if spec is not None else limits.min_batch
    return JobView(
        job_id=job.job_id,
        submitted=history.job.submit_time if history is not None else job.submit_time,
        requested=history.job.requested_shape.gpus if history is not None else elastic.shape.gpus,
        requested_batch=(history.first_batch if history is not None else None) or base,
        shape=elastic.shape if job.running else None,
        nodes=elastic.holdings,
        batch=(history.batch if history is not None else None) or base,
        base_batch=base,
        limits=limits,
        model=known.on.get(held, known.throughput),
        efficiency=known.efficiency,
        progress=known.progress,
        samples=known.samples,
        # If the length of an epoch is unknown, the samples seen so far are used.
        dataset=known.dataset or (int(history.samples) if history is not None else 0),
        epochs=len(history.epochs) if history is not None else 0,
        epochs_since_change=history.epochs_since_change if history is not None else 0,
        running_s=history.running_s(now) if history is not None else 0.0,
        resizes=history.resizes if history is not None else 0,
        resize_s=known.resize_s,
        shrink_s=known.shrink_s,
        prepare_s=known.prepare_s,
        losses=known.losses,
        fixed=fixed,
        on=known.on,
    )


def with_sizes(
    cluster: ClusterView, jobs: Sequence[JobView], sizes: Mapping[int, int], caps: Sequence[Cap]
) -> Sequence[JobView]:
    """Return the jobs as the policy gets them, with the GPUs that owners set by hand (`size=8` in a comment). `sizes`
    maps job ids to these numbers.

    The policy does not decide about such a job. It gets its size as soon as enough GPUs are free, within the site's
    limits and on one kind of GPU, and keeps it. A running job is shown as fixed, at its new size if that is free now. A
    waiting job may start only at this size. Jobs that were submitted earlier are served first.
    """
    found = {job.job_id: job for job in jobs}
    use = CapUse(caps, {job.job_id: job.shape.gpus for job in jobs if job.shape is not None})
    asking = sorted((found[id_] for id_ in sizes.keys() & found.keys()), key=lambda job: (job.submitted, job.job_id))
    for job in asking:
        found[job.job_id] = view = _with_size(cluster, job, sizes[job.job_id], found, use)
        use.count(job.job_id, view.shape.gpus if view.shape is not None else 0)
    return [found[job.job_id] for job in jobs]


def _with_size(cluster: ClusterView, job: JobView, gpus: int, jobs: Mapping[int, JobView], use: CapUse) -> JobView:
    if job.fixed:
        return job
    for kind in cluster.kinds_held(job) or [kind for kind in cluster.kinds if job.accepts(kind)]:
        part = cluster.of_kind(kind)
        shape, sizes = shape_of(part, gpus), sizes_of(cluster, job, kind)
        if shape is not None and gpus in sizes:
            break
    else:
        return replace(job, fixed=_not_possible(job, gpus))
    if job.shape is None:
        return replace(job, limits=replace(job.limits, gpus=(gpus,)))
    if job.shape.gpus == gpus:
        return replace(job, fixed=reason("size_kept", gpus=gpus))
    if (cap := use.hindering(job.job_id, gpus, entitled(job))) is not None:
        return replace(job, fixed=cap.reason)
    others = [other for other in jobs.values() if other.job_id != job.job_id]
    room = Ledger.of_cluster(part, others).nodes_for(shape) or ()
    nodes = (job.smaller or {}).get(gpus) or dict.fromkeys(room, shape.gpus_per_node)
    if not nodes:
        return replace(job, fixed=reason("size_waits", gpus=gpus))
    least, most = least_and_most(job.limits, gpus)
    quantum = 1 if job.limits.batch_fixed else math.lcm(job.limits.quantum, job.limits.at(gpus).quantum)
    stays = least <= job.batch <= most and job.batch % quantum == 0
    batch = job.batch if stays else sizes[gpus]
    return replace(job, shape=shape, nodes=nodes, batch=batch, fixed=reason("size_asked", gpus=gpus))


def _not_possible(job: JobView, gpus: int) -> Reason:
    limits = job.limits
    if limits.rules and not limits.at(gpus).most:
        return reason("strategy_size", strategy=limits.strategy, counts=counts(limits.rules), gpus=gpus)
    return reason("size_not_possible", gpus=gpus, counts=", ".join(map(str, limits.gpus)) or "none")
