"""A sweep on a real Slurm: its jobs are trained as one, and each ends by itself."""

from __future__ import annotations

import json

import pytest
import torch

from tests.endtoend.harness import HERE, Harness

SWEPT = HERE / "swept.py"


def submitted(harness: Harness, rates: list[float], *more: str) -> list[int]:
    options = ("--nodelist=n1",)  # one after the other, but for those that Slurm starts at once
    return [
        harness.submit(str(SWEPT), "--lr", str(rate), *more, options=options, template=HERE / "swept.sbatch")
        for rate in rates
    ]


@pytest.mark.cluster
def test_a_sweep_is_trained_as_one_job(harness: Harness) -> None:
    """Of six jobs the first trains the others; one is cancelled on the way; each of the rest ends by itself with its
    own model and exit code, in a start of a moment."""
    settings = harness.settings(scope='"own"')
    with harness.running(settings, "--act"):
        blockers = [harness.rigid("--nodelist=n1", "--gres=gpu:1") for _ in range(3)]
        for blocker in blockers:
            harness.wait(blocker, lambda job: job.running, "RUNNING")
        ids = submitted(harness, [0.01, 0.02, 0.03, 0.04, 0.05], "--code", "0", "--epochs", "60")
        ids += submitted(harness, [0.06], "--code", "3", "--epochs", "60")
        carrier, gone = ids[0], ids[2]
        harness.ticks(settings)
        harness.trains(carrier)
        told = json.loads((harness.directory(carrier) / "fusion.json").read_text())
        assert told["members"] == ids[1:], harness.log(carrier)
        harness.ticks(settings)
        assert str(carrier) in json.dumps(harness.why(settings, ids[1]))
        assert all(harness.job(one).pending and not harness.job(one).held for one in ids[1:])
        harness.cluster.run(["scancel", str(gone)], user="alice")
        for one in [carrier, ids[1], *ids[3:]]:
            job = harness.wait(one, lambda job: job.ended, "over", 90.0)
            assert job.exit_code == (3 if one == ids[5] else 0), harness.log(one)
            assert (job.restart, f"job {carrier} trained this one" in harness.log(one)) == (0, one != carrier)
        assert f"job {gone} left its sweep" in harness.log(carrier)
        assert not (harness.directory(gone) / "result.json").exists()
        weights = [
            torch.load(harness.directory(one) / f"{one}.pt")["model"]["weight"] for one in [carrier, ids[1], ids[3]]
        ]
        assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3


@pytest.mark.cluster
def test_members_train_by_themselves_where_the_carrier_dies(harness: Harness) -> None:
    """The carrier is cancelled: the others start, and one of them trains the rest."""
    settings = harness.settings(scope='"own"')
    with harness.running(settings, "--act"):
        for blocker in [harness.rigid("--nodelist=n1", "--gres=gpu:1") for _ in range(3)]:
            harness.wait(blocker, lambda job: job.running, "RUNNING")
        ids = submitted(harness, [0.01, 0.02, 0.03], "--epochs", "20")
        harness.trains(ids[0])
        harness.ticks(settings)
        harness.cluster.run(["scancel", str(ids[0])], user="alice")
        for one in ids[1:]:
            job = harness.wait(one, lambda job: job.ended, "over", 90.0)
            assert job.exit_code == 0 and "it trains by itself" in harness.log(one), harness.log(one)
