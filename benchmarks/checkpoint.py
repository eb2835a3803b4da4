"""What a checkpoint costs: synchronous over writing the same bytes, and training's stand-still for an asynchronous one.

Every repeat does all of these on the same disk, the first two in turn first: a plain write and fsync of as many
bytes (as many files of the same sizes, each rank its own, then an fsync of the directory), a synchronous checkpoint,
and an asynchronous one with training going on beside it. The first two begin with nothing left to write (`sync`) and
a barrier, and end with a barrier. `async_cost_over_sync` counts as well what the steps lost while the writing went on
behind them.

    python benchmarks/checkpoint.py --ranks 1 2 --mebibytes 300 --repeats 7 --json checkpoint.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ones_wrapper.api import join
from ones_wrapper.checkpoint import Checkpoints, Failed, Saved, SavedState
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.group import Group

WIDTH = 1024


def training(mebibytes: int) -> tuple[SavedState, Callable[[], None]]:
    """A model of Linear and LayerNorm with Adam whose whole state has about this size, and its step."""
    torch.manual_seed(0)
    layers = max(1, round(mebibytes * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(layers)]
    model: torch.nn.Module = torch.nn.Sequential(*blocks)
    if dist.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    batch = torch.randn(16, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return SavedState(model, {"": optimizer}, {"scheduler": scheduler}), step


def timed(group: Group, action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from a barrier to the barrier after it, on a clean page cache."""
    group.on_first(os.sync)
    started = time.perf_counter()
    result = action()
    group.maximum([0])
    return time.perf_counter() - started, result


def raw(group: Group, folder: Path, own: list[memoryview], small: list[int]) -> None:
    """The rival: the bytes of a checkpoint, written plainly. Rank 0 also writes the small files."""
    files = [(folder / f"part-{group.rank}", own)]
    if group.rank == 0:
        files += [(folder / f"small-{number}", [memoryview(bytes(size))]) for number, size in enumerate(small)]
    for path, pieces in files:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
            os.fsync(file.fileno())
    group.maximum([0])
    if group.rank == 0:
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def like(group: Group, state: SavedState, folder: Path) -> tuple[list[memoryview], list[int]]:
    """For the rival: this rank's pieces, header and tensors, and the sizes of rank 0's small files."""
    with (folder / f"tensors-{group.rank:05d}.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        left = os.fstat(file.fileno()).st_size - header
    small = [file.stat().st_size for file in folder.iterdir() if not file.name.startswith("tensors-")]
    tensors = [value for entry in state.optimizers[""].state.values() for value in entry.values()]
    tensors += [parameter.detach() for parameter in state.model.parameters()]
    pieces = [memoryview(bytes(header))]
    for tensor in tensors:
        pieces.append(memoryview(tensor.reshape(-1).view(torch.uint8).numpy())[:left])
        left -= len(pieces[-1])
    assert left == 0
    return pieces, small


def repeat(
    group: Group, box: Checkpoints, state: SavedState, step: Callable[[], None], at: Path, number: int
) -> dict[str, float]:
    """One of each."""
    own, small = like(group, state, at / "checkpoints" / "step-000000000")
    rival = at / "raw"

    def write() -> float:
        group.on_first(rival.mkdir)
        seconds, _ = timed(group, lambda: raw(group, rival, own, small))
        group.on_first(lambda: shutil.rmtree(rival))
        return seconds

    if number % 2:
        writing = write()
    saving, saved = timed(group, lambda: box.save(state, TrainingProgress(step=0)))
    if number % 2 == 0:
        writing = write()
    group.on_first(os.sync)
    plain = [timed_step(step) for _ in range(5)]
    group.maximum([0])
    started = time.perf_counter()
    box.begin(state, TrainingProgress(step=1))
    stall = time.perf_counter() - started
    beside: list[float] = []
    end: Saved | Failed | None = None
    while group.maximum([int((end := end or box.ended()) is None)])[0]:
        beside.append(timed_step(step))
    if not isinstance(end, Saved):
        raise SystemExit(f"the asynchronous checkpoint failed: {end}")
    lost = sum(beside) - len(beside) * statistics.median(plain)
    return {
        "bytes": saved.bytes,
        "raw_s": writing,
        "sync_s": saving,
        "stall_s": stall,
        "async_s": end.seconds,
        "sync_over_raw": saving / writing,
        "async_stall_over_sync": stall / saving,
        "async_cost_over_sync": (stall + lost) / saving,
    }


def timed_step(step: Callable[[], None]) -> float:
    """Seconds of one training step."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def rank(number: int, world: int, at: Path, mebibytes: int, repeats: int) -> None:
    """One rank of a measurement; rank 0 leaves the figures."""
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{at}/store", rank=number, world_size=world)
    group = join("gloo")
    state, step = training(mebibytes)
    step()
    box = Checkpoints(at, group, 0, 0)
    box.save(state, TrainingProgress(step=0))
    repeat(group, box, state, step, at, 0)  # the first plans, and makes the buffers
    results = [repeat(group, box, state, step, at, n) for n in range(1, repeats + 1)]
    if number == 0:
        (at / "results.json").write_text(json.dumps(results))
    box.close()
    group.close()


def measure(world: int, folder: Path | None, mebibytes: int, repeats: int) -> list[dict[str, float]]:
    """The repeats with this many ranks."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="ones-checkpoint-") as name:
        at = Path(name)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank, args=(n, world, at, mebibytes, repeats)) for n in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        results: list[dict[str, float]] = json.loads((at / "results.json").read_text())
        return results


def main() -> None:
    """Measure and print medians, with the least and the most of the repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mebibytes", type=int, default=300, help="size of model and optimizer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="write there (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    arguments = parser.parse_args()
    by_ranks: dict[str, Any] = {}
    for world in arguments.ranks:
        results = measure(world, arguments.folder, arguments.mebibytes, arguments.repeats)
        by_ranks[str(world)] = {
            key: {"median": statistics.median(v), "least": min(v), "most": max(v)}
            for key in results[0]
            for v in [[result[key] for result in results]]
        }
        print(f"{world} ranks, {results[0]['bytes'] / 2**20:.0f} MiB, {len(results)} repeats: median (least to most)")
        for key, figure in by_ranks[str(world)].items():
            if key != "bytes":
                print(f"  {key:22} {figure['median']:.3f} ({figure['least']:.3f} to {figure['most']:.3f})")
    worst = {
        key: max(figures[key]["median"] for figures in by_ranks.values())
        for key in ("sync_over_raw", "async_stall_over_sync", "async_cost_over_sync")
    }
    print(json.dumps(worst))
    if arguments.json:
        options = {"mebibytes": arguments.mebibytes, "repeats": arguments.repeats}
        arguments.json.write_text(json.dumps(worst | options | {"ranks": by_ranks}, indent=1))


if __name__ == "__main__":
    main()
