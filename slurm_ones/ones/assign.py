"""Which column each job gets where GPUs are of several kinds: most worth within the GPUs of each kind.

A price for each kind makes the jobs independent of each other (the Lagrangian); what they want at those prices is then
made to fit, and improved by steps of one job and by trades between two. Costs jobs × columns for each step.
"""

from __future__ import annotations

import numpy as np

from slurm_ones.schedule.policy import Bools, Floats, Ints

SWEEPS, HALVINGS = 4, 18
"""Of the prices: times that each is set while the others stand, and halvings of the interval in which it lies."""
STEPS = 100
"""Most steps and trades."""
OFFERS = 6
"""Columns that each job offers to go to, so that another can have what it gives up."""
ASKED, CELLS = 16, 20_000
"""Most such offers that are looked at, those that cost least, and of many jobs as many as make so many cells: where
many jobs are, prices alone come close to the best."""
LEAST = 1e-9
"""Less gain than this, as a share of all worth, is none."""


def assign(worth: Floats, sizes: Ints, kind: Ints, gpus: Ints, current: Ints) -> tuple[Ints, Floats]:
    """Columns (J,) of high worth, and the prices (K,) of a GPU of each kind.

    `worth` (J, U) is -inf where a job may not be; column u takes `sizes[u]` GPUs of kind `kind[u]`, column 0, waiting,
    none. There are `gpus` (K,). What the jobs have now, `current` (J,), must fit: the result is worth as much at least.
    """
    used = np.zeros((len(sizes), len(gpus)), dtype=np.int64)
    used[np.arange(1, len(sizes)), kind[1:]] = sizes[1:]
    if not len(worth):
        return np.zeros(0, dtype=np.int64), np.zeros(len(gpus))
    prices = _prices(worth, used, gpus)
    fitted = _fitted(worth, used, gpus, prices, current)
    rows = np.arange(len(worth))
    better = fitted is not None and float(worth[rows, fitted].sum()) > float(worth[rows, current].sum())
    start = fitted if fitted is not None and better else current
    return improved(worth, used, gpus, start, prices), prices


def _prices(worth: Floats, used: Ints, gpus: Ints) -> Floats:
    """Prices (K,) at which about as many GPUs of each kind are wanted as there are; 0 where fewer are at any price."""
    finite = np.where(np.isfinite(worth), worth, 0.0)
    most = float((finite[:, 1:] / np.maximum(used.sum(axis=1)[1:], 1)).max(initial=0.0))
    prices = np.zeros(len(gpus))
    for _ in range(SWEEPS):
        before = prices.copy()
        for k in range(len(gpus)):
            low, high = 0.0, 2.0 * most
            prices[k] = 0.0
            if _wanted(worth, used, prices)[k] <= gpus[k]:
                continue
            for _ in range(HALVINGS):
                prices[k] = (low + high) / 2
                if _wanted(worth, used, prices)[k] > gpus[k]:
                    low = prices[k]
                else:
                    high = prices[k]
            prices[k] = high
        if np.allclose(prices, before, rtol=1e-3):
            break
    return prices


def _wanted(worth: Floats, used: Ints, prices: Floats) -> Ints:
    found: Ints = used[(worth - used @ prices).argmax(axis=1)].sum(axis=0)
    return found


def _fitted(worth: Floats, used: Ints, gpus: Ints, prices: Floats, current: Ints) -> Ints | None:
    """What each job wants most at the prices of what is left when its turn comes: first those that run, of all others
    those that lose most without. None where one that runs would be left without."""
    left = gpus.copy()
    net = worth - used @ prices
    order = np.lexsort((-(net.max(axis=1) - np.maximum(net[:, 0], -1e300)), current == 0))
    columns = np.zeros(len(worth), dtype=np.int64)
    for j in order.tolist():
        possible = np.where((used <= left).all(axis=1), net[j], -np.inf)
        u = int(possible.argmax())
        if not np.isfinite(possible[u]):
            return None
        columns[j] = u
        left -= used[u]
    return columns


def improved(worth: Floats, used: Ints, gpus: Ints, columns: Ints, prices: Floats) -> Ints:
    """The columns (J,) after steps of one job, and trades in which another gives up some of its GPUs, or its kind,
    while any of these gains."""
    columns = columns.copy()
    rows = np.arange(len(columns))
    net = worth - used @ prices
    offers = np.argsort(-net, axis=1, kind="stable")[:, :OFFERS]
    held = worth[rows, columns]
    least = LEAST * max(float(np.abs(held[np.isfinite(held)]).sum()), 1e-300)
    for _ in range(STEPS):
        left = gpus - used[columns].sum(axis=0)
        mine = used[columns]
        gain = worth - np.where(np.isfinite(held), held, 0.0)[:, None]
        step = np.where(_fits(used, left + mine), gain, -np.inf)
        j, u = divmod(int(step.argmax()), len(used))
        if step[j, u] > least:
            columns[j], held[j] = u, worth[j, u]
            continue
        trade = _trade(worth, used, left, columns, gain, net, offers)
        if trade is None or trade[0] <= least:
            break
        _, i, a, j, u = trade
        columns[i], columns[j] = a, u
        held[i], held[j] = worth[i, a], worth[j, u]
    return columns


def _fits(used: Ints, room: Ints) -> Bools:
    """(…, U) whether each column finds its GPUs in the room (…, K)."""
    found: Bools = np.all(used <= room[..., None, :], axis=-1)
    return found


def _trade(
    worth: Floats, used: Ints, left: Ints, columns: Ints, gain: Floats, net: Floats, offers: Ints
) -> tuple[float, int, int, int, int] | None:
    """The best (gain, i, column of i, j, column of j) in which i changes and j then can: i takes what is left, or gives
    up something, and j what that frees. Both together must fit."""
    rows = np.arange(len(columns))
    lost = net[rows, columns][:, None] - net[rows[:, None], offers]
    lost = np.where(offers == columns[:, None], np.inf, lost)
    asked = np.argsort(lost, axis=None, kind="stable")[: min(ASKED, CELLS // worth.size)]
    best: tuple[float, int, int, int, int] | None = None
    for at in asked.tolist():
        i, o = divmod(at, offers.shape[1])
        a = int(offers[i, o])
        if not np.isfinite(lost[i, o]) or not np.isfinite(worth[i, a]):
            continue
        room = left + used[columns[i]] - used[a]
        both = np.where(_fits(used, room + used[columns]), gain, -np.inf)
        both[i] = -np.inf
        j, u = divmod(int(both.argmax()), len(used))
        total = float(both[j, u]) + float(gain[i, a])
        if np.isfinite(total) and (best is None or total > best[0]):
            best = total, i, a, j, u
    return best
