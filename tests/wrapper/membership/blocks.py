"""Starts blocks of one job on this machine, orders memberships, and reads what they reported."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

from ones_wrapper.protocol import Bye, First, Hello, Membership, Order, Report, Throughput, reports_name
from tests.cluster.paths import REPOSITORY
from tests.wrapper import reference
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.runs import TIMEOUT_S, TRAIN, assert_exactly_once, reports_in, samples_by_step, write_order
from tests.wrapper.strategies.script import HURRY, OUT, PACE_MS

ARRAY = 4711
SAMPLES = 97

R = TypeVar("R", bound=Report)


class Job:
    """One job of blocks in a directory."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        epochs: int = 24,
        script: Path = TRAIN,
        apart: Path | None = None,
        nodes: int = 64,
        **env: str,
    ) -> None:
        """Steps take some time until `hurry`. With `apart`, tasks are as on so many nodes: each node's memory is
        emulated by a folder in there."""
        self.apart, self._nodes = apart, nodes
        self._script = script
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._hurry = directory / "hurry"
        self.epochs = epochs
        out = ("--out", str(directory / "out.json"))
        self.arguments = ("--epochs", str(epochs), "--hurry", str(self._hurry), "--step-ms", "20", *arguments, *out)
        self._env = env
        self._number = 0
        self.blocks: list[ForkedBlock] = []

    def hurry(self) -> None:
        self._hurry.touch()

    def environment(self, task: int, restart: int) -> dict[str, str]:
        return {
            "ONES_JOB_DIR": str(self.directory), "ONES_REPORT_EVERY_S": "0.2",
            "ONES_TRACE": str(self.directory / "trace-{restart}-{rank}.jsonl"), "SLURM_ARRAY_JOB_ID": str(ARRAY),
            "SLURM_ARRAY_TASK_ID": str(task), "SLURM_RESTART_COUNT": str(restart),
        }  # fmt: skip

    def start(self, task: int, ranks: int = 1, restart: int = 0) -> ForkedBlock:
        env = {"ONES_BLOCKS": "1", **self.environment(task, restart), **self._env}
        if self.apart is not None:
            memory = self.apart / f"node-{task % self._nodes}"
            memory.mkdir(parents=True, exist_ok=True)
            env["ONES_MEMORY"] = str(memory)
        block = ForkedBlock(self._script, self.arguments, ranks, env, self.directory / f"log-{len(self.blocks)}")
        self.blocks.append(block)
        return block

    def order(self, *tasks: int, batch: int | None = None) -> int:
        """Order that these tasks train together; the order's number."""
        self._number += 1
        write_order(self.directory, Order(self._number, self.terms() - 1, batch=batch, blocks=tuple(sorted(tasks))))
        return self._number

    def terms(self) -> int:
        """One more than the newest term that left reports: one whose leader was lost at once leaves none."""
        numbers = (int(path.stem.rpartition("-")[2]) for path in self.directory.glob("reports-*.jsonl"))
        return 1 + max(numbers, default=-1)

    def runs(self) -> list[list[Report]]:
        return [reports_in(self.directory / reports_name(term)) for term in range(self.terms())]

    def of(self, kind: type[R]) -> list[R]:
        """Reports of one kind, over all terms."""
        return [report for run in self.runs() for report in run if isinstance(report, kind)]

    def wait(self, kind: type[R], condition: Callable[[R], bool] = lambda report: True) -> R:
        """Wait for a report, in whichever term; fails when all blocks ended without it."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            ended = all(block.ended() for block in self.blocks)
            for report in self.of(kind):
                if condition(report):
                    return report
            if ended:
                break
            time.sleep(0.02)
        stacks = [block.stacks() for block in self.blocks if not block.ended()]
        self.kill()
        raise AssertionError(f"no such {kind.kind}\n{self.of(Membership)}\n{self.errors()}\n{stacks}")

    def wait_for(self, *tasks: int, after: int = -1) -> Membership:
        """These tasks train together, in a generation after `after`."""
        return self.wait(
            Membership, lambda report: sorted(report.blocks) == sorted(tasks) and report.generation > after
        )

    def begin(self, *tasks: int, ranks: int = 1) -> Membership:
        """The first of these tasks trains alone, then all together; the others have so many ranks."""
        self.start(tasks[0])
        self.wait(First)
        self.order(*tasks)
        for task in tasks[1:]:
            self.start(task, ranks)
        return self.wait_for(*tasks)

    def finish(self, *numbers: int) -> None:
        """Hurry to the end. All blocks reach it, or those with these numbers."""
        self.hurry()
        blocks = [self.blocks[number] for number in numbers] or self.blocks
        assert [block.end() for block in blocks] == [0] * len(blocks), self.errors()

    def move(self) -> None:
        """Task 0 trains alone, then with task 1, which then trains alone to the end."""
        try:
            self.begin(0, 1)
            self.order(1)
            self.wait_for(1)
            self.finish()
        finally:
            self.kill()

    def kill(self) -> None:
        for block in self.blocks:
            block.kill()

    def end(self) -> list[int]:
        """Wait for the end of all blocks; their exit codes."""
        return [block.end() for block in self.blocks]

    def errors(self) -> str:
        return "\n".join(f"--- block {index}\n{block.errors[-4000:]}" for index, block in enumerate(self.blocks))

    def assert_as_undisturbed(self) -> None:
        """Each sample was used once, and the parameters are those of a run that nobody disturbed."""
        assert_exactly_once(self.directory, self.epochs, SAMPLES)
        torch.testing.assert_close(self.parameters(), self.undisturbed(self.epochs), rtol=1e-9, atol=1e-12)

    def parameters(self) -> torch.Tensor:
        return torch.tensor(json.loads((self.directory / "out.json").read_text())["parameters"], dtype=torch.float64)

    def undisturbed(self, epochs: int, samples: int = SAMPLES, gamma: float = 0.8) -> torch.Tensor:
        """What a run of one process without a wrapper ends with, at the batches that were reported."""
        return reference.train(epochs, samples, gamma, self.batches(samples))

    def batches(self, samples: int) -> dict[int, int]:
        """Global batch from each step on at which it changed, by the reports. A leader that was killed at once had no
        time to report its last change, which the traces show."""
        runs = self.runs()
        changes, batch, used = reference.batches_by_step(runs), 0, Counter[int]()
        for (step, epoch, term), count in sorted(samples_by_step(self.directory).items()):
            batch = changes.get(step, batch)
            used[epoch] += count
            if count > batch or (count < batch and used[epoch] < samples):
                reported = [report.step for report in runs[term] if isinstance(report, (Hello, Throughput, Bye))]
                assert step >= max(reported, default=0), f"step {step}: {count} samples, batch {batch} reported"
                changes[step] = batch = count
        return changes


def scripted(folder: Path, script: ModuleType, pace_ms: int, *arguments: str, **env: str) -> Job:
    """A job of a strategy's script, which its environment paces."""
    its = {OUT: str(folder / "out.json"), HURRY: str(folder / "hurry"), PACE_MS: str(pace_ms)}
    path = Path(str(script.__file__))
    return Job(folder, *arguments, script=path, PYTHONPATH=str(REPOSITORY), **its, **env)


def hellos(job: Job) -> list[int]:
    """The steps at which terms began."""
    return [hello.step for hello in job.of(Hello)]
