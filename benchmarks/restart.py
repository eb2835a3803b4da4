"""What a restart costs, by phase, from `ones-run` to the end of the first step, against importing torch once.

A small model in plain data parallel on CPUs, so that what is measured is the way there and not the training. Each
round imports torch in a bare Python, starts the job anew and again from its checkpoint, and runs the same training as
a script without the wrapper, in turn.

    python benchmarks/restart.py --json restart.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ones_wrapper.protocol import First, Hello, decode_report, reports_name

SCRIPT = """
import os, signal, time
import torch
from torch.utils.data import TensorDataset
import ones_wrapper as ones

job = ones.init(batch=16)
model = job.ddp(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = job.register(model=model, optimizer=optimizer)
loader = job.loader(TensorDataset(torch.randn(160, 256), torch.randint(10, (160,))))
for _ in job.epochs():
    for number, (x, y) in enumerate(loader):
        if number == 1:  # asking for this batch was the end of the first step
            if job.rank == 0:
                with open(os.environ["FIRST_STEP"], "w") as file:
                    file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGUSR1)  # a checkpoint for the next start
        if number == 4:
            break
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    break
"""
PLAIN = """
import os, time
import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.nn.functional.cross_entropy(model(torch.randn(16, 256)), torch.randint(10, (16,))).backward()
optimizer.step()
with open(os.environ["FIRST_STEP"], "w") as file:
    file.write(str(time.time()))
os._exit(0)
"""
"""The same, without the wrapper and alone: torch's optimizers import half as much again as torch itself."""

PHASES = ("launch", "import", "group", "load", "step")


def clean() -> dict[str, str]:
    """The environment without any job's variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | {"OMP_NUM_THREADS": "1"}


def bare_import() -> float:
    """Seconds of a Python that imports torch and ends."""
    started = time.time()
    subprocess.run([sys.executable, "-c", "import torch, os; os._exit(0)"], env=clean(), check=True)
    return time.time() - started


def plain(folder: Path) -> float:
    """Seconds from the start of a plain script to the end of its first step."""
    stamp = folder / "first"
    started = time.time()
    subprocess.run([sys.executable, "-c", PLAIN], env=clean() | {"FIRST_STEP": str(stamp)}, check=True)
    return float(stamp.read_text()) - started


def start(script: Path, ranks: int, job_dir: Path, restart: int) -> dict[str, float]:
    """Seconds of one start, in all and by phase."""
    stamp = job_dir.parent / "first"
    env = clean() | {"ONES_JOB_DIR": str(job_dir), "SLURM_RESTART_COUNT": str(restart), "FIRST_STEP": str(stamp)}
    started = time.time()
    command = [sys.executable, "-m", "ones_wrapper.launch", f"--gpus-per-node={ranks}", str(script)]
    subprocess.run(command, env=env, check=True)
    total = float(stamp.read_text()) - started
    lines = (job_dir / reports_name(restart)).read_bytes().splitlines()
    reports = [decode_report(line)[2] for line in lines]
    hello = next(report for report in reports if isinstance(report, Hello))
    first = [report.seconds for report in reports if isinstance(report, First)]
    if restart and not hello.checkpoint:
        raise SystemExit("the second start found no checkpoint of the first")
    known = hello.launch_s + hello.group_s + hello.load_s
    return {
        "total": total,
        "launch": hello.launch_s - hello.import_s,
        "import": hello.import_s,
        "group": hello.group_s,
        "load": hello.load_s,
        "step": first[0] if first else total - known,
    }


def main() -> None:
    """Measure in turn and print medians, spreads and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    args = parser.parse_args()
    imports: list[float] = []
    scripts: list[float] = []
    taken: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for number in range(-1, args.rounds):  # the first fills the page cache and is not counted
            seconds = [bare_import()]
            for ranks in args.ranks:
                job_dir = Path(folder) / f"job-{number}-{ranks}"
                for restart, kind in enumerate(("new", "again")):
                    phases = start(script, ranks, job_dir, restart)
                    if number >= 0:
                        taken.setdefault(f"{kind}_{ranks}", []).append(phases)
                seconds.append(bare_import())
            if number >= 0:
                imports.append(statistics.median(seconds))
                scripts.append(plain(Path(folder)))
    result: dict[str, object] = {"rounds": args.rounds, "cpus": os.cpu_count() or 0, "import_torch_s": imports}
    print(f"{args.rounds} rounds on {os.cpu_count()} CPUs; importing torch once: {statistics.median(imports):.2f} s")
    bare = statistics.median(one / alone for one, alone in zip(scripts, imports, strict=True))
    result["plain_script_over_import"] = bare
    print(f"plain    {statistics.median(scripts):.2f} s = {bare:.2f} × import, without the wrapper")
    for name, starts in taken.items():
        ratios = sorted(phases["total"] / alone for phases, alone in zip(starts, imports, strict=True))
        medians = {phase: statistics.median(phases[phase] for phases in starts) for phase in ("total", *PHASES)}
        ratio = statistics.median(ratios)
        result[name] = {"seconds": medians, "ratio": ratio, "ratios": ratios}
        parts = "  ".join(f"{phase} {medians[phase]:.2f}" for phase in PHASES)
        print(f"{name:8} {medians['total']:.2f} s = {ratio:.2f} × import ({ratios[0]:.2f}–{ratios[-1]:.2f}): {parts}")
    ratios = {name: starts["ratio"] for name, starts in result.items() if isinstance(starts, dict)}
    result["launch_to_first_step_over_import"] = max(ratios.values())
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
