"""A sweep on a real Slurm: its jobs are trained as one, and each ends by itself."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests import waiting
from tests.endtoend.harness import HERE, WAIT_S, Harness

SWEPT = HERE / "swept.py"
until = partial(waiting.until, within_s=WAIT_S, look_s=0.3)


def submitted(harness: Harness, rates: list[float], *more: str) -> list[int]:
    options = ("--nodelist=n1",)  # one after the other
    more = (*more, "--epochs", "150", "--step-ms", "400")
    return [
        harness.submit(str(SWEPT), "--lr", str(rate), *more, options=options, template=HERE / "swept.sbatch")
        for rate in rates
    ]


def blocked(harness: Harness) -> list[int]:
    """Jobs that have all GPUs of the node, so that those of a sweep wait until one of them goes."""
    blockers = [harness.rigid("--nodelist=n1", "--gres=gpu:1") for _ in range(4)]
    for blocker in blockers:
        harness.wait(blocker, lambda job: job.running, "RUNNING")
    return blockers


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_sweep_is_trained_as_one_job(harness: Harness) -> None:
    """Of six jobs the first trains the others; one is cancelled on the way; each of the rest ends by itself with its
    own model and exit code, in a start of a moment."""
    settings = harness.settings(scope='"own"')
    with harness.running(settings, "--act"):
        blockers = blocked(harness)
        ids = submitted(harness, [0.01, 0.02, 0.03, 0.04, 0.05], "--code", "0")
        ids += submitted(harness, [0.06], "--code", "3")
        harness.cluster.run(["scancel", str(blockers[0])], user="bob")
        carrier, gone = ids[0], ids[2]
        harness.ticks(settings)
        harness.trains(carrier)
        told = json.loads((harness.directory(carrier) / "fusion.json").read_text())
        assert told["members"] == ids[1:], harness.log(carrier)
        harness.ticks(settings)
        assert str(carrier) in json.dumps(harness.why(settings, ids[1]))
        assert all(harness.job(one).pending and not harness.job(one).held for one in ids[1:])
        harness.cluster.run(["scancel", str(gone)], user="alice")
        until(lambda: f"job {gone} left its sweep" in harness.log(carrier))
        (harness.directory(carrier) / "hurry").touch()
        for one in [carrier, ids[1], *ids[3:]]:
            job = harness.wait(one, lambda job: job.ended, "over", 90.0)
            assert job.exit_code == (3 if one == ids[5] else 0), harness.log(one)
            assert (job.restart, f"job {carrier} trained this one" in harness.log(one)) == (0, one != carrier)
        with harness.store(settings) as store:
            for one in (ids[1], ids[5]):
                until(lambda: f"job {carrier} trained it" in str([run.note for run in store.runs(one)]))  # noqa: B023
        assert not (harness.directory(gone) / "result.json").exists()
        weights = [
            torch.load(harness.directory(one) / f"{one}.pt")["model"]["weight"] for one in [carrier, ids[1], ids[3]]
        ]
        assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3


@pytest.mark.nightly
@pytest.mark.cluster
def test_the_others_train_where_the_carrier_is_cancelled(harness: Harness) -> None:
    """The next of them starts, trains by itself, and takes the third along."""
    settings = harness.settings(scope='"own"')
    with harness.running(settings, "--act"):
        blockers = blocked(harness)
        first, second, third = submitted(harness, [0.01, 0.02, 0.03])
        harness.cluster.run(["scancel", str(blockers[0])], user="bob")
        harness.trains(first)
        harness.cluster.run(["scancel", str(first)], user="alice")
        harness.trains(second)
        (harness.directory(second) / "hurry").touch()
        for one in (second, third):
            job = harness.wait(one, lambda job: job.ended, "over", 90.0)
            assert job.exit_code == 0, harness.log(one)
        assert f"job {first} was to train this job" in harness.log(second)
        assert f"job {second} trained this one" in harness.log(third)
