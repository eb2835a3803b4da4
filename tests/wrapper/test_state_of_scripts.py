"""What scripts carry beside models: evaluation over the ranks, files, batches that are multiples, a name for loggers,
and modules in place of scripts."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import ones_wrapper as ones
from ones_wrapper import testing
from ones_wrapper.data.feed import Feed, clamp_batch
from ones_wrapper.files.kept_files import KeptFiles
from ones_wrapper.files.run_id import run_id
from tests.marks import nightly
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import Run

# -- evaluation --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
def test_shares_are_the_whole_and_equally_many(samples: int, world: int, most: int) -> None:
    """Protects an evaluation from padding and repeats, and ranks from unequally many forward passes where that can
    be."""
    feed = Feed(TensorDataset(torch.arange(samples)), shuffle=False, seed=0)
    shares = [feed.share(world, rank, most) for rank in range(world)]
    used = [index for share in shares for part in share for index in feed.indices(0, part)]
    assert used == list(range(samples))
    assert all(1 <= part.samples <= most for share in shares for part in share)
    if samples >= world and most > 1:
        assert len({len(share) for share in shares}) == 1


class Drawing(Dataset[torch.Tensor]):
    """Draws from every generator while it is read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1, dtype=torch.float64) + random.random() + np.random.rand() + index


def evaluated(evaluates: bool) -> None:
    job = ones.init(batch=4, epochs=1, max_local_batch=4)
    torch.manual_seed(job.rank)
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).double()
    model = job.ddp(net)
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(Drawing(12))
    assert job.unwrap(model) is net and job.unwrap(net) is net
    drawn = []
    for _ in job.epochs():
        for x in loader:
            if evaluates:
                for size in (3, 1):  # one sample a batch: the ranks take unequally many
                    model.eval()
                    sums = seen = 0.0
                    with torch.no_grad():
                        for test in job.evaluate(Drawing(11), batch=size):
                            sums, seen = sums + model(test).sum(), seen + len(test)
                    model.train()
                    testing.put((job.progress.step, job.mean(sums, seen)))
            loss = model(x).square().mean() * torch.rand(1).item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            drawn.append(torch.rand(1).item())
    with pytest.raises(ValueError, match="no rank counted"):
        job.mean(0.0, 0)
    testing.put(drawn)
    testing.put(net.state_dict())


def test_an_evaluation_is_that_of_one_process_and_disturbs_nothing() -> None:
    """Protects the mean over ranks, at uneven shares and with BatchNorm's statistics, and the training beside it: its
    samples and random numbers stay."""
    undisturbed = testing.run(partial(evaluated, False), ranks=2)
    found = testing.run(partial(evaluated, True), ranks=2)
    means = [put.value for put in found if isinstance(put.value, tuple)]
    assert len(means) == 2 * 2 * 3
    for (step, mean), (again, other) in zip(means[: len(means) // 2], means[len(means) // 2 :], strict=True):
        assert (step, mean) == (again, other)  # on both ranks
    for (step, mean), (_, one_by_one) in zip(means[::2], means[1::2], strict=True):
        assert mean == pytest.approx(one_by_one, rel=1e-12), step
    plain = [put.value for put in undisturbed]
    kept = [put.value for put in found if not isinstance(put.value, tuple)]
    for one, other in zip(plain, kept, strict=True):
        if isinstance(one, list):
            assert one == other
        else:
            for key in one:
                torch.testing.assert_close(one[key], other[key], msg=key)


def test_few_samples_and_many_ranks() -> None:
    """Protects ranks that have nothing to evaluate: they give 0 of 0."""
    assert sorted(put.value for put in testing.run(one_sample, ranks=3)) == [(7.0, 0), (7.0, 0), (7.0, 1)]


def one_sample() -> None:
    job = ones.init(batch=4, epochs=1)
    batches = [x for (x,) in job.evaluate(TensorDataset(torch.full((1,), 7.0)))]
    testing.put((job.mean(sum(float(x.sum()) for x in batches), sum(map(len, batches))), len(batches)))


# -- batches -----------------------------------------------------------------------------------------------------------


@given(*map(partial(st.integers, 1), (500, 9, 400, 40, 3, 32)))
def test_batches_are_multiples_where_one_fits(
    wanted: int, world: int, largest: int, local: int, passes: int, multiple: int
) -> None:
    """Protects `multiple_of`, and GPUs from more than they hold."""
    batch = clamp_batch(wanted, world, largest, local, passes, multiple)
    room = min(largest, local * passes * world)
    assert 1 <= batch <= room
    assert batch % multiple == 0 or room < multiple
    if multiple == 1:
        assert batch == min(wanted, room)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: ones.init(batch=12, multiple_of=8), "batch=12 is no multiple"),
        (lambda: ones.init(batch=8, multiple_of=0), "multiple_of=0 must be 1 or more"),
        (lambda: ones.init(batch=8).loader(TensorDataset(torch.zeros(5)), drop_last=True), "leaves none of 5 samples"),
    ],
)
def test_batches_that_cannot_be(wrong: Callable[[], object], words: str) -> None:
    """Protects from a batch that would never be what was asked for."""

    def body() -> None:
        with pytest.raises(ValueError, match=words):
            wrong()

    testing.run(body)


