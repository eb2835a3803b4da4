"""A training's state: saved while it changes, loaded, sent from one device to another."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from benchmarks.gpu.harness import Lab
from benchmarks.gpu.work import MIB, resident
from ones_wrapper import testing
from ones_wrapper.api import join
from ones_wrapper.checkpoint import Checkpoints, Saved, SavedState
from ones_wrapper.data.progress import TrainingProgress
from ones_wrapper.devices import streams
from ones_wrapper.files.checksums import checksum
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.transfer import Receiver, Sender, send, state_for

GIB = 1 << 30


def _resumed(at: int, capturable: bool) -> int | None:
    torch.use_deterministic_algorithms(True)
    job = ones.init(batch=16, epochs=1)
    device, cuda = job.device, job.device.type == "cuda"
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    model = job.ddp(torch.nn.Sequential(*layers))
    how = {"capturable": True} if capturable else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=cuda)
    optimizer, scaler = job.register(model=model, optimizer=optimizer, scaler=scaler)
    x = torch.randn(20 * 16, 64, generator=torch.Generator().manual_seed(1))
    loader = job.loader(TensorDataset(x), seed=3)
    for _ in job.epochs():
        for (inputs,) in loader:
            if job.progress.step == at and os.environ["SLURM_RESTART_COUNT"] == "0":
                job.checkpoint()
                return 1
            with torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16):
                loss = model(inputs.to(device)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    state = [*model.parameters(), *(one for each in optimizer.state.values() for one in each.values())]
    testing.put([one.detach().cpu() for one in state if isinstance(one, torch.Tensor)] + [scaler.get_scale()])
    return None


def resume(lab: Lab) -> None:
    for capturable in lab.size((False, True), (False,)):
        deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        (whole,) = lab.ranks(_resumed, -1, capturable, **deterministic)
        (again,) = lab.ranks(_resumed, 10, capturable, **deterministic)
        same = len(whole) > 8 and len(whole) == len(again)
        for one, other in zip(whole, again, strict=True):
            same &= torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        lab.require(f"equal bits, {'capturable' if capturable else 'fused'}", same)


class _Average:
    """A moving average of parameters, on the device."""

    def __init__(self, like: torch.Tensor) -> None:
        self.value = like.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def _state(elements: int, device: torch.device, value: float) -> tuple[SavedState, list[torch.Tensor]]:
    model = torch.nn.ParameterList(torch.full((elements // 4,), value, device=device) for _ in range(4))
    average = _Average(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SavedState(model, {"": optimizer}, {"average": average}), [*model, average.value]


def _ended(checkpoints: Checkpoints) -> Saved:
    while (end := checkpoints.ended()) is None:
        time.sleep(0.01)
    assert isinstance(end, Saved), end
    return end


def _behind(elements: int, folder: Path) -> None:
    group = join()
    device = group.device
    state, tensors = _state(elements, device, 1.0)
    checkpoints, same = Checkpoints(folder, group, 7, 0), True
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    for number in range(3):
        with torch.cuda.stream(side):  # a training need not be on the default stream
            for index, tensor in enumerate(tensors):
                tensor.detach().fill_(float(10 * number + index))
            checkpoints.begin(state, TrainingProgress(step=number))
            for tensor in tensors:
                tensor.detach().fill_(-1.0)
        _ended(checkpoints)
        loaded, values = _state(elements, device, 9.0)
        checkpoints.load(loaded)
        same &= all(bool((one == float(10 * number + index)).all()) for index, one in enumerate(values))
    checkpoints.close()
    testing.put(same)


def behind(lab: Lab) -> None:
    (same,) = lab.ranks(_behind, lab.size(64 << 20, 1 << 12), lab.folder)
    lab.require("the file has what was there as it began", same)


def _speed(elements: int, folder: Path) -> None:
    group = join()
    state, _ = _state(elements, group.device, 1.0)
    checkpoints = Checkpoints(folder, group, 7, 0)
    saved = checkpoints.save(state, TrainingProgress(step=0))
    before, stalls = resident(), []
    for number in (1, 2):
        checkpoints.begin(state, TrainingProgress(step=number))
        newest = _ended(checkpoints)
        stalls.append(newest.stall_s)
    copies = resident() - before
    began = time.perf_counter()
    for path in checkpoints._folder.path(newest.name).iterdir():
        checksum(path)
    summed = time.perf_counter() - began
    began = time.perf_counter()
    checkpoints.load(state)
    streams.wait(group.device)
    loaded = time.perf_counter() - began
    checkpoints.close()
    testing.put((saved.bytes, saved.seconds, stalls, summed, loaded, copies * MIB))


def speed(lab: Lab) -> None:
    """Sizes are no powers of two, to which torch's own page-locked memory is rounded up."""
    ((size, saved, (first, second), summed, loaded, copies),) = lab.ranks(
        _speed, lab.size(800_000_000, 1 << 12), lab.folder, limit_s=160.0
    )
    lab.measure("GB", size / 1e9)
    lab.measure("s to save", saved)
    lab.measure("s that the first one behind stalls", first)
    lab.measure("s that the second stalls", second, most=0.6)
    lab.measure("GB/s to read and sum its files", size / 1e9 / summed)
    lab.measure("GB/s to load", size / 1e9 / loaded, least=2.0)
    lab.measure("host memory over the state's", copies / size, most=1.2)


def _bytes(count: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device).remainder_(251).to(torch.uint8)


def _sent(secret: JobSecret, size: int, tensors: int, slow_s: float) -> None:
    group = join()
    own = {f"t{n}": _bytes(size // tensors, n + 7 * group.rank, group.device) for n in range(tensors)}
    receiver = Receiver(secret, "127.0.0.1") if group.rank else None
    ports, place = group.gather(receiver.port if receiver else 0), state_for("term-0-aa", 1, 1)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if receiver is None:
        sending = [
            threading.Thread(target=send, args=(Sender(("127.0.0.1", port), place, 0, 1), secret, own, {"x": 1}))
            for port in ports[1:]
        ]
        for one in sending:
            one.start()
        for one in sending:
            one.join()
        taken = time.perf_counter() - began
    else:
        received = receiver.receive(place, own, str)
        assert received is not None
        taken = received.seconds
        time.sleep(slow_s)
        received.answer()
        received.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    whole = all(torch.equal(own[f"t{n}"], _bytes(size // tensors, n, group.device)) for n in range(tensors))
    group.maximum([0])
    testing.put((whole, taken, grown))


def transfer(lab: Lab, gigabytes: float, slow_s: float, ranks: int = 2) -> None:
    """From the first rank to each other one; with `slow_s` they take so long to load what they got."""
    size = lab.size(int(gigabytes * GIB), MIB)
    found = lab.ranks(_sent, JobSecret.fresh(), size, 16, lab.size(slow_s, 0.1), ranks=ranks, limit_s=120.0)
    lab.require("all arrived", all(whole for whole, *_ in found))
    lab.measure("s until the sender knows", found[0][1], least=slow_s)
    lab.measure("GB/s to each", size / 1e9 / max(taken for _, taken, _ in found[1:]), least=None if slow_s else 1.5)
    lab.measure("MiB of the sender's host memory", found[0][2], most=1.3 * 2 * 64 * (ranks - 1) + 64)


def two_transfers(lab: Lab) -> None:
    transfer(lab, 4.0, 0.0)
    transfer(lab, 1.0, 25.0)
