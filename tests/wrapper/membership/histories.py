"""Random histories of one job of blocks: orders, deaths and signals in any mixture, each ending as an undisturbed run.

`python -m tests.wrapper.membership.histories --seeds 0-999 --log F` runs many, and goes on from the log if it is
started again. With `--terms` the model is sharded, so that each change begins a term; with `--apart` the tasks' nodes
have memory of their own, as far as a folder for each emulates that, and with `--copies N` shards have a second copy
there, made every N steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ones_wrapper.files.node_memory import COPY_STEPS
from ones_wrapper.membership.coming import MOST_S
from ones_wrapper.protocol import First, Membership
from tests.wrapper.membership.blocks import Job

TASKS = 4
SETTLE_S = 40.0
STUCK_S = SETTLE_S + MOST_S
"""A term waits so long for announced blocks, if the machine is slow."""
REVIVED = 2
"""How often a block is started at the end, where none is left that trains."""


class History:
    def __init__(self, directory: Path, seed: int, *arguments: str, apart: bool = False, copies: int = 0) -> None:
        """The script gets these arguments, too. With `apart`, tasks have nodes with memory of their own (emulated),
        and every `copies` steps a second copy of each shard there (0: none)."""
        self._random = random.Random(seed)
        passes = self._random.choice([(), ("--max-local-batch", "7", "--max-passes", "8")])
        workers = self._random.choice([(), (), ("--workers", "1")])
        # Some nodes may have several blocks.
        self.memory, nodes = directory.with_name("memory"), self._random.choice([4, 4, 3, 2]) if apart else 0
        self.job = Job(
            directory,
            *passes,
            *workers,
            *arguments,
            "--step-ms",
            "30",
            apart=self.memory if apart else None,
            nodes=nodes,
            **{COPY_STEPS: str(copies)},
        )
        self.said: list[str] = []
        self._running: dict[int, int] = {}
        """Which block each task runs as."""
        self._newest: dict[int, int] = {}
        """Number of each task's last block, ended or not."""
        self._ending: set[int] = set()
        """Tasks that were told to end, or lost a rank, and may still be at their end."""
        self._restarts: dict[int, int] = {}

    def run(self, actions: int) -> None:
        """Live through so many events, and end. Raises AssertionError."""
        job = self.job
        try:
            self._start(0)
            job.wait(First)
            for _ in range(actions):
                choices = [self._order, self._order, self._order, self._kill_block, self._kill_rank, self._tell_to_end]
                self._random.choice(choices)()
                self._revive()
            job.hurry()
            self._end_all()
            for _ in range(REVIVED):
                # The last event may have struck who trained, and its end have come too late for `_revive`.
                if self._over():
                    break
                self._start(self._random.randrange(TASKS))
                self._end_all()
            job.assert_as_undisturbed()
        finally:
            job.kill()

    def _over(self) -> bool:
        return (self.job.directory / "out.json").exists()

    def _end_all(self) -> None:
        """Wait for the end of all blocks, for as long as any of them makes steps."""
        seen, until = -1, 0.0
        for block in self.job.blocks:
            while not block.ended():
                if (used := sum(path.stat().st_size for path in self.job.directory.glob("trace-*"))) != seen:
                    seen, until = used, time.monotonic() + STUCK_S
                if time.monotonic() > until:
                    stacks = [one.stacks() for one in self.job.blocks if not one.ended()]
                    raise AssertionError("\n".join([f"no step within {STUCK_S:g} s", *stacks]))
                time.sleep(0.05)

    def _living(self) -> list[int]:
        self._running = {task: i for task, i in self._running.items() if not self.job.blocks[i].ended()}
        return sorted(self._running)

    def _start(self, task: int) -> None:
        restart = self._restarts.get(task, -1) + 1
        self._restarts[task] = restart
        self.job.start(task, ranks=self._random.choice([1, 1, 2]), restart=restart)
        self._running[task] = self._newest[task] = len(self.job.blocks) - 1
        self._ending.discard(task)

    def _order(self) -> None:
        wanted = sorted(self._random.sample(range(TASKS), self._random.randint(1, 3)))
        batch = self._random.choice([16, 24, 32])
        self.said.append(f"order {wanted} at {batch}")
        self.job.order(*wanted, batch=batch)
        before = {m.generation for m in self.job.of(Membership)}
        for task in set(wanted) - set(self._living()):
            self._start(task)
        if self._random.random() < 0.3:  # the next event comes in the middle of it
            time.sleep(self._random.random())
            return
        self._wait_for(wanted, max(before, default=-1))

    def _wait_for(self, wanted: list[int], after: int) -> None:
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            found = self.job.of(Membership)
            if found and sorted(found[-1].blocks) == wanted:
                return
            if self._over():
                self.said.append("its training had ended")
                return
            for task in set(wanted) - set(self._living()):
                # As a companion would, which sees that it has ended: it was struck, or it was leaving at the order.
                if task in self._ending or self.job.blocks[self._newest[task]].end() == 0:
                    self._start(task)
            time.sleep(0.02)
        stacks = [block.stacks() for block in self.job.blocks if not block.ended()]
        raise AssertionError(f"never {wanted} after {after}: {found}\n{stacks}\n{self.job.errors()}")

    def _victim(self) -> int | None:
        living = self._living()
        return self._random.choice(living) if living else None

    def _kill_block(self) -> None:
        task = self._victim()
        if task is not None:
            self.said.append(f"kill block {task}")
            self.job.blocks[self._running[task]].kill()

    def _kill_rank(self) -> None:
        task = self._victim()
        if task is not None and (ranks := self.job.blocks[self._running[task]].ranks()):
            self.said.append(f"kill a rank of block {task}")
            os.kill(self._random.choice(ranks), signal.SIGKILL)
            self._ending.add(task)

    def _tell_to_end(self) -> None:
        task = self._victim()
        if task is not None:
            self.said.append(f"tell block {task} to end")
            self.job.blocks[self._running[task]].signal(signal.SIGTERM)
            self._ending.add(task)

    def _revive(self) -> None:
        """Something always trains."""
        time.sleep(self._random.random())
        until = time.monotonic() + 0.5
        while self._ending.issuperset(living := self._living()) and living and time.monotonic() < until:
            time.sleep(0.02)
        if not self._living():
            task = self._random.randrange(TASKS)
            self.said.append(f"start block {task}")
            self._start(task)


