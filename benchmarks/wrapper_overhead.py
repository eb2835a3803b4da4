"""What the wrapper costs in steady state: samples per second of one loop under `ones-run`, over those in plain DDP.

The same model, data and loop twice: with the wrapper as it is by default (reports, gradient noise scale, agreement on
flags, random numbers keyed by
sample and step, checkpoints due every ten minutes), and as its author would write it, with
DistributedDataParallel, DistributedSampler and DataLoader in processes that get torchrun's variables. Both run with 2
ranks over gloo and one thread a rank, in turn, several times. What counts is the time between steps after the first
ones, so neither start nor end is in it. The ratio of each pair of neighbours is taken, since machines drift, and their
median is the figure; neighbouring plain runs say how much of its spread is the machine's. The CPU seconds of rank 0
over the same steps are compared likewise: they tell of the wrapper's own work even on a busy machine, though not of
waiting.

    python benchmarks/wrapper_overhead.py --json wrapper_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 2
WARM_UP = 15
"""Steps that are not measured."""

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

how, width, batch, steps, warm_up, out, device = sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:8]
pace = float(sys.argv[8]) / 1000
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU(),
    torch.nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), torch.nn.BatchNorm2d(2 * width), torch.nn.ReLU(),
    torch.nn.Conv2d(2 * width, 4 * width, 3, padding=1, stride=2), torch.nn.BatchNorm2d(4 * width), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4 * width, 10),
)
samples = batch * (steps + 1)
images, labels = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))


class Flipped(Dataset):
    # Images that are flipped at random, so that fetching draws random numbers.

    def __len__(self):
        return len(labels)

    def __getitem__(self, index):
        return images[index].flip(2) if torch.rand(()) < 0.5 else images[index], labels[index]


data = Flipped()
times, work = [], []

if how == "ones":
    import ones_wrapper as ones

    job = ones.init(batch=batch, epochs=1, backend="gloo" if device == "cpu" else None)
    rank, place = job.rank, job.device
    model = job.ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = job.register(model=model, optimizer=optimizer)
    loader = job.loader(data)
    epochs = job.epochs()
else:
    place = torch.device(device if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(
        model.to(place), device_ids=None if device == "cpu" else [place]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler)
    epochs = range(1)

for epoch in epochs:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.to(place)), y.to(place))
        optimizer.zero_grad()
        time.sleep(pace)
        loss.backward()
        optimizer.step()
        if device != "cpu" and (len(times) in (warm_up, steps)):
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        work.append(time.process_time())
        if how == "ones":
            job.loss(loss)
if rank == 0:
    counted = steps - warm_up
    rate, cpu = batch * counted / (times[steps] - times[warm_up]), (work[steps] - work[warm_up]) / counted
    parameters = sum(p.numel() for p in model.parameters())
    Path(out).write_text(json.dumps({"rate": rate, "cpu_s": cpu, "parameters": parameters}))
if how != "ones":
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort the interpreter's end now and then (torch 2.13), and nothing of it is measured
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """Ours without what an allocation or another run says."""
    names = ("SLURM_", "ONES_", "PMI", "OMPI_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    return {k: v for k, v in os.environ.items() if not k.startswith(names)} | {"OMP_NUM_THREADS": "1"}


def under_ones(script: Path, arguments: list[str], ranks: int) -> None:
    """Start it with `ones-run`, in a new job's directory."""
    with tempfile.TemporaryDirectory() as job_dir:
        command = [sys.executable, "-m", "ones_wrapper.launch", f"--gpus-per-node={ranks}", str(script), *arguments]
        run = subprocess.run(command, env=environment() | {"ONES_JOB_DIR": job_dir}, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"the run under the wrapper failed:\n{run.stderr}")


def plain(script: Path, arguments: list[str], ranks: int) -> None:
    """Start one process a rank with the variables that torchrun sets."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate()[1] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("the plain run failed:\n" + "\n".join(errors))


def interval(values: list[float]) -> tuple[float, float]:
    """Least and greatest."""
    return min(values), max(values)


def main() -> None:
    """Measure both in turn, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="runs of each (6)")
    parser.add_argument("--steps", type=int, default=200, help=f"steps of a run, of which {WARM_UP} are not measured")
    parser.add_argument("--width", type=int, default=32, help="channels of the model's first layer (32)")
    parser.add_argument("--batch", type=int, default=32, help="global batch (32)")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--pace-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="sleep so long in each step, as a GPU would compute: emulated, for machines with no processor to spare",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"ones": [], "plain": []}
    cpu: dict[str, list[float]] = {"ones": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "script.py", Path(folder) / "out.json"
        script.write_text(SCRIPT)
        numbers = [args.width, args.batch, args.steps, WARM_UP]
        for number in range(args.rounds):
            # ABBA: what drifts evenly then favours neither.
            for how in ("ones", "plain") if number % 2 == 0 else ("plain", "ones"):
                arguments = [how, *map(str, numbers), str(out), args.device, str(args.pace_ms)]
                (under_ones if how == "ones" else plain)(script, arguments, args.ranks)
                found = json.loads(out.read_text())
                rates[how].append(found["rate"])
                cpu[how].append(found["cpu_s"])
            ones, other = rates["ones"][-1], rates["plain"][-1]
            more = cpu["ones"][-1] - cpu["plain"][-1]
            print(
                f"  {ones:8.1f} samples/s with the wrapper, {other:8.1f} plain: {ones / other:.4f}; "
                f"{1000 * more:+.2f} ms CPU a step",
                flush=True,
            )
    ratios = [one / other for one, other in zip(rates["ones"], rates["plain"], strict=True)]
    drift = [one / other for one, other in zip(rates["plain"][1:], rates["plain"], strict=False)]
    figures = {
        "throughput_ratio": statistics.median(ratios),
        "ratio_range": interval(ratios),
        "plain_over_plain_range": interval(drift) if drift else None,
        "cpu_ratio": statistics.median(one / other for one, other in zip(cpu["ones"], cpu["plain"], strict=True)),
        "ones_samples_per_s": statistics.median(rates["ones"]),
        "plain_samples_per_s": statistics.median(rates["plain"]),
        "plain_step_ms": 1000 * args.batch / statistics.median(rates["plain"]),
        "plain_cpu_ms": 1000 * statistics.median(cpu["plain"]),
        "rates": rates,
        "cpu_s": cpu,
        "parameters": found["parameters"],
        "ranks": args.ranks,
        "device": args.device,
        "emulated_pace_ms": args.pace_ms,
        "cpus": os.cpu_count(),
    }
    print(
        f"throughput under the wrapper over plain DDP: {figures['throughput_ratio']:.4f} (median of {args.rounds}; "
        f"{min(ratios):.4f} to {max(ratios):.4f}); CPU seconds {figures['cpu_ratio']:.4f}; a plain step takes "
        f"{figures['plain_step_ms']:.1f} ms, {figures['plain_cpu_ms']:.1f} ms of them CPU"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
