"""What a node's ranks cost to start: one import and a fork each, against one import each.

A resize restarts every rank, so this is a part of its price. Both ways run the same small script, which makes
a model and an optimizer and takes a step, so that what torch imports late counts too.

    python benchmarks/restart_import.py --ranks 4 --json restart_import.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import torch, torch.distributed.checkpoint, ones_wrapper.api
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


def forked(script: Path, ranks: int, env: dict[str, str]) -> None:
    """The node launcher: one import, then forks."""
    place = {"ONES_NODES": "1", "ONES_GPUS_PER_NODE": str(ranks), "ONES_JOB_DIR": str(script.parent)}
    subprocess.run([sys.executable, "-m", "ones_wrapper.launch.node", str(script)], env=env | place, check=True)


def separate(script: Path, ranks: int, env: dict[str, str]) -> None:
    """A Python a rank, as `srun` with one task a rank starts them."""
    started = [subprocess.Popen([sys.executable, str(script)], env=env) for _ in range(ranks)]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit("a rank failed")


def measure(start: Callable[[], None]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of the children) of one start."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    start()
    wall, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure both ways in turn and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    args = parser.parse_args()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | {"OMP_NUM_THREADS": "1"}
    taken: dict[str, list[tuple[float, float]]] = {"forked": [], "separate": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        separate(script, 1, env)  # fills the page cache for both
        for _ in range(args.repeats):
            taken["forked"].append(measure(lambda: forked(script, args.ranks, env)))
            taken["separate"].append(measure(lambda: separate(script, args.ranks, env)))
    result: dict[str, float] = {"ranks": args.ranks, "repeats": args.repeats, "cpus": os.cpu_count() or 0}
    for name, times in taken.items():
        result[f"{name}_wall_s"] = statistics.median(wall for wall, _ in times)
        result[f"{name}_cpu_s"] = statistics.median(cpu for _, cpu in times)
    for kind in ("wall", "cpu"):
        result[f"{kind}_ratio"] = result[f"separate_{kind}_s"] / result[f"forked_{kind}_s"]
    print(f"{args.ranks} ranks on {result['cpus']:.0f} CPUs, medians of {args.repeats}:")
    for name in taken:
        print(f"  {name:9} {result[f'{name}_wall_s']:6.2f} s wall {result[f'{name}_cpu_s']:6.2f} s CPU")
    print(f"  ratio     {result['wall_ratio']:6.2f}        {result['cpu_ratio']:6.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
