"""What of the gradient exchange backward hides, by the options of `job.ddp`, and pipelines that delay weight gradients.

    python benchmarks/systems/overlap.py --picture docs/img/overlap.svg

Two ranks on this machine's processors, over gloo. Each option's step times are medians; a profile (torch.profiler) of
one step on rank 0 says how much of the time in which an exchange was under way backward was, too. The picture shows two
such profiles. On GPUs the times are others, since there the exchange takes no processor from backward.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import ones_wrapper as ones
from ones_wrapper import testing

WIDTH, LAYERS, BATCH, STEPS, WARM = 768, 8, 128, 24, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "one_bucket": {"bucket_cap_mb": 1000},
    "default": {},
    "bucket_5_mb": {"bucket_cap_mb": 5},
    "bucket_1_mb": {"bucket_cap_mb": 1},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
}
"""Of DistributedDataParallel."""

KINDS = {
    "gloo:all_reduce": "exchange",
    "autograd::engine::evaluate_function": "backward",
    "Optimizer.step": "optimizer",
}


class Span(NamedTuple):
    """A time of one step, in milliseconds since the step began."""

    kind: str
    start: float
    stop: float


def train(options: dict[str, Any]) -> int | None:
    """Puts the median step time in seconds, and the spans of the last step."""
    job = ones.init(batch=BATCH, epochs=1, noise_scale=False)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
    model = job.ddp(torch.nn.Sequential(*layers), **options)
    optimizer = job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(1)))
    loader = job.loader(data)
    times: list[float] = []
    spans: list[Span] = []

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in job.epochs():
        for (x,) in loader:
            began = time.perf_counter()
            if len(times) == STEPS - 1:
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    step(x)
                spans = spans_of(seen)
            else:
                step(x)
            times.append(time.perf_counter() - began)
    testing.put((median(times[WARM : STEPS - 1]), spans))
    return None


def spans_of(seen: profile) -> list[Span]:
    """What the profile knows of one step."""
    events = list(seen.events() or [])
    first = min(event.time_range.start for event in events)
    spans = [
        Span(kind, (event.time_range.start - first) / 1000, (event.time_range.end - first) / 1000)
        for event in events
        for name, kind in KINDS.items()
        if event.name.startswith(name)
    ]
    forward = [event for event in events if event.name == "aten::linear"]
    ends = ((event.time_range.start - first, event.time_range.end - first) for event in forward)
    return spans + [Span("forward", start / 1000, stop / 1000) for start, stop in ends]


def covered(spans: list[Span], kind: str) -> list[tuple[float, float]]:
    """The times in which something of a kind was under way, joined."""
    found: list[tuple[float, float]] = []
    for span in sorted((span for span in spans if span.kind == kind), key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.stop)
        else:
            found.append((span.start, span.stop))
    return found


def hidden(spans: list[Span]) -> float:
    """The share of the exchange's time in which backward was under way."""
    exchange, backward = covered(spans, "exchange"), covered(spans, "backward")
    if not exchange or not backward:
        return 0.0
    begin, end = backward[0][0], backward[-1][1]
    both = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in exchange)
    return both / sum(stop - start for start, stop in exchange)


def pipeline(schedule: str) -> int | None:
    """Puts the median step time of a pipeline of four stages on two ranks, with eight microbatches."""
    from torch.distributed.pipelining import PipelineStage, schedules

    job = ones.init(batch=2, epochs=1)
    parts = [torch.nn.Sequential(*[torch.nn.Linear(512, 512), torch.nn.Tanh()] * 2) for _ in range(2)]
    device = torch.device("cpu")
    stages = [PipelineStage(part, job.rank + 2 * i, 4, device) for i, part in enumerate(parts)]
    made = getattr(schedules, schedule)(stages, n_microbatches=8, loss_fn=lambda out, target: out.square().mean())
    x = torch.randn(256, 512)
    times = []
    for _ in range(10):
        dist.barrier()
        began = time.perf_counter()
        if job.rank == 0:
            made.step(x)
        else:
            made.step(target=x)
        times.append(time.perf_counter() - began)
    testing.put(median(times[3:]))
    return None


def measure() -> dict[str, float]:
    """Step times over those of the default options, and shares of the exchange that backward hides."""
    puts = {name: testing.run(partial(train, options), ranks=2) for name, options in OPTIONS.items()}
    steps = {name: max(put.value[0] for put in each) for name, each in puts.items()}
    found = {f"step_{name}": seconds / steps["default"] for name, seconds in steps.items()}
    found |= {f"hidden_{name}": hidden(each[0].value[1]) for name, each in puts.items()}
    pipelines = {
        name: max(put.value for put in testing.run(partial(pipeline, name), ranks=2))
        for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
    }
    found["zero_bubble_over_1f1b"] = pipelines["ScheduleInterleavedZeroBubble"] / pipelines["ScheduleInterleaved1F1B"]
    return found


COLOURS = {"forward": "#7f9fbf", "backward": "#4c72b0", "exchange": "#dd8452", "optimizer": "#55a868"}


def draw(path: Path) -> None:
    """A step's profile with one bucket, and with buckets of 5 MB."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "overlap"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 3.6), layout="constrained")
    for axis, (name, title) in zip(
        axes, {"one_bucket": "one bucket", "bucket_5_mb": "buckets of 5 MB"}.items(), strict=True
    ):
        spans = testing.run(partial(train, OPTIONS[name]), ranks=2)[0].value[1]
        for row, kind in enumerate(reversed(COLOURS)):
            bars = [(start, stop - start) for start, stop in covered(spans, kind)]
            axis.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[kind])
        axis.set_yticks(range(len(COLOURS)), list(reversed(COLOURS)))
        axis.set_title(f"{title}: backward hides {hidden(spans):.0%} of the exchange", fontsize=10)
    axes[-1].set_xlabel("milliseconds of one step on rank 0 of 2, on CPUs over gloo (torch.profiler)")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, required=True)
    draw(parser.parse_args().picture)
