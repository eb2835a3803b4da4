"""What became of a simulated workload: plain data, from which all figures follow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A stretch in which a job held the same GPUs."""

    job: str
    start: float
    end: float
    gpus: int
    nodes: int
    batch: int


@dataclass(frozen=True)
class JobOutcome:
    """One job from submission to end. Times in seconds after the start."""

    name: str
    application: str
    submitted: float
    started: float | None
    """Its first start; None where it never ran."""
    ended: float | None
    """None where it had not ended when the simulation stopped."""
    running_s: float
    """Seconds in which it held GPUs."""
    gpu_s: float
    """GPU-seconds that it held."""
    lost_gpu_s: float
    """Of them those in which it did not train: starting, stopping, resizing."""
    resizes: int
    """Interruptions after its first start."""
    fair_s: float
    """Seconds it would take alone on its share of the cluster: GPUs over the jobs that were in the system meanwhile."""
    metric: float
    target: float
    """NaN where it has none."""
    elastic: bool = True

    @property
    def jct_s(self) -> float:
        """Job completion time: submission to end; NaN while it has not ended."""
        return float("nan") if self.ended is None else self.ended - self.submitted

    @property
    def missed(self) -> bool:
        """It ended (or did not) without the accuracy that its user wants."""
        return self.ended is None or self.metric < self.target - 1e-9


@dataclass(frozen=True)
class Outcome:
    """One policy on one workload with one seed."""

    policy: str
    workload: str
    seed: int
    gpus: int
    """GPUs of the cluster."""
    jobs: tuple[JobOutcome, ...]
    segments: tuple[Segment, ...] = ()
    decision_s: tuple[float, ...] = ()
    """Real seconds of each decision."""
    goodput: tuple[tuple[float, float], ...] = ()
    """(time, goodput of all jobs over that of the whole cluster used at perfect efficiency)."""
    wall_s: float = 0.0
    """Real seconds of the whole simulation."""
    notes: tuple[str, ...] = field(default=())
