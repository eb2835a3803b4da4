"""How a run began: what its first report says."""

from __future__ import annotations

import os
import time

from ones_wrapper.checkpoint import Progress
from ones_wrapper.group import Group
from ones_wrapper.previous import Previous
from ones_wrapper.protocol import MAX_TEXT, Hello, Spec


class Beginning:
    """The times of a run's beginning, and its hello."""

    def __init__(self, started: float, before: Previous | None) -> None:
        """`started` is the Unix time of the script's first call; now, the process group is built."""
        env = os.environ
        launched = float(env.get("ONES_LAUNCHED") or started)
        self._queue_s = max(0.0, launched - before.time) if before else 0.0
        self._launch_s = max(0.0, started - launched)
        self._import_s = float(env.get("ONES_IMPORT_S") or 0.0)
        self._group_s = time.time() - started
        self._attempt = int(env.get("ONES_ATTEMPT") or 0)
        self._hello_at = 0.0

    def hello(
        self,
        group: Group,
        spec: Spec,
        progress: Progress,
        batch: int,
        lr_factor: float,
        load_s: float,
        loaded: str,
        note: str,
    ) -> Hello:
        """The report. `batch` and `lr_factor` are those in force; `loaded` the checkpoint, `note` what was odd
        about it, and `load_s` how long it took.
        """
        self._hello_at = time.monotonic()
        return Hello(
            nodes=group.nodes,
            gpus_per_node=group.gpus_per_node,
            world=group.world,
            batch=batch,
            lr_factor=lr_factor,
            base_batch=spec.base_batch,
            max_batch=spec.max_batch,
            dataset=spec.dataset,
            epochs=spec.epochs,
            epoch=progress.epoch,
            cursor=progress.cursor,
            step=progress.step,
            checkpoint=loaded,
            note=note[:MAX_TEXT],
            queue_s=self._queue_s,
            launch_s=self._launch_s,
            import_s=self._import_s,
            group_s=self._group_s,
            load_s=load_s,
            noise=progress.noise or None,
            progress=progress.useful,
            resizes=progress.resizes,
            attempt=self._attempt,
        )

    def since_hello_s(self) -> float:
        """Seconds since the hello."""
        return time.monotonic() - self._hello_at
