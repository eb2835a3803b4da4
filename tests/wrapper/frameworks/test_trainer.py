"""The elastic Trainer in forked ranks: its gradients, and what it refuses."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from ones_wrapper import testing
from tests.marks import nightly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """What they do: collecting would import transformers into each of pytest's workers."""
    pytest.importorskip("transformers")
    from tests.wrapper.frameworks import trainer_ranks

    return trainer_ranks


def test_gradients_are_means_over_the_step_s_items(script: ModuleType, tmp_path: Any) -> None:
    """Protects the result: rows count differently many items, ranks and accumulation steps take differently many rows,
    and the gradient is the mean over all items of the step at any number of ranks, as is the loss that is logged.
    """
    alone, *others = (testing.run(partial(script.trains, str(tmp_path)), ranks=ranks) for ranks in (1, 3))
    weights, losses, step = alone[0].value
    assert step == 6 and len(losses) == 6  # 23 rows in steps of 8, twice
    for put in others[0]:
        assert put.value[2] == 6 and put.value[1] == pytest.approx(losses, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(put.value[0][name], value, rtol=1e-3, atol=1e-4)


def test_what_callbacks_count_survives(script: ModuleType, tmp_path: Any) -> None:
    """Protects early stopping, the best model and a schedule that waits for a plateau: nothing improves, so training
    stops after two evaluations more, though a resize came in between.
    """
    testing.run(partial(script.stops_early, str(tmp_path)))


def test_a_finished_training_goes_on_with_more_epochs(script: ModuleType, tmp_path: Any) -> None:
    """Protects who raises `num_train_epochs` later: it trains the rest, and nothing twice."""
    testing.run(partial(script.goes_on, str(tmp_path)))


def test_a_stream_without_length(script: ModuleType, tmp_path: Any) -> None:
    """Protects who trains for a number of steps: 23 rows in steps of eight end each epoch with a smaller one."""
    testing.run(partial(script.streams, str(tmp_path)))


def test_a_stream_gets_the_trainer_s_collator(script: ModuleType, tmp_path: Any) -> None:
    """Protects who pads rows of several lengths: the model is that of rows of one length, through a resize."""
    streams = ((script.Stream(), None), (script.Ragged(), script.padded))
    whole, padded = (testing.run(partial(script.collates, str(tmp_path), *one)) for one in streams)
    torch.testing.assert_close(padded[0].value, whole[0].value)


def test_what_cannot_be_elastic_is_refused(script: ModuleType) -> None:
    """Protects from a Trainer that would lose samples: each refusal says what to do."""
    testing.run(script.refuses)
    testing.run(script.resumes)


@pytest.mark.parametrize("ranks", [nightly(1), 2])
def test_a_subclass_may_override_loader_and_step(script: ModuleType, ranks: int) -> None:
    """Protects both from being passed over: the same result, and the step is called for each pass."""
    plain, own = (testing.run(partial(script.trains_as, kind), ranks=ranks) for kind in (script.Trainer, script.Own))
    torch.testing.assert_close(own[0].value[1], plain[0].value[1])
    assert own[0].value[0] >= 6


def test_a_loader_that_chooses_samples_names_its_method(script: ModuleType) -> None:
    with pytest.raises(testing.RankFailed, match=r"Sampled\.get_train_dataloader returns batches by a list"):
        testing.run(partial(script.trains_as, script.Sampled))
