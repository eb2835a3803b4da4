"""Steps of a training: their measure, their cost, their result."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ones_wrapper as ones
from benchmarks.gpu.harness import Lab
from benchmarks.gpu.work import MIB, Training, Work, perceptron, reports
from ones_wrapper import testing
from ones_wrapper.devices import streams
from ones_wrapper.group import TorchGroup
from ones_wrapper.protocol import Throughput

BATCH = 8


def _metered(step_ms: float, steps: int) -> None:
    training = Training(steps)
    work, warm, began = Work(training.device), 4, 0.0
    for number, x in enumerate(training.steps()):
        if number == warm:
            streams.wait(training.device)
            began = time.perf_counter()
        work(step_ms)
        training.step(x.to(training.device, non_blocking=True))
    streams.wait(training.device)
    wall = BATCH * (steps - warm) / (time.perf_counter() - began)
    found = reports(Throughput)
    testing.put(sum(one.samples for one in found) / max(1e-9, sum(one.seconds for one in found)) / wall)


def meter(lab: Lab) -> None:
    every = lab.size("2", "0.05")
    (ratio,) = lab.ranks(_metered, lab.size(200, 5), lab.size(60, 60), ONES_REPORT_EVERY_S=every)
    lab.measure("throughput over the wall's", ratio, 0.97, 1.03)


def _unsynchronised(steps: int) -> None:
    training = Training(steps)
    x = torch.ones(BATCH, 64, device=training.device)
    strict = training.device.type == "cuda"
    for number, _ in enumerate(training.steps()):
        if strict and number in (10, steps - 10):
            torch.cuda.set_sync_debug_mode("error" if number == 10 else "default")
        training.step(x)
    testing.put(steps - 20)


def no_hidden_wait(lab: Lab) -> None:
    (steps,) = lab.ranks(_unsynchronised, 120, ONES_REPORT_EVERY_S="1000")
    lab.require("steps without a wait for the device", steps, 100)


def _cost(step_ms: float, steps: int, turns: int) -> None:
    training = Training(2 * turns * steps, width=512, layers=4)
    work, device = Work(training.device), training.device
    plain = DistributedDataParallel(perceptron(512, 4).to(device))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    loader, times = training.steps(), ([], [])
    for turn in range(2 * turns):
        ours = turn % 2
        streams.wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            x = next(loader).to(device, non_blocking=True) if ours else torch.ones(BATCH, 512, device=device)
            work(step_ms)
            if ours:
                training.step(x)
            else:
                optimizer.zero_grad()
                plain(x).square().mean().backward()
                optimizer.step()
        streams.wait(device)
        times[ours].append(time.perf_counter() - began)
    testing.put(statistics.median(times[1]) / statistics.median(times[0]))


def cost(lab: Lab) -> None:
    (ratio,) = lab.ranks(_cost, lab.size(10, 1), lab.size(300, 10), 3)
    lab.measure("time of a step over plain DDP's", ratio, most=1.03)


def _uneven(ms: float, steps: int) -> None:
    training = Training(steps, batch=60, uneven=True, max_local_batch=60)
    work, shares, slow = Work(training.device), [], 1 + 2 * training.job.rank
    for x in training.steps():
        shares.append(len(x))
        work(ms * len(x) * slow)
        training.step(x.to(training.device, non_blocking=True))
    streams.wait(training.device)
    testing.put((shares[0], shares[-2]))


def uneven(lab: Lab) -> None:
    (fast, slow) = lab.ranks(_uneven, lab.size(0.3, 0.2), 80, ranks=2, ONES_REPORT_EVERY_S="0.3")
    lab.require("first share of the slow rank", slow[0], 30)
    lab.measure("last share of the slow rank", slow[1], most=25)
    lab.measure("last share of the fast rank", fast[1], least=35)


def _trained(local: int, passes: int) -> None:
    training = Training(20, batch=13, max_local_batch=local, max_accumulation_steps=passes)
    for x in training.steps():
        training.step(x.to(training.device))
    if training.job.rank == 0:
        testing.put(torch.cat([one.detach().flatten().cpu() for one in training.model.parameters()]))


def same_gradients(lab: Lab, ranks: int) -> None:
    (alone,) = lab.ranks(_trained, 13, 1)
    (several,) = lab.ranks(_trained, 4, 4, ranks=ranks)
    lab.require("trained", bool((alone - torch.cat([p.flatten() for p in perceptron().parameters()])).any()))
    apart = float((alone - several).abs().max())
    lab.require("as one rank, within 1e-5", apart <= 1e-5)
    lab.measure("largest difference", apart)


def _noisy(noise: bool, layers: int, steps: int) -> None:
    training = Training(steps, width=1024, layers=layers, noise_scale=noise)
    run = training.job._run
    assert isinstance(run.group, TorchGroup)
    (exchange,), twice = run.loop.exchanges, replace(run.group, world=2)
    exchange._group = twice  # it takes the ways of several ranks, and its sums are those of one
    if run.loop.noise is not None:
        run.loop.noise._group = twice
    for x in training.steps():
        training.step(x.to(training.device))
    streams.wait(training.device)
    reserved = torch.cuda.memory_reserved() if training.device.type == "cuda" else 0
    testing.put((reserved, sum(one.numel() * 4 for one in training.model.parameters())))


def noise_memory(lab: Lab) -> None:
    (without, gradients), (with_it, _) = (
        lab.ranks(_noisy, noise, lab.size(24, 2), lab.size(100, 12))[0] for noise in (False, True)
    )
    lab.measure("MiB more with the noise scale", (with_it - without) / MIB, most=gradients / MIB + 64)


def _compiled(backend: str, sizes: tuple[int, ...]) -> None:
    counter = CompileCounterWithBackend(backend) if backend else None
    prepare = partial(torch.compile, backend=counter) if counter else lambda model: model
    training, losses = Training(4 * len(sizes), prepare=prepare), []
    (exchange,) = training.job._run.loop.exchanges
    for number, _ in enumerate(training.steps()):
        if number % 4 == 2:
            exchange.ranks_changed()
        x = torch.linspace(-1, 1, 64 * sizes[number // 4], device=training.device)
        losses.append(float(training.step(x.view(-1, 64)).detach()))
    testing.put((counter.frame_count if counter else 0, losses))


def compilations(lab: Lab) -> None:
    sizes = (32, 48, 40)
    ((count, losses),) = lab.ranks(_compiled, lab.size("inductor", "eager"), sizes)
    ((_, eager),) = lab.ranks(_compiled, "", sizes)
    apart = max(abs(one - other) for one, other in zip(losses, eager, strict=True))
    lab.require("at most two compilations", 0 < count <= 2)
    lab.measure("largest difference of losses from eager", apart, most=1e-4)


def _probed(declared: int, width: int, share: float) -> None:
    job = ones.init(batch=declared, max_batch=declared, max_local_batch=declared, epochs=1)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = job.ddp(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = job.register(model=model, optimizer=optimizer)
    device, most = job.device, 0
    if device.type == "cuda":  # a smaller card, so that it takes less time
        torch.cuda.set_per_process_memory_fraction(share)
        most = int(share * torch.cuda.get_device_properties(device).total_memory)

    def one_pass(samples: int) -> None:
        x = torch.ones(samples, 16, width, device=device)
        job.unwrap(model)(x).square().mean().backward()

    found = job.probe(one_pass)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loader = job.loader(TensorDataset(torch.zeros(30 * job.batch)))
    for _ in (x for _ in job.epochs() for x in loader):
        loss = model(torch.ones(found, 16, width, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    streams.wait(device)
    testing.put((found, torch.cuda.max_memory_allocated() / most if most else 0.0))


def probe(lab: Lab) -> None:
    ((found, used),) = lab.ranks(_probed, lab.size(8192, 4), lab.size(1024, 32), 0.25)
    lab.measure("samples a pass, of 8192", found, least=16, most=8191)
    lab.measure("share of the memory that 30 steps take", used, least=0.7)
