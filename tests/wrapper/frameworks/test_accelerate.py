"""The elastic Accelerator in forked ranks: accumulation, and what it refuses."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch

from ones_wrapper import testing
from tests.marks import nightly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """What they do: collecting would import accelerate into each of pytest's workers."""
    pytest.importorskip("accelerate")
    from tests.wrapper.frameworks import accelerate_ranks

    return accelerate_ranks


@pytest.mark.parametrize("zero_first", [True, nightly(False)])
def test_accumulation_is_the_same_at_any_number_of_ranks(script: ModuleType, zero_first: bool) -> None:
    """Protects the result: a step is of eight samples, in two accumulation steps on one rank and in one on three."""
    (alone,), others = (testing.run(partial(script.trains, zero_first), ranks=ranks) for ranks in (1, 3))
    for put in others:
        torch.testing.assert_close(put.value[0], alone.value[0], rtol=1e-4, atol=1e-5)
        assert put.value[1] == alone.value[1] == [0.0]


def test_a_step_that_the_scaler_left_out_is_said(script: ModuleType) -> None:
    """Protects schedules of scripts that step them unless `optimizer_step_was_skipped`."""
    testing.run(script.overflows)


def test_what_is_registered_late_stays(script: ModuleType) -> None:
    """Protects the state of an object that the script has not made again when the next checkpoint is written."""
    script.registers_late()


def test_drop_last(script: ModuleType) -> None:
    """Protects what the script said of its data: an epoch has whole base batches alone."""
    testing.run(script.drops)


def test_what_cannot_be_elastic_is_refused(script: ModuleType) -> None:
    """Protects from samples that are lost or repeated, and from ranks that would train without each other."""
    testing.run(script.refuses)
