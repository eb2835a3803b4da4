"""What a seed stands for: a small cluster, some jobs, and how often what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from slurm_ones.simulate.slurm.nodes import PartitionSpec, Qos, SlurmConf
from slurm_ones.simulate.spec import PARTITION, ClusterSpec
from slurm_ones.simulate.training.application import Application
from slurm_ones.simulate.training.strategies import StrategySpeed, onebit, ring
from slurm_ones.simulate.workloads.catalogue import KINDS, build
from tests.faults.kinds import (
    AT_STEPS,
    AT_STEPS_OF_BLOCKS,
    BY_OTHERS,
    BY_PREEMPTION,
    IN_REPORTS,
    OF_BLOCKS,
    OF_JOBS,
    ON_HOST,
    TO_BLOCKS,
    FaultKind,
)

GUEST, OTHER, LICENSE = "guest", "other", "matlab"
"""Names of the guests' QOS or partition, of a partition over the nodes of the first, and of what a job may want
besides."""
EXIT = 99
"""A code with which jobs wait again (RequeueExit)."""
SILENCING = frozenset(
    {
        FaultKind.HELD,
        FaultKind.ADMIN_HOLD,
        FaultKind.OPTED_OUT,
        FaultKind.RESIZE_OFF,
        FaultKind.BAD_COMMENT,
        FaultKind.STOP_FILE,
        FaultKind.CANCELLED,
    }
)
"""Words with which people end what the companion does for their jobs."""
INTERVAL_S = 60.0
"""Between two ticks."""
POLICIES = ("ones", "fifo", "srsf", "tiresias", "optimus", "sia", "ees")
"""Those that decide fast on a few jobs."""


SHORT = replace(KINDS["resnet18-cifar10"], epochs=24, max_local_batch=128, base_batch=128)
PAIRS = replace(ring(length=4096, hidden=256, layers=4, degree=2), fixed_bytes=0.0, sample_bytes=0.0, min_steps=20)
PACKED = onebit(parameters=11e6, warm_up=0.5)


@cache
def applications() -> Mapping[str, Application]:
    """What jobs do, of two kinds: some half an hour on one GPU."""
    return {
        "cnn": build(replace(KINDS["resnet18-cifar10"], epochs=96), name="cnn"),
        "nlp": build(KINDS["bert-glue"], name="nlp"),
        # Their strategies use pairs of GPUs of one node alone, and a batch that stays after half of the training.
        "pairs": build(replace(SHORT, by=PAIRS, speed=StrategySpeed(PAIRS, 0.03, 1 / 400)), name="pairs"),
        "packed": build(replace(SHORT, by=PACKED, speed=StrategySpeed(PACKED, 0.03, 1 / 400)), name="packed"),
    }


@dataclass(frozen=True)
class JobPlan:
    """One job as its user submits it."""

    name: str
    time: float
    application: str
    gpus: int
    epochs: float
    opt_in: str
    """elastic, off (`resize=off`), bad (a comment that nobody understands), or rigid: no word of us."""
    flaws: frozenset[FaultKind] = frozenset()
    limit_s: float = 0.0
    begin_s: float = 0.0
    hold: bool = False
    requeue: bool = True
    blocks: bool = False
    """A job of blocks."""


@dataclass(frozen=True)
class FaultPlan:
    seed: int
    spec: ClusterSpec
    jobs: tuple[JobPlan, ...]
    ticks: int
    """Ticks in which faults are injected."""
    policy: str
    settings: Mapping[str, Any]
    rates: Mapping[FaultKind, float]
    """Share of the steps at which each kind is injected, where it can be."""
    interference: float
    """Share of the steps at which somebody else acts at that very moment."""
    events: tuple[tuple[float, FaultKind], ...]
    """Seconds after the start, and what happens then."""
    companions: int = 1
    resize_s: float = 30.0
    others: tuple[FaultKind, ...] = field(default=BY_OTHERS)
    """What those do who interfere."""
    interval_s: float = INTERVAL_S
    """Between two ticks."""
    absent_s: float = 4000.0
    """How long a companion is away that is not started again at once."""
    down_s: tuple[float, float] = (30.0, 900.0)
    """How long a controller is down that is restarted."""
    beside: tuple[PartitionSpec, ...] = ()
    """Other partitions over the same nodes."""
    conf: SlurmConf = field(default_factory=SlurmConf)

    @property
    def with_queue(self) -> bool:
        """Jobs may grow by guests."""
        return "guests" in self.settings

    @classmethod
    def with_guests(cls, seed: int) -> FaultPlan:
        """The plan of a seed with jobs of blocks, most of which grow by guests, other jobs' needs over the same nodes,
        and preemption."""
        plan = cls.with_blocks(seed)
        rng = random.Random(f"guests {seed}")
        grace_s, mode = rng.choice((0.0, 30.0)), rng.choice(("cancel", "cancel", "requeue"))
        kinds = tuple(rng.sample(BY_PREEMPTION, 4))
        kinds_now = tuple(kind for kind in kinds if kind not in (FaultKind.PREEMPTED_ALONE, FaultKind.PREEMPTED_DOWN))
        interval_s, ticks = rng.choice((10.0, 15.0)), rng.randint(60, 100)
        end = ticks * interval_s
        events = [(rng.uniform(0.0, end), rng.choice(kinds)) for _ in range(rng.randint(4, 10))]
        events += [(rng.uniform(0.0, end), FaultKind.OTHER_JOB) for _ in range(rng.randint(6, 16))]
        queue = rng.choice(("qos", "qos", "qos", "qos", "partition", "partition", "partition", ""))
        spec = ClusterSpec(rng.randint(3, 5), 4, cpus_per_gpu=4)
        others = plan.others if rng.random() < 0.3 else tuple(kind for kind in plan.others if kind not in SILENCING)
        other = PartitionSpec(OTHER, spec.names, 4, default=False, cpus_per_node=16)
        lower = replace(other, name=GUEST, tier=0, preempt=mode, grace_s=grace_s)
        guest = Qos(GUEST, 0, mode=mode, grace_s=grace_s)
        # Else most changes are taken back before a guest runs.
        few = rng.sample(sorted(plan.rates, key=lambda kind: kind.value), min(len(plan.rates), 3))
        rates = plan.rates if rng.random() < 0.3 else {kind: min(plan.rates[kind], 0.02) for kind in few}
        conf = SlurmConf(
            qos=(Qos("normal", 10, (GUEST,)), guest) if queue != "partition" else (Qos(),),
            licenses={LICENSE: 2},
            kill_wait_s=5.0,
            youngest_first=rng.random() < 0.5,
            reclaim_licenses=rng.random() < 0.5,
            requeue_exit=rng.choice(("", str(EXIT), "1-255")),
        )
        return replace(
            plan,
            spec=spec,
            policy=rng.choice(("random", "modest", "modest")),
            settings={
                **plan.settings,
                "resize.dwell_s": 0.0,
                "resize.preempted_s": 0.0,
                "resize.max_open": 64,
                **({"guests": {PARTITION: {queue: GUEST}}} if queue else {}),
            },
            jobs=tuple(_of_guests(rng, job) for job in plan.jobs[:4]),
            beside=(other, lower) if queue == "partition" else (other,),
            conf=conf,
            interval_s=interval_s,
            ticks=ticks,
            absent_s=300.0,
            down_s=(10.0, 120.0),
            rates=rates,
            interference=min(plan.interference, 0.03),
            others=(*others, *kinds_now, FaultKind.OTHER_JOB),
            events=tuple(sorted((*(one for one in plan.events if one[1] not in {*plan.others} - {*others}), *events))),
        )

    @classmethod
    def with_blocks(cls, seed: int) -> FaultPlan:
        """The plan of a seed with jobs of blocks among the others, and what can go wrong with those as well."""
        plan = cls.of(seed)
        # Drawn apart: what else the seed stands for stays what it is.
        rng = random.Random(f"blocks {seed}")
        # Most have room beside the jobs, and time: a change needs both before anything can strike it.
        room = rng.random() < 0.8
        spec = replace(plan.spec, nodes=rng.randint(3, 6), gpus_per_node=4) if room else plan.spec
        end = plan.ticks * INTERVAL_S * (rng.choice((1.5, 2.0)) if room else 1.0)
        chosen = [job for job in plan.jobs if job.opt_in in ("elastic", "off") and rng.random() < 0.7]
        jobs = tuple(_of_blocks(rng, job) if job in chosen else job for job in plan.jobs)
        kinds = TO_BLOCKS if rng.random() < 0.3 else tuple(rng.sample(TO_BLOCKS, 3))
        events = [(rng.uniform(0.0, end), rng.choice(kinds)) for _ in range(rng.randint(0, 10))]
        rates = {kind: _rate(rng) for kind in AT_STEPS_OF_BLOCKS if rng.random() < 0.25}
        rates[FaultKind.LOST_IN_SWITCH] = rng.choice((0.0, 0.1, 0.3))
        interval_s = rng.choice((10.0, 15.0, 60.0))
        return replace(
            plan,
            spec=spec,
            policy="modest" if room and plan.policy == "random" else plan.policy,
            jobs=jobs,
            rates={**plan.rates, **rates},
            others=(*plan.others, *kinds),
            events=tuple(sorted((*plan.events, *events))),
            interval_s=interval_s,
            ticks=round(end / interval_s),
        )

    @classmethod
    def with_strategies(cls, seed: int) -> FaultPlan:
        """The plan of a seed in which most elastic jobs have a training strategy."""
        plan = cls.of(seed)
        rng = random.Random(f"strategies {seed}")
        spec = plan.spec if plan.spec.gpus_per_node % 2 == 0 else replace(plan.spec, gpus_per_node=4)
        jobs = tuple(_with_strategy(rng, job, spec) if rng.random() < 0.8 else job for job in plan.jobs)
        return replace(plan, spec=spec, jobs=jobs)

    @classmethod
    def of(cls, seed: int) -> FaultPlan:
        rng = random.Random(seed)
        nodes, gpus = rng.randint(1, 4), rng.choice((1, 2, 4, 4, 4))
        spec = ClusterSpec(max(nodes, 2) if gpus == 1 else nodes, gpus, whole_nodes=rng.random() < 0.15)
        ticks = rng.randint(8, 24)
        wild = rng.random() < 0.15
        rates = {kind: _rate(rng) for kind in AT_STEPS if wild or rng.random() < 0.3}
        others = BY_OTHERS if wild or rng.random() < 0.3 else tuple(rng.sample(BY_OTHERS, 3))
        times = rng.randint(0, 8)
        kinds = [*others, *ON_HOST, FaultKind.CRASH, FaultKind.ABSENCE]
        return cls(
            seed=seed,
            spec=spec,
            jobs=tuple(_job(rng, i, spec, ticks) for i in range(rng.randint(3, 6))),
            ticks=ticks,
            policy=rng.choice(POLICIES) if rng.random() < 0.1 else "random",
            settings=_settings(rng),
            rates=rates,
            interference=rng.choice((0.0, 0.01, 0.03, 0.1)),
            events=tuple(sorted((rng.uniform(0.0, ticks * INTERVAL_S), rng.choice(kinds)) for _ in range(times))),
            companions=2 if rng.random() < 0.15 else 1,
            resize_s=rng.choice((5.0, 30.0, 30.0, 90.0)),
            others=others,
        )


def _rate(rng: random.Random) -> float:
    return rng.choice((0.01, 0.02, 0.03, 0.06))


def _job(rng: random.Random, number: int, spec: ClusterSpec, ticks: int) -> JobPlan:
    opt_in = rng.choices(("elastic", "off", "bad", "rigid"), (80, 5, 4, 11))[0]
    flaws = rng.sample((*IN_REPORTS, *OF_JOBS), rng.randint(1, 3)) if rng.random() < 0.3 else []
    end = ticks * INTERVAL_S
    return JobPlan(
        name=f"job-{number}",
        time=0.0 if rng.random() < 0.6 else rng.uniform(0.0, end / 3),
        application=rng.choice(("cnn", "nlp")),
        gpus=min(rng.choice((1, 1, 2, 4, 8)), spec.gpus),
        epochs=rng.uniform(0.2, 1.0) if opt_in != "rigid" else rng.uniform(0.02, 0.2),
        opt_in=opt_in,
        flaws=frozenset(flaws) if opt_in != "rigid" else frozenset(),
        limit_s=rng.uniform(300.0, end) if rng.random() < 0.1 else 0.0,
        begin_s=rng.uniform(60.0, end) if rng.random() < 0.08 else 0.0,
        hold=rng.random() < 0.05,
        requeue=rng.random() > 0.04,
    )


def _with_strategy(rng: random.Random, job: JobPlan, spec: ClusterSpec) -> JobPlan:
    """The job with a strategy, at a size that this can use."""
    if job.opt_in != "elastic":
        return job
    if rng.random() < 0.3:
        return replace(job, application="packed")
    each = spec.gpus_per_node
    gpus = rng.choice([n for n in (2, 4, 8) if n <= each or (n % each == 0 and n <= spec.gpus)])
    return replace(job, application="pairs", gpus=each if spec.whole_nodes else gpus)


def _of_blocks(rng: random.Random, job: JobPlan) -> JobPlan:
    flaws = frozenset(rng.sample(OF_BLOCKS, rng.randint(1, 2))) if rng.random() < 0.2 else frozenset()
    return replace(job, blocks=True, flaws=job.flaws | flaws)


def _of_guests(rng: random.Random, job: JobPlan) -> JobPlan:
    """A job that asks for little, so that it has grown by guests when others come; some stay rigid."""
    if job.opt_in == "rigid" or rng.random() < 0.1:
        return job
    blocks, gpus, epochs = rng.random() < 0.9, rng.choice((1, 1, 2)), rng.uniform(0.5, 1.0)
    time, requeue = min(job.time, rng.uniform(0.0, 120.0)), rng.random() < 0.9
    job = replace(job, opt_in="elastic", blocks=blocks, gpus=gpus, epochs=epochs, application="cnn")
    return replace(job, begin_s=0.0, hold=False, time=time, requeue=requeue)


def _settings(rng: random.Random) -> dict[str, Any]:
    return {
        "resize.dwell_s": rng.choice((0.0, 0.0, 0.0, 0.0, 60.0, 300.0)),
        "resize.max_wait_s": rng.choice((60.0, 300.0)),
        "resize.drain_timeout_s": rng.choice((60.0, 120.0, 300.0)),
        "resize.start_timeout_s": rng.choice((120.0, 300.0)),
        "resize.max_open": rng.choice((1, 4, 64)),
        "resize.start_now": rng.random() < 0.8,
        "resize.advance_s": rng.choice((2.0, 10.0, 10.0, 30.0)),
        "limits.near_end_s": 0.0,
        "limits.near_limit_s": 0.0,
        "resize.park_lease_s": rng.choice((300.0, 900.0)),
        "resize.shrink": rng.random() < 0.9,
        "resize.preempt": rng.random() < 0.9,
    }
