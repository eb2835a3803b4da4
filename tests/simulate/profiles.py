"""Made-up profiles in the common layout, small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

EPOCHS = 4
ITERATIONS = 100
"""Steps of the base batch in an epoch."""


def write_profile(
    folder: Path,
    *,
    placements: Mapping[str, float] | None = None,
    batches: Sequence[int] = (64, 256),
    noise: float = 1e9,
) -> Path:
    """A profile of EPOCHS epochs whose step takes `placements[digits]` seconds and 0.01 s per 16 samples of local
    batch, a tenth of it exchange. With its large `noise` a sample is worth as much at any batch."""
    folder.mkdir(parents=True)
    steps = placements or {"1": 1.0, "2": 1.0, "4": 1.0, "44": 1.5, "4444": 2.0}
    lines = ["placement,local_bsz,step_time,sync_time"]
    for digits, seconds in steps.items():
        for local in (16, 256):
            step = seconds + 0.01 * local / 16
            lines.append(f"{digits},{local},{step},{step / 10}")
    (folder / "placements.csv").write_text("\n".join(lines) + "\n")
    for batch in batches:
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in range(1, EPOCHS + 1):
            rows.append(f"{ITERATIONS * epoch},{ITERATIONS * epoch * batches[0] // batch},{epoch / 10},1.0,{noise}")
        (folder / f"validation-{batch}.csv").write_text("\n".join(rows) + "\n")
    return folder


def write_workload(path: Path, rows: Sequence[str]) -> Path:
    """A workload of these lines, `name,time,application,num_replicas,batch_size` each."""
    path.write_text("\n".join(["name,time,application,num_replicas,batch_size", *rows]) + "\n")
    return path
