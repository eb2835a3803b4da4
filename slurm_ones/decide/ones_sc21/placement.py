"""Where a job of a candidate can sit, for many candidates at once."""

from __future__ import annotations

import numpy as np

from slurm_ones.decide.ones_sc21.space import Space
from slurm_ones.decide.policy import Ints

TAKEN = np.iinfo(np.int64).max


def seat(space: Space, room: Ints, job: Ints, cap: Ints) -> tuple[Ints, Ints]:
    """The largest size up to `cap` (R,) that job `job` (R,) of each row can have in `room` (R, N) free GPUs.

    Returns the sizes (R,), 0 where not even the smallest fits, and the GPUs taken on each node (R, N). The
    current size is possible only where the job runs, as Slurm does not move a job; other sizes go to the
    fullest nodes they fit on (best fit), among equals to nodes the job already holds. A few numpy calls over
    (R, N log N).
    """
    per_node = max(space.cluster.gpus_per_node, 1)
    whole = (room >= per_node).sum(axis=1)
    bound = np.minimum(cap, np.maximum(room.max(axis=1, initial=0), whole * per_node))
    fits = space.allowed[job] & (space.sizes <= bound[:, None])
    size = (fits * space.sizes).max(axis=1)

    home = space.home[job]
    current = space.current[job]
    stays = (current >= size) & (current > 0) & (current <= cap) & (room >= home).all(axis=1)

    several = size > per_node
    each = np.where(several, per_node, size)[:, None]
    nodes = np.where(several, size // per_node, 1)[:, None]
    order = np.argsort(np.where(room >= each, 2 * room - (home > 0), TAKEN), axis=1, kind="stable")
    take = np.zeros_like(room)
    np.put_along_axis(take, order, np.where(np.arange(room.shape[1]) < nodes, each, 0), axis=1)
    return np.where(stays, current, size), np.where(stays[:, None], home, take)


def pack(space: Space, wanted: Ints, *, shelter: bool) -> Ints:
    """A grid (K, J, N) for wanted counts (K, J): unchanged jobs in place, then the others, largest first.

    What does not fit shrinks, possibly to 0. With `shelter` every changed running job first gets its smallest
    size on nodes it holds and gives that up only for a better place, so none falls below its floor, at the
    price of worse packing. Costs one `seat` per changed job.
    """
    rows = np.arange(len(wanted))
    same = wanted == space.current
    grid = np.where(same[:, :, None], space.home, 0)
    if shelter:
        grid = np.where(same[:, :, None], grid, space.shelter)
    free = space.capacity - grid.sum(axis=1)
    changed = ~same & (wanted > 0)
    order = np.argsort(np.where(changed, -wanted, 1), axis=1, kind="stable")
    left = changed.sum(axis=1)
    for position in range(int(left.max(initial=0))):
        row = rows[left > position]
        job = order[row, position]
        room = free[row] + grid[row, job]
        _, take = seat(space, room, job, wanted[row, job])
        grid[row, job] = take
        free[row] = room - take
    return grid
