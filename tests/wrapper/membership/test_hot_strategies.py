"""Jobs of several models, on coresets, of equal and of uneven shares, and whose ranks train models of their own grow,
move and shrink by blocks while they train."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ones_wrapper.data.feed import permutation
from ones_wrapper.membership.coming import LOST
from ones_wrapper.protocol import Checkpoint, First, Membership, Throughput
from ones_wrapper.strategies.onebit_lamb.onebit import OneBitMean
from tests.wrapper import gan
from tests.wrapper.forked import Team
from tests.wrapper.membership import onebit
from tests.wrapper.membership.blocks import SAMPLES, Job, hellos, scripted
from tests.wrapper.runs import assert_exactly_once
from tests.wrapper.strategies import apart_script, coreset, coreset_script

pytestmark = pytest.mark.slow
Kept = Callable[[Job], Job]


def lines(job: Job) -> list[dict[str, Any]]:
    """The steps of all ranks, as they traced them."""
    texts = [path.read_text() for path in job.directory.glob("trace-*.jsonl")]
    return [line for text in texts for line in map(json.loads, text.splitlines()) if "samples" in line]


def test_a_gan_goes_on_in_other_blocks(tmp_path: Path) -> None:
    """Each model's exchange gets the new ranks, both optimizers and the plain values travel, and what they end with is
    what one process ends with. Evaluations and the log go on, too."""
    job = Job(tmp_path / "job", epochs=20, script=Path(gan.__file__))
    job.move()
    assert_exactly_once(job.directory, job.epochs, gan.SAMPLES)
    found, counters = torch.load(job.directory / "state-0.pt")
    orders = [permutation(gan.SAMPLES, gan.SEED, epoch, True).tolist() for epoch in range(job.epochs)]
    wanted = gan.train(order[i : i + gan.BATCH] for order in orders for i in range(0, gan.SAMPLES, gan.BATCH))
    steps = job.epochs * -(-gan.SAMPLES // gan.BATCH)
    assert (job.directory / "log").read_text().split() == [str(step + 1) for step in range(steps)]
    assert counters == {"steps": steps, "seen": [steps / 2], "point": 1 - 2j}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_what_was_chosen_travels_to_new_blocks(teams: dict[int, Team], tmp_path: Path) -> None:
    """Each epoch uses the chosen samples once, with the same choice until the next one, and the parameters are those of
    one process."""
    job = scripted(tmp_path / "job", coreset_script, 600)
    job.move()
    assert [one.world for one in job.of(Membership)] == [1, 2, 1], job.errors()
    coreset.once(job.directory)
    (wanted,) = teams[1].run(coreset.expected)
    coreset.ROW.check(json.loads((job.directory / "out.json").read_text()), wanted)


def test_shares_stay_equal_as_blocks_come_and_go(tmp_path: Path) -> None:
    """A script gathers its batch over whoever trains now: in each step all ranks have equally many samples, none is
    used twice in an epoch, and less than one of each rank is left out."""
    job = Job(tmp_path / "job", "--gathers")
    job.move()
    shares: dict[tuple[int, int], list[int]] = defaultdict(list)
    used: dict[int, list[int]] = defaultdict(list)
    for line in lines(job):
        shares[line["epoch"], line["step"]].append(len(line["samples"]))
        used[line["epoch"]] += line["samples"]
    assert {len(each) for each in shares.values()} == {1, 2} and len(used) == job.epochs
    assert all(len(set(each)) == 1 for each in shares.values())
    for samples in used.values():
        assert SAMPLES - 2 < len(samples) == len(set(samples)) <= SAMPLES


@pytest.mark.nightly
def test_uneven_shares_are_measured_again_as_blocks_come_and_go(tmp_path: Path, kept: Kept) -> None:
    """1 → 2 → 3 → 1 ranks: rank 1, which is slow, gets less than others, each sample is used once and the parameters
    are those of one process."""
    job = kept(Job(tmp_path / "job", "--uneven", "--sample-ms", "2", "--step-ms", "0", epochs=60))
    job.start(0)
    job.wait(First)
    for tasks in ((0, 1), (0, 1, 2)):
        job.start(tasks[-1])
        job.order(*tasks)
        changed = job.wait_for(*tasks)
        job.wait(Throughput, lambda report, step=changed.step: report.step > step + 25)  # type: ignore[misc]
    job.order(0)
    job.wait_for(0, after=changed.generation)
    job.finish()
    job.assert_as_undisturbed()
    for world in (2, 3):
        steps = [line for line in lines(job) if line["world"] == world]
        last = sorted({line["step"] for line in steps})[-6:]
        counts = [(line["rank"], len(line["samples"])) for line in steps if line["step"] in last]
        used = [sum(count for rank, count in counts if rank == mine) for mine in (0, 1)]
        assert used[1] < 0.8 * used[0], f"{world} ranks: {used}"


# -- Ranks that train models of their own. By day blocks of ranks with one model are killed (`test_hot`, `test_loss`).


@pytest.fixture(params=["lsgd", "decentlam"])
def apart(request: pytest.FixtureRequest, tmp_path: Path, kept: Kept) -> Job:
    return kept(scripted(tmp_path / "job", apart_script, 20, request.param))


def assert_as_one_process(job: Job) -> None:
    """In a ring of up to three ranks DecentLaM is momentum SGD on the whole batch."""
    assert_exactly_once(job.directory, apart_script.EPOCHS, apart_script.SAMPLES)
    found = json.loads((job.directory / "out.json").read_text())
    assert found == pytest.approx(apart_script.plain(), abs=0.02 if "lsgd" in job.arguments else 1e-9)


def save(job: Job, after: int) -> None:
    job.blocks[0].signal(signal.SIGUSR1)
    job.wait(Checkpoint, lambda report: report.step >= after)


@pytest.mark.nightly
def test_blocks_come_and_go(apart: Job) -> None:
    """Newcomers get the leader, or the means, and those who stay go on from it."""
    grown = apart.begin(0, 1, ranks=2)
    save(apart, grown.step)
    apart.order(1)
    assert (grown.world, apart.wait_for(1).world) == (3, 2)
    apart.finish()
    assert_as_one_process(apart)


@pytest.mark.nightly
def test_the_others_go_on_when_one_is_killed(apart: Job) -> None:
    """From the last checkpoint: a rank may be ahead of the one that is lost, and so cannot say what that one did."""
    whole = apart.begin(0, 1, 2)
    save(apart, whole.step)
    apart.blocks[1].kill()
    apart.wait(Membership, lambda report: report.generation > whole.generation and report.world == 2)
    apart.finish(0, 2)
    assert whole.step <= hellos(apart)[-1] in [report.step for report in apart.of(Checkpoint)]
    assert_as_one_process(apart)


@pytest.mark.nightly
def test_the_residual_of_onebit_lamb_travels_to_new_blocks(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects what ranks kept back: as one vector it reaches old and new ranks alike at each change of the compressed
    phase. A block dies in an exchange, within the step of the optimizers: nobody writes that state, and all go on from
    the last checkpoint. An order's batch is not taken there. All end with the same model, which has learnt."""
    job = kept(Job(tmp_path / "job", epochs=60, script=Path(onebit.__file__)))
    now, exchange = tmp_path / "now", OneBitMean.__call__

    def dies(mean: OneBitMean, *vectors: torch.Tensor) -> Any:
        if now.exists() and os.environ["SLURM_ARRAY_TASK_ID"] == "2":
            time.sleep(1.0)  # the others are in the exchange by then
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return exchange(mean, *vectors)

    monkeypatch.setattr(OneBitMean, "__call__", dies)  # of forked blocks too
    job.start(0)
    job.wait(First)
    job.wait(Throughput, lambda report: report.step > 12)
    job.order(0, 1)
    job.start(1, ranks=2)
    grown = job.wait_for(0, 1)
    job.wait(Throughput, lambda report: report.step > grown.step + 3)
    job.order(0, 1, 2)
    job.start(2)
    four = job.wait_for(0, 1, 2)
    assert four.world == 4
    job.blocks[0].signal(signal.SIGUSR1)
    saved = job.wait(Checkpoint, lambda one: one.step > four.step)
    job.wait(Throughput, lambda report: report.step > saved.step + 3)
    now.touch()
    left = job.wait(Membership, lambda m: m.generation > four.generation and m.world == 3)
    assert left.why == LOST and left.step == hellos(job)[-1] == job.of(Checkpoint)[-1].step
    assert "written by one rank" not in job.errors()
    number = job.order(1, batch=24)
    assert job.wait_for(1, after=left.generation).batch == onebit.BATCH
    job.finish(0, 1)
    assert f"order {number}: the batch stays {onebit.BATCH}, which must not change now" in job.errors()
    assert_exactly_once(job.directory, job.epochs, onebit.SAMPLES)
    ends = [torch.load(path) for path in job.directory.glob("end-*.pt")]
    assert len(ends) == 2
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1][0] > 0.7
    residuals: dict[tuple[int, int], list[torch.Tensor]] = {}
    for path in job.directory.glob("seen-*.pt"):
        for step, world, residual in torch.load(path):
            residuals.setdefault((step, world), []).append(residual)
    changes = [(world, found) for (_, world), found in sorted(residuals.items())]
    worlds = [world for world, _ in changes]
    assert worlds[:3] == [1, 3, 4] and worlds[-2:] == [3, 2]
    for world, found in changes:
        assert len(found) == world and all(torch.equal(found[0], other) for other in found)
    # Alone a rank keeps nothing back, as the first block did before others joined it.
    assert [bool(found[0].any()) for _, found in changes[1:4]] == [False, True, True]
    assert bool(changes[-1][1][0].any())
