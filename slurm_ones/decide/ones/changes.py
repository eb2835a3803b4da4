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
    """What a change of each job's size costs it, in seconds (J,)."""

    grow_s: Floats
    """That training stands still where it gains GPUs."""
    shrink_s: Floats
    """That training stands still where it gives up GPUs."""
    prepare_s: Floats
    """That GPUs which it gains are held before, while it trains on as it was."""
    lasts_s: Floats
    """That a change is expected to last."""


@dataclass(frozen=True)
class Changes(Term):
    """Changes must repay their interruption within `horizon_s`, a share of the job's time to come, and `tenure`."""

    horizon_s: float
    horizon_share: float
    tenure: float

    def worth(self, at: Priced, worth: Floats) -> Floats:
        return less_costs(worth, at.tables.current, self.costs(at))

    def costs(self, at: Priced) -> Costs:
        """What changes cost, and how long they last."""
        jobs = at.tables.jobs
        grow = np.array([within(job.resize_s, 0.0, LARGEST_S) for job in jobs])
        shrink = np.array([shrink_s(job) for job in jobs])
        prepare = np.array([within(job.prepare_s, 0.0, LARGEST_S) for job in jobs])
        # Where no job came or went for long, none is expected for as long again.
        horizon = max(self.horizon_s, at.quiet_s)
        tenure = np.array([_tenure(job) for job in jobs])
        # Who has run for a short while may be changed again soon; where that costs next to nothing, it is no reason.
        tenure = np.where(shrink <= CHEAP * self.horizon_s, np.maximum(tenure, self.horizon_s), tenure)
        lasts = np.minimum(np.minimum(horizon, self.horizon_share * at.ends), self.tenure * tenure)
        return Costs(grow, shrink, prepare, lasts)


def less_costs(worth: Floats, current: Ints, costs: Costs) -> Floats:
    """(J, U) what each size is worth on average while it lasts, from the worth (J, U) of training there.

    A job that grows trains at its old size until the new GPUs are ready, stands still for the pause, and trains at the
    new size for the rest of the time that the change lasts. So the pause costs training, and the preparation costs what
    others would have made of the new GPUs, since these count as the job's from now on; the rest is not delayed by it.
    A change counts at least until it begins: one that would be undone before is worth less than to stay.
    Waiting jobs pay nothing: whatever their size, they start.
    """
    columns, held = np.arange(worth.shape[1]), current[:, None]
    grows = columns > held
    ready = np.where(grows, costs.prepare_s[:, None], 0.0)
    begins = ready + np.where(grows, costs.grow_s[:, None], costs.shrink_s[:, None])
    lasts = np.maximum(np.maximum(costs.lasts_s[:, None], begins), 1e-9)
    old = worth[np.arange(len(worth)), current][:, None]
    changed = worth * (1.0 - begins / lasts) + old * ready / lasts
    result: Floats = np.where((held > 0) & (columns != held), changed, worth)
    return result


def _tenure(job: JobView) -> float:
    """Seconds that the job has kept its sizes on average, also as the last one may end now."""
    return within(job.running_s, 0.0, LARGEST_S) / max(job.resizes, 1)