# -- files and names ---------------------------------------------------------------------------------------------------


def logged(path: Path, history: list[tuple[int, int]]) -> int | None:
    """Each step writes a line; runs end at this step, with a checkpoint two steps before that, if there can be one."""
    number = int(os.environ["SLURM_RESTART_COUNT"])
    at = history[number][1]
    job = ones.init(batch=4, epochs=2)
    model = job.ddp(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="call it after"):
        job.open(path)
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(TensorDataset(torch.zeros(20, 1)))
    with job.open(path) as file:
        if job.progress.step == 0:
            print("step", "rank", sep=",", file=file)
        testing.put(job.run_id)
        for _ in job.epochs():
            for (x,) in loader:
                if job.progress.step == at - 2 and job.progress.step > 1:
                    job.checkpoint()
                if job.progress.step == at:
                    testing.die(history[number + 1][0])
                csv.writer(file).writerow([job.progress.step, job.rank])
                model(x).mean().backward()
                optimizer.step()
    return None


@pytest.mark.slow
def test_no_line_is_there_twice(tmp_path: Path) -> None:
    """Protects logs over crashes: before the first checkpoint, between two, and at another size; and the name by which
    loggers go on."""
    path = tmp_path / "log.csv"
    path.write_text("of another job\n")
    put = testing.run(partial(logged, path, [(1, 2), (2, 5), (3, 8), (2, -1)]))
    rows = list(csv.reader(path.open()))
    assert rows == [["step", "rank"], *[[str(step), "0"] for step in range(10)]]
    assert len({one.value for one in put}) == 1
    assert put[0].value.startswith("local-0-")


def test_files_that_changed_meanwhile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Protects what a file holds that no checkpoint knows of, and says where lines are missing."""
    known, new, gone = (tmp_path / name for name in ("known", "new", "gone"))
    known.write_text("12"), new.write_text("all of it\n"), gone.write_text("x")
    files = KeptFiles(lambda: True)
    files.load_state_dict({str(known): 9, str(gone): 0})
    for path in (known, new, gone):
        files.open(path).write("more\n")
    with pytest.raises(ValueError, match="open already"):
        files.open(new)
    assert (known.read_text(), new.read_text(), gone.read_text()) == ("12more\n", "all of it\nmore\n", "more\n")
    assert "known holds 2 bytes and held 9" in capfd.readouterr().err
    assert files.state_dict() == {str(known): 7, str(new): 15, str(gone): 5}
    files.open(tmp_path / "again").close()
    with files.open(tmp_path / "again") as file:
        file.write("line\n")
    assert (tmp_path / "again").read_text() == "line\n"
    others = KeptFiles(lambda: False)
    assert others.open(tmp_path / "none").write("text") == 4
    assert not (tmp_path / "none").exists()


def test_a_name_for_all_runs(tmp_path: Path) -> None:
    """Protects loggers: one name for a job, another for another, and none that a logger would refuse."""
    env = {"SLURM_CLUSTER_NAME": "a/b c"}
    name = run_id(tmp_path, env, 7)
    assert name == run_id(tmp_path, {}, 8)
    assert name.startswith("a-b-c-7-") and [path.name for path in tmp_path.iterdir()] == ["run-id"]
    (tmp_path / "run-id").write_text("../x y")
    with pytest.raises(ValueError, match="remove it"):
        run_id(tmp_path, env, 7)


# -- modules in place of scripts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack.inner.train", nightly("pack")])
def test_a_module_runs_as_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Protects `ones-run -m`: arguments, search path, package and main module are those of `python -m`."""
    inner = tmp_path / "pack/inner"
    inner.mkdir(parents=True)
    text = (
        "import os, sys\nfrom . import shared\nimport __main__\n"
        "assert __main__.__dict__ is globals() and __name__ == '__main__'\n"
        "print(sys.argv, sys.path[0], __package__, __spec__.name, __file__, shared.X, sys.orig_argv[0] != '')\n"
    )
    for folder in (tmp_path / "pack", inner):
        (folder / "__init__.py").write_text("")
        (folder / "shared.py").write_text("X = 5\n")
    (inner / "train.py").write_text(text)
    (tmp_path / "pack/__main__.py").write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
    arguments = [name, "--lr", "0.1", "-m", "x"]
    monkeypatch.chdir(tmp_path)
    plain = subprocess.run([sys.executable, "-m", *arguments], env=env, capture_output=True, text=True)
    run = Started(["--gpus-per-node=1", "-m", *arguments], env)
    output, errors = run.communicate(180)
    assert run.wait() == 0, errors
    assert plain.stdout == output != ""


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    missing = Run(tmp_path / "job", "pack.nothing", script=Path("-m"))
    assert missing.end() == 1
    assert "pack.nothing: there is no such module" in missing.errors


def test_a_closed_file_is_durable_before_its_size_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects lines of a script's log: a checkpoint holds the size of a file that was closed before."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(str(Path(f"/proc/self/fd/{handle}").readlink())))
    files = KeptFiles(lambda: True)
    with files.open(tmp_path / "log") as file:
        file.write("line\n")
    assert files.state_dict() == {str(tmp_path / "log"): 5} and str(tmp_path / "log") in synced
