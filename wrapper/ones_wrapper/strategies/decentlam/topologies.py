"""Topologies for averages with neighbours: static, symmetric, doubly stochastic matrices W over the ranks.

W[i, j] is the weight of rank j's values at rank i. Rows and columns sum to 1, so that averaging keeps the mean over the
ranks. W is symmetric, so that its eigenvalues are real, as momentum requires (`largest_momentum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Topology = str | Callable[[int], Any]
"""Name of a topology, or a function from a number of ranks to W."""

TOLERANCE = 1e-9


def _grid(world: int) -> set[tuple[int, int]]:
    """Return the edges of the grid of `world` ranks that is closest to a square; for a prime number it is a path."""
    columns = world // _rows(world)
    across = {(i, i + 1) for i in range(world) if (i + 1) % columns}
    return across | {(i, i + columns) for i in range(world - columns)}


def _rows(world: int) -> int:
    return max(d for d in range(1, int(world**0.5) + 1) if world % d == 0)


def _powers(world: int) -> list[int]:
    return [1 << k for k in range(max(1, (world - 1).bit_length())) if 1 << k < world]


_STEPS: dict[str, Callable[[int], Sequence[int]]] = {
    "ring": lambda world: [1],
    "exponential": _powers,
    "complete": lambda world: range(1, world),
}
"""Functions from a number of ranks to the distances between a rank and its neighbours, in both directions."""
NAMES = ("ring", "grid", "exponential", "complete")
DIRECTED = {"directed-ring": "ring", "directed-exponential": "exponential"}
"""Known topologies that are refused because they are directed: the ranks to which a rank sends are not those from which
it receives."""
TIME_VARYING = ("one-peer", "one-peer-exponential", "one-peer-hypercube", "random-matching")
"""Known topologies that are refused because a rank's neighbours change with each step."""


def degree(name: str, world: int) -> int:
    """Return the largest number of neighbours of a rank in this topology."""
    if name == "grid":
        rows = _rows(world)
        return min(2, rows - 1) + min(2, world // rows - 1)
    return len({shift % world for step in _STEPS[name](world) for shift in (step, -step)} - {0})


def _edges(name: str, world: int) -> set[tuple[int, int]]:
    if name == "grid":
        return _grid(world)
    return {(i, (i + step) % world) for i in range(world) for step in _STEPS[name](world)}


def metropolis(world: int, edges: set[tuple[int, int]]) -> Matrix:
    """Return the Metropolis-Hastings weights W [world, world]. An edge has 1/(1 + the larger degree of its two ranks),
    and a rank itself has 1 minus the sum of its edges. W is symmetric and doubly stochastic for any graph."""
    joined = np.zeros((world, world), dtype=bool)
    for i, j in edges:
        joined[i, j] = joined[j, i] = i != j
    degrees = joined.sum(1)
    weights = np.where(joined, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    weights[np.diag_indices(world)] = 1.0 - weights.sum(1)
    return weights


def directed(name: str, world: int) -> Matrix:
    """Return W [world, world] of a directed topology with equal weights: doubly stochastic, but not symmetric."""
    steps = _STEPS[DIRECTED[name]](world)
    weights = np.eye(world)
    for step in steps:
        weights += np.roll(np.eye(world), step, axis=1)
    return weights / (1 + len(steps))


def mixing(topology: Topology, world: int) -> Matrix:
    """Return the matrix W [world, world]. Raises ValueError for a topology that is directed or changes from step to
    step."""
    if isinstance(topology, str):
        check_name(topology)
        return metropolis(world, _edges(topology, world) if world > 1 else set())
    return checked(np.asarray(topology(world), dtype=np.float64), world)


def check_name(name: str) -> None:
    """Raise ValueError for an unknown name, and for a topology that is directed or changes from step to step."""
    if name in TIME_VARYING:
        raise ValueError(
            f"topology {name!r} changes its neighbours from step to step: DecentLaM's momentum remembers I − W of "
            f"earlier steps and diverges when W is another by then; take one of {', '.join(NAMES)}"
        )
    if name in DIRECTED:
        raise ValueError(_not_symmetric(f"topology {name!r}", directed(name, 8), 8))
    if name not in NAMES:
        raise ValueError(f"topology {name!r} is none of {', '.join(NAMES)}")


def checked(weights: Matrix, world: int) -> Matrix:
    """Return the matrix if it is symmetric, doubly stochastic and connected. Raises ValueError otherwise."""
    what = f"topology: the matrix for {world} ranks"
    if weights.shape != (world, world) or not np.isfinite(weights).all():
        raise ValueError(f"{what} must be {world} × {world} finite numbers, not {weights.shape}")
    if (weights < -TOLERANCE).any() or np.abs(weights.sum(1) - 1).max() > TOLERANCE:
        raise ValueError(f"{what} must have no negative weights and rows that sum to 1")
    if np.abs(weights.sum(0) - 1).max() > TOLERANCE:
        raise ValueError(f"{what} must have columns that sum to 1, or the ranks' mean would drift")
    if np.abs(weights - weights.T).max() > TOLERANCE:
        raise ValueError(_not_symmetric(what, weights, world))
    values = np.linalg.eigvalsh(weights)
    if world > 1 and values[-2] > 1 - TOLERANCE:
        raise ValueError(f"{what} leaves ranks apart: no path of neighbours joins all")
    if values[0] < -1 + TOLERANCE:
        raise ValueError(f"{what} swaps ranks for ever (an eigenvalue of −1); give ranks a weight of their own")
    return weights


def largest_momentum(weights: Matrix) -> float:
    """Return the largest momentum β (to 0.001) at which DecentLaM's averaging is stable; 1 if W is symmetric.

    Without gradients x(t+1) = (β + λ) x(t) − β x(t−1) for each eigenvalue λ of W: heavy ball on I − W. It is stable if
    all roots of z² − (β + λ) z + β are within the unit circle. For a real λ in (−1, 1) this is the case for any β < 1.
    """
    values = np.linalg.eigvals(weights).astype(complex)
    betas = np.arange(0, 1000)[:, None] / 1000
    half = (betas + values[np.abs(values - 1) > TOLERANCE]) / 2
    root = np.sqrt(half**2 - betas)
    stable = (np.maximum(np.abs(half + root), np.abs(half - root)) < 1 - TOLERANCE).all(1)
    return 1.0 if stable.all() else float(betas[np.argmin(stable), 0]) - 0.001


def neighbours(weights: Matrix, rank: int) -> list[tuple[int, float]]:
    """Return the neighbours of a rank, with their weights, in rank order."""
    row: Sequence[float] = weights[rank].tolist()
    return [(other, weight) for other, weight in enumerate(row) if weight > 0 and other != rank]


def _not_symmetric(what: str, weights: Matrix, world: int) -> str:
    bound = int(100 * largest_momentum(weights)) / 100
    return (
        f"{what} is directed: W is not symmetric, its eigenvalues are complex, and at {world} ranks DecentLaM is "
        f"stable only for momentum up to {bound:.2f}; take one of {', '.join(NAMES)}"
    )
