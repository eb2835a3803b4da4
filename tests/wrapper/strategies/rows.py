"""One row a strategy: what the contract (`test_contract.py`) needs to know of it.

A strategy joins with a module of its own in this folder that has `ROW`, and a script that trains a few seconds under
`ones-run` (`script.py` helps it).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ones_wrapper.group import Group
from ones_wrapper.protocol import Spec
from ones_wrapper.strategy import Strategy

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One strategy. Functions that take a group run on ranks of their own, and are functions of a module."""

    make: Callable[[], Strategy] | None
    """The strategy as the script has it; None for a way to train that is no strategy, but keeps the contract."""
    script: Path
    """Trains 20 steps or more, with `script.pace` in each; ends with `script.end`. It fixes all random numbers."""
    samples: int
    """Of an epoch."""
    epochs: int
    expected: Callable[[Group], list[float]]
    """What the script gives to `script.end`, computed in one process without the strategy, or by its definition."""
    tolerance: float = 1e-9
    """Largest difference from what is expected, of any number."""
    agrees: Callable[[list[float], list[float]], None] | None = None
    """Asserts that a result (first) is as good as expected, for a strategy that is not exact."""
    arguments: tuple[str, ...] = ()
    """Of the script."""
    sizes: tuple[int, int, int] = (1, 4, 2)
    """World sizes of the contract's run; a rank is killed at the second."""
    measure: Callable[[Group], dict[str, float]] | None = None
    """What a rank measured of a step, by the names of `SizeLimits`: bytes for one sample, and so on."""
    measured_at: tuple[int, ...] = (4,)
    """World sizes at which that is done."""
    spec: Spec = field(default_factory=lambda: Spec(64, 64, 64, 0, 1))
    """For the limits that are compared with what was measured."""
    within: Mapping[str, float] = field(default_factory=dict)
    """How far measured values may be from the limits', as a share of them, by name; 0.02 otherwise."""
    env: Mapping[str, str] = field(default_factory=dict)

    def check(self, found: list[float], wanted: list[float]) -> None:
        """Asserts that this is a result of the strategy where `wanted` is expected."""
        if self.agrees is not None:
            self.agrees(found, wanted)
            return
        assert len(found) == len(wanted) > 0
        worst = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
        assert worst <= self.tolerance, f"{self.name}: {worst} from its reference"

    once: Callable[[Path], None] | None = None
    """Asserts of the job's directory that each sample of each epoch was used once, where that is not all there is to
    say of it."""
    label: str = ""
    """The row's name, where it is not that of a strategy."""

    @property
    def name(self) -> str:
        return self.label if self.make is None else self.make().name


def rows() -> list[Row]:
    """Those of all modules of this folder, by the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(HERE)]))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names if not name.endswith("script")]
    return [module.ROW for module in modules if hasattr(module, "ROW")]
