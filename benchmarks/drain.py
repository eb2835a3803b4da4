"""From an order to drain to the last rank idle, in steps beyond the checkpoint itself.

    python benchmarks/drain.py --drains 20 --json drain.json

Trains tests/wrapper/train.py under ones-run, and again and again orders a drain, as the companion does: the order's
file, then the signal. Each is called off by a newer order. The time from the order to the report of its checkpoint,
less what the checkpoint took, over the length of a step (aim: at most 2). With --silent no signal is sent.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from ones_wrapper.protocol import LOOK_SIGNAL, Checkpoint, Order, Throughput, decode_report, reports_name
from tests.wrapper.runs import Run, write_order


def answer(job_dir: Path, number: int) -> tuple[float, Checkpoint]:
    """When the checkpoint of order `number` was reported, and the report."""
    path = job_dir / reports_name(0)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                _, when, report = decode_report(line)
                if isinstance(report, Checkpoint) and report.order == number:
                    return when, report
        time.sleep(0.01)
    raise SystemExit(f"order {number} was not answered within 30 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--silent", action="store_true", help="send no signal: the ranks find the order by themselves")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    steps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ones-drain-") as folder:
        job_dir = Path(folder)
        run = Run(job_dir, "--epochs", "100000", "--step-ms", str(args.step_ms), ranks=args.ranks, ONES_TRACE="")
        run.wait_for(Throughput)
        for number in range(1, 2 * args.drains, 2):
            time.sleep(0.7 + 0.013 * number % 0.1)
            step_s = median(t.seconds * t.batch / t.samples for t in run.of(Throughput)[-5:])
            ordered = time.time()
            write_order(job_dir, Order(number, 0, drain=True))
            if not args.silent:
                run.signal(signal.Signals[f"SIG{LOOK_SIGNAL}"])
            when, report = answer(job_dir, number)
            steps.append((when - ordered - report.seconds) / step_s)
            write_order(job_dir, Order(number + 1, 0))
            print(f"drain {len(steps)}/{args.drains}: {steps[-1]:.2f} steps and the checkpoint", file=sys.stderr)
        run.process.kill()
        run.process.wait()
    found = {
        "steps_beyond_checkpoint": round(median(steps), 3),
        "least": round(min(steps), 3),
        "most": round(max(steps), 3),
        "drains": args.drains,
        "ranks": args.ranks,
        "step_ms": args.step_ms,
    }
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
