"""The elastic strategy of Lightning in forked ranks: its gradients, where it evaluates and ends, what it refuses."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from ones_wrapper import testing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """What they do: collecting would import lightning into each of pytest's workers."""
    pytest.importorskip("lightning")
    from tests.wrapper.frameworks import lightning_ranks

    return lightning_ranks


def test_gradients_are_the_same_at_any_number_of_ranks(script: ModuleType) -> None:
    """Protects the result: a step is of eight samples, in two accumulation steps on one rank and in one on three; the
    epoch's last is smaller. The schedule ends, epochs are evaluated once.
    """
    (alone,), others = (testing.run(script.trains, ranks=ranks) for ranks in (1, 3))
    assert alone.value[1:] == ([0.0], 6, [3, 6], ["epoch", "epoch"])
    for put in others:
        torch.testing.assert_close(put.value[0], alone.value[0], rtol=1e-4, atol=1e-5)
        assert put.value[1:] == alone.value[1:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"val_check_interval": 0.5}, ([3, 6, 9, 12], 12)),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, ([4, 8, 12], 12)),
        ({"max_steps": 8, "max_epochs": -1, "check_val_every_n_epoch": 1}, ([6], 8)),
    ],
)
def test_lengths_are_in_steps_of_the_base_batch(
    script: ModuleType, options: dict[str, Any], expected: tuple[list[int], int]
) -> None:
    """Protects what a script says of evaluations and of its end: the Trainer's own counts at the base batch."""
    testing.run(partial(script.steps, options, expected))


def test_what_callbacks_count_survives(script: ModuleType) -> None:
    """Protects early stopping and a schedule that waits for a plateau: nothing improves, so training ends after two
    epochs more, though a resize came in between; the job's own checkpoint counts, not Lightning's.
    """
    testing.run(script.stops_early)


def test_a_finished_training_goes_on_with_more_epochs(script: ModuleType) -> None:
    """Protects who raises `max_epochs` later: it trains the rest, and nothing twice."""
    testing.run(script.goes_on)


def test_what_cannot_be_elastic_is_refused(script: ModuleType) -> None:
    """Protects from a Trainer that would lose samples: each refusal says what to do."""
    testing.run(script.refuses)


def test_a_batch_divided_by_the_world_is_said(script: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects the base batch from becoming another one at each resize."""

    def body() -> None:
        script.trainer(max_epochs=1).fit(script.Divides(), script.data())

    testing.run(body)
    log = capfd.readouterr().err
    assert log.count("world_size was asked for before training begins (lightning_ranks.py:") == 1
