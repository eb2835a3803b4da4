"""A script as users write it, through ten resizes and batch changes, beside the same script undisturbed.

    python benchmarks/real_scripts.py --json real_scripts.json

The script is `examples/gpt.py`: AdamW, warm-up and cosine by step, bfloat16, clipping, loader workers, a CSV file that
stays open. It runs under `ones-run` on this machine, at 1 to 4 ranks. Each resize is what a companion does: an order
for a batch while the job trains, an order to drain, a checkpoint, SIGTERM as from a requeue, a start at another size.
Besides: the frameworks' examples, and six public scripts by the recipes of docs/recipes.md (`--recipes`: these alone).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import recipes
from benchmarks.frameworks import FRAMEWORKS
from ones_wrapper.process.exit_codes import STOP_CODE
from ones_wrapper.protocol import Batch, Bye, Checkpoint, Hello, Order, Throughput, decode_spec
from tests.wrapper import runs

GPT = Path(__file__).parents[1] / "wrapper/examples/gpt.py"
STARTS = ((1, 16), (2, 32), (4, 48), (2, 16), (3, 24), (1, 8), (4, 64), (2, 32), (3, 48), (1, 16), (2, 24))
"""Ranks and global batch of each start: ten resizes. The batch changes while the job trains, in mid-start."""
TIMEOUT_S = 600.0


@dataclass
class Outcome:
    """What a job left."""

    rate: float
    """The script's own learning rate after the last step."""
    loss: float
    """Validation loss after the last epoch."""
    steps: int
    rows: list[int]
    """Steps in the CSV file."""
    output: str
    """All that its starts printed."""

    @property
    def lost(self) -> int:
        """Steps that are not in the CSV file."""
        return len(set(range(self.steps)) - set(self.rows))


def undisturbed(folder: Path, arguments: tuple[str, ...]) -> runs.Run:
    """Start the script with one rank at its own batch."""
    folder.mkdir(parents=True)
    return runs.Run(folder / "job", *arguments, "--log", str(folder / "log.csv"), script=GPT)


def disturbed(folder: Path, arguments: tuple[str, ...]) -> list[runs.Run]:
    """The script through all starts."""
    job, done = folder / "job", []
    job.mkdir(parents=True)
    for restart, (ranks, batch) in enumerate(STARTS):
        log = ("--log", str(folder / "log.csv"))
        run = runs.Run(job, *arguments, *log, script=GPT, ranks=ranks, restart=restart)
        done.append(run)
        hello = run.wait_for(Hello)
        spec = decode_spec((job / "spec.json").read_bytes())
        total = spec.dataset * spec.epochs

        def come(share: float, run: runs.Run = run, total: int = total, dataset: int = spec.dataset) -> None:
            run.wait_for(Throughput, lambda seen: seen.epoch * dataset + seen.cursor >= share * total)

        come((restart + 0.4) / len(STARTS))
        runs.write_order(job, Order(2 * restart + 1, restart, batch=batch))
        if batch != hello.batch:
            run.wait_for(Batch)
        if restart + 1 < len(STARTS):
            come((restart + 1) / len(STARTS))
            runs.write_order(job, Order(2 * restart + 2, restart, batch=batch, drain=True))
            run.wait_for(Checkpoint, lambda saved, order=2 * restart + 2: saved.order == order)
            run.signal(signal.SIGTERM)
            code = run.end()
            assert code == STOP_CODE, (code, run.errors)
        print(f"start {restart}: {hello.world} ranks, batch {hello.batch}, then {batch}", file=sys.stderr)
    return done


def outcome(folder: Path, starts: list[runs.Run]) -> Outcome:
    """Wait for the last start, and read what is there."""
    code = starts[-1].end()
    assert code == 0, (code, starts[-1].errors)
    last = starts[-1].of(Bye)[-1]
    validations = re.findall(r"validation loss (\S+), learning rate (\S+)", starts[-1].output)
    with (folder / "log.csv").open(newline="") as file:
        rows = [int(row[0]) for row in csv.reader(file) if len(row) == 6]
    output = "".join(run.output + run.errors for run in starts)
    (folder / "output").write_text(output)
    return Outcome(float(validations[-1][1]), float(validations[-1][0]), last.step, rows, output)


def traceback_lines(output: str) -> int:
    """Lines of tracebacks: their heads, places with the line of code below, and errors."""
    head = re.compile(
        r'Traceback \(most recent|^\s*File ".*", line \d+|^(\w+\.)*\w*(Error|Exception|Interrupt)\b|ignored in'
    )
    count, place = 0, False
    for line in output.splitlines():
        count += bool(head.search(line)) or (place and line.startswith("    "))
        place = 'File "' in line
    return count


def measure(folder: Path, epochs: int) -> dict[str, object]:
    """The figures, from both runs side by side."""
    arguments = ("--epochs", str(epochs))
    plain = undisturbed(folder / "plain", arguments)
    resized = outcome(folder / "resized", disturbed(folder / "resized", arguments))
    quiet = outcome(folder / "plain", [plain])
    for name, one in (("undisturbed", quiet), ("resized", resized)):
        print(
            f"{name}: {one.steps} steps, rate {one.rate:.6g}, validation loss {one.loss:.4f}, "
            f"{len(one.rows)} rows of {one.steps}",
            file=sys.stderr,
        )
    return {
        "lr_end_error": abs(resized.rate / quiet.rate - 1),
        "traceback_lines": traceback_lines(resized.output),
        "log_lines_lost": resized.lost + quiet.lost,
        "loss_ratio": resized.loss / quiet.loss,
        "frameworks": {name: case(folder / name) for name, case in FRAMEWORKS.items()},
        "recipes": recipes.measured(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, outputs and checkpoints there")
    parser.add_argument("--recipes", action="store_true", help="the recipes alone")
    args = parser.parse_args()
    runs.TIMEOUT_S = TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="real-scripts-") as temporary:
        folder = args.keep or Path(temporary)
        found = {"recipes": recipes.measured()} if args.recipes else measure(folder, args.epochs)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
