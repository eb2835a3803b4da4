"""How far a batch may grow at no cost: one rule for job and companion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ones_wrapper.protocol.growth import MOST, PARTS, bound, doubled, efficiency

RULES = st.sampled_from([*PARTS, "other", "none", ""])


@pytest.mark.parametrize(
    ("rule", "noise", "most", "batch"),
    [("adam", 0.0, 64.0, 64), ("adam", 255.0, 127.5, 64), ("adam", 256.0, 128.0, 128), ("adam", 1e9, 512.0, 512),
     ("sgd", 511.0, 127.75, 64), ("sgd", 512.0, 128.0, 128), ("sgd", 1e9, 512.0, 512),
     ("other", 1e9, 64.0, 64), ("none", 1e9, 64.0, 64), ("", 1e9, 64.0, 64)],
)  # fmt: skip
def test_the_bound(rule: str, noise: float, most: float, batch: int) -> None:
    """Protects: half the noise scale for Adam, a quarter for SGD, eight base batches, doublings, nothing for others."""
    assert (bound(rule, 64, noise), doubled(rule, 64, noise)) == (most, batch)


@given(RULES, st.integers(1, 4096), st.floats(0.0, 1e9))
def test_no_growth_leaves_the_bound(rule: str, base: int, noise: float) -> None:
    """Protects: between one and eight base batches, for any noise scale that somebody reports."""
    assert base <= doubled(rule, base, noise) <= bound(rule, base, noise) <= MOST * base


def test_efficiency() -> None:
    """A sample is worth less in a batch beyond the noise scale, never more than one at the base batch, and as much up
    to what costs nothing."""
    assert efficiency(64, 64, 100.0) == efficiency(32, 64, 100.0) == efficiency(4096, 64, None) == 1.0
    assert efficiency(256, 64, 64.0) == efficiency(256, 64, 64.0, 128) == pytest.approx(128 / 320)
    assert efficiency(256, 64, 1e9) == pytest.approx(1.0)
    assert efficiency(256, 64, 0.0) == pytest.approx(0.25)
    assert efficiency(256, 64, 0.0, 256) == 1.0
