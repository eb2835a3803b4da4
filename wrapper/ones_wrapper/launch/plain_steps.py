"""Count of the optimizer steps of a script that has not called `ones.init`, reported as steps per second.

Such a script declares no samples, batch or sizes. So there is no spec, and the job keeps its size. torch's public hook
for all optimizers counts the steps. Of several optimizers only the first that steps is counted. If the script calls
`ones.init` later, it sends another hello, which replaces the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ones_wrapper.files.job_io import ReportWriter
from ones_wrapper.process.block import own_block
from ones_wrapper.protocol import MAX_TEXT, Hello, Throughput

_stop: Callable[[], None] | None = None


def start(env: Mapping[str, str] = os.environ) -> None:
    """Begin to count on rank 0; not in a block, where the leader writes the reports."""
    global _stop
    if env.get("RANK") != "0" or not env.get("ONES_JOB_DIR") or own_block(env) is not None:
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # torch.compile must not trace the hook.
    counted = torch.compiler.disable(PlainSteps(env))  # type: ignore[no-untyped-call]
    _stop = register_optimizer_step_post_hook(counted).remove


def stop() -> None:
    """Stop counting, because the script reports by itself."""
    global _stop
    if _stop is not None:
        _stop()
    _stop = None


class PlainSteps:
    """Optimizer hook that counts and reports steps. The hello is sent with the first step, so that a script without
    steps sends no report."""

    def __init__(self, env: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._env, self._clock = env, clock
        self._process = os.getpid()
        self._every_s = float(env.get("ONES_REPORT_EVERY_S") or 2.0)
        self._writer: ReportWriter | None = None
        self._counted = self._step = 0
        self._since = 0.0

    def __call__(self, optimizer: object, args: Any, kwargs: Any) -> None:
        """Count an optimizer's step. Steps in processes that the script forks do not count."""
        if os.getpid() != self._process:
            return
        now = self._clock()
        if self._writer is None:
            env = self._env
            self._writer = ReportWriter(Path(env["ONES_JOB_DIR"]), int(env.get("SLURM_RESTART_COUNT") or 0))
            self._counted, self._step, self._since = id(optimizer), 1, now
            self._writer.send(self._hello())
        elif id(optimizer) == self._counted:
            self._step += 1
            if now - self._since >= self._every_s:
                self._writer.send(Throughput(0, self._step, 0, 0, now - self._since, 0, 1.0))
                self._since = now

    def _hello(self) -> Hello:
        nodes, world = int(self._env.get("GROUP_WORLD_SIZE") or 1), int(self._env.get("WORLD_SIZE") or 1)
        unknown = ("batch", "base_batch", "max_batch", "dataset", "epochs", "epoch", "cursor")
        zeros: dict[str, Any] = dict.fromkeys(unknown, 0)
        return Hello(
            nodes=nodes,
            gpus_per_node=world // nodes,
            world=world,
            lr_factor=1.0,
            step=self._step,
            checkpoint="",
            **zeros,
            attempt=int(self._env.get("ONES_ATTEMPT") or 0),
            directory=self._env["ONES_JOB_DIR"][:MAX_TEXT],
            spool=self._env.get("ONES_SPOOL", "")[:MAX_TEXT],
        )