def lived(seed: int, actions: int, *arguments: str, apart: bool = False, copies: int = 0) -> dict[str, Any]:
    """Live through one history. Its line of the log: a failed one's job stays in `directory`."""
    directory = Path(tempfile.mkdtemp(prefix=f"history-{seed}-"))
    history, began = History(directory / "job", seed, *arguments, apart=apart, copies=copies), time.monotonic()
    line: dict[str, Any] = {"seed": seed, "failure": ""}
    try:
        history.run(actions)
        shutil.rmtree(directory)
    except Exception:
        line |= {"failure": traceback.format_exc() + history.job.errors()[-6000:], "directory": str(directory)}
    return line | {"s": round(time.monotonic() - began, 1), "said": history.said}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the histories of the seeds that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0-9", help="first-last")
    parser.add_argument("--actions", type=int, default=6)
    parser.add_argument("--log", type=Path, default=os.devnull, help="gets a line a seed; its seeds are not run again")
    parser.add_argument("--terms", action="store_true", help="change by terms, from checkpoints")
    parser.add_argument("--apart", action="store_true", help="tasks have nodes with memory of their own (emulated)")
    parser.add_argument("--copies", type=int, default=0, help="steps between copies of shards in other nodes' memory")
    args = parser.parse_args(argv)
    os.environ.setdefault("RES_OPTIONS", "timeout:1")  # as in all tests: what is forked has this process's resolver
    first, _, last = args.seeds.partition("-")
    asked = range(int(first), int(last or first) + 1)
    with args.log.open("a+") as log:
        log.seek(0)
        lines = {line["seed"]: line for line in map(json.loads, log) if line["seed"] in asked}
        for seed in asked:
            if seed not in lines:
                sharded = ("--sharded",) if args.terms else ()
                line = lines[seed] = lived(seed, args.actions, *sharded, apart=args.apart, copies=args.copies)
                log.write(json.dumps(line) + "\n")
                log.flush()
                result = "FAILED" if line["failure"] else "ok"
                print(f"{len(lines)}/{len(asked)} {seed}: {result} in {line['s']} s: {'; '.join(line['said'])}")
                print(line["failure"], end="", flush=True)
    failed = [seed for seed, line in lines.items() if line["failure"]]
    print(f"failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
