"""What a change of a job's size costs, and for how long it is expected to pay.

In a pause the job waits and its new GPUs are held. That costs (w + λn) a second, w the weight of its waiting and λ the
price of a GPU, and at the size n that is best for it w + λn is the worth v g(n) of training there. So a pause costs the
worth of the new size, and a change from n to m that lasts L seconds, p of them a pause, brings
v g(m) (L − p) − v g(n) L.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ones.decide.job_figures import within
from slurm_ones.decide.ones.reach import LARGEST_S, shrink_s
from slurm_ones.decide.ones.terms import Priced, Term
from slurm_ones.schedule.policy import Floats, Ints, JobView

CHEAP = 0.01
"""Share of the time a change lasts up to which giving up GPUs again costs next to nothing."""


@dataclass(frozen=True)
class Costs:
    """What a change of each job's size to each column costs it, in seconds (J, U)."""

    ready_s: Floats
    """That GPUs which it gains are held before, while it trains on as it was."""
    pause_s: Floats
    """That training then stands still."""
    lasts_s: Floats
    """That the change is expected to last, both of these in it."""


@dataclass(frozen=True)
class Changes(Term):
    """Changes must repay their interruption within `horizon_s`, a share of the job's time to come, and `tenure`."""

    horizon_s: float
    horizon_share: float
    tenure: float

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return less_costs(worth, at.tables.current, self.costs(at))

    def costs(self, at: Priced) -> Costs:
        """What changes cost, and how long they last: no job's longer than to its own end at the size in question."""
        jobs, current = at.tables.jobs, at.tables.current
        grow = np.array([within(job.resize_s, 0.0, LARGEST_S) for job in jobs])
        shrink = np.array([shrink_s(job) for job in jobs])
        prepare = np.array([within(job.prepare_s, 0.0, LARGEST_S) for job in jobs])
        ready, pause = seconds_of(len(at.tables.sizes), current, grow, shrink, prepare)
        # Where no job came or went for long, none is expected for as long again.
        horizon = max(self.horizon_s, at.quiet_s)
        tenure = np.array([_tenure(job) for job in jobs])
        # Who has run for a short while may be changed again soon; where that costs next to nothing, it is no reason.
        tenure = np.where(shrink <= CHEAP * self.horizon_s, np.maximum(tenure, self.horizon_s), tenure)
        old = at.speed[np.arange(len(jobs)), current][:, None]
        left = np.maximum(at.remaining[:, None] - old * ready, 0.0)
        with np.errstate(divide="ignore"):
            ends = ready + pause + left * np.where(at.speed > 0, 1.0 / at.speed, 0.0)
        lasts = np.minimum(np.minimum(horizon, self.horizon_share * ends), self.tenure * tenure[:, None])
        return Costs(ready, pause, lasts)


def seconds_of(sizes: int, current: Ints, grow: Floats, shrink: Floats, prepare: Floats) -> tuple[Floats, Floats]:
    """(J, U) seconds until GPUs which a change gains are ready, and that training then stands still, for `sizes`
    columns and what each job has (J,); from seconds (J,) of what each job gains and gives up."""
    grows = np.arange(sizes) > current[:, None]
    return np.where(grows, prepare[:, None], 0.0), np.where(grows, grow[:, None], shrink[:, None])


def less_costs(worth: Floats, current: Ints, costs: Costs) -> Floats:
    """(J, U) what each size is worth on average while it lasts, from the worth (J, U) of training there.

    A job that grows trains at its old size until the new GPUs are ready, stands still for the pause, and trains at the
    new size for the rest of the time that the change lasts. So the pause costs training, and the preparation costs what
    others would have made of the new GPUs, since these count as the job's from now on; the rest is not delayed by it.
    A change counts at least until it begins: one that would be undone before is worth less than to stay.
    Waiting jobs pay nothing: whatever their size, they start.
    """
    held = current[:, None]
    begins = costs.ready_s + costs.pause_s
    lasts = np.maximum(np.maximum(costs.lasts_s, begins), 1e-9)
    old = worth[np.arange(len(worth)), current][:, None]
    changed = worth * (1.0 - begins / lasts) + old * costs.ready_s / lasts
    result: Floats = np.where((held > 0) & (np.arange(worth.shape[1]) != held), changed, worth)
    return result


def _tenure(job: JobView) -> float:
    """Seconds that the job has kept its sizes on average, also as the last one may end now."""
    return within(job.running_s, 0.0, LARGEST_S) / max(job.resizes, 1)
