"""Submit a function as an elastic job, as submitit's executors do with ordinary jobs, and run it in the job's ranks.

Needs cloudpickle, as submitit does. The function's folder has the pickled call, its batch script, log and result. Only
its owner may write there, since its files are executed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ones_wrapper.files.small_files import replace_small
from ones_wrapper.launch.slurm import run_slurm
from ones_wrapper.protocol.optin import parse_comment

CALL, RESULT, SCRIPT = "call.pickle", "result.pickle", "job.sbatch"
LOOK_S = 2.0
LATE_S = 30.0
"""Seconds after the job's end in which the result must appear here. A shared file system may show it late."""
LINES = """#!/bin/bash
#SBATCH --comment={comment}
#SBATCH --requeue --open-mode=append --signal=B:USR2@120
exec {python} -m ones_wrapper.launch -m ones_wrapper.launch.submit {folder}
"""


@dataclass(frozen=True)
class SubmittedFunction:
    """A function that was submitted."""

    job_id: int
    folder: Path

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the job has ended, and return the result of the function on rank 0. Raises RuntimeError if the job
        ended without a result, and TimeoutError after `timeout_s` seconds."""
        import cloudpickle

        begun = time.monotonic()
        ended: float | None = None
        while not (self.folder / RESULT).exists():
            now = time.monotonic()
            ended = None if self._queued() else ended or now
            if ended is not None and now - ended > LATE_S:
                raise RuntimeError(f"job {self.job_id} ended without a result; its log is in {self.folder}")
            if timeout_s is not None and now - begun > timeout_s:
                raise TimeoutError(f"job {self.job_id} has not ended within {timeout_s:.0f} s")
            time.sleep(LOOK_S)
        return cloudpickle.loads((self.folder / RESULT).read_bytes())

    def _queued(self) -> bool:
        found, why = run_slurm(["squeue", "-h", f"--jobs={self.job_id}"])
        return bool(found.strip()) or (bool(why) and "Invalid job id" not in why)


def submit(
    fn: Callable[..., Any],
    /,
    *args: Any,
    gpus: str,
    batch: str = "",
    folder: str | os.PathLike[str] = "ones-submitted",
    options: Mapping[str, object] | None = None,
    **kwargs: Any,
) -> SubmittedFunction:
    """Submit `fn(*args, **kwargs)`, a training with `ones.init`, as an elastic job:

        job = ones_wrapper.submit(train, lr=0.1, gpus="1-8", batch="32-256", options={"time": "4:00:00"})
        job.result()

    `gpus` and `batch` are written as in a job's comment. The job begins with the smallest number of GPUs, on one node,
    unless sbatch's `options` say otherwise. Each rank calls the function, and calls it again after a resize. Modules
    that the function imports must be found from the working directory. Raises ValueError for an invalid range, and
    RuntimeError with sbatch's message.
    """
    import cloudpickle

    comment = f"ones: gpus={gpus}" + (f" batch={batch}" if batch else "")
    optin = parse_comment(comment)
    assert optin is not None and optin.gpus is not None
    place = Path(folder).absolute() / f"{getattr(fn, '__name__', 'function')}-{secrets.token_hex(4)}"
    place.mkdir(parents=True, mode=0o700)
    (place / CALL).write_bytes(cloudpickle.dumps((fn, args, kwargs)))
    words = {"comment": comment, "python": sys.executable, "folder": place}
    script = LINES.format(**{name: shlex.quote(str(word)) for name, word in words.items()})
    (place / SCRIPT).write_text(script)
    asked = {"job-name": place.name.rpartition("-")[0], "output": place / "%j.out", "nodes": 1}
    asked |= {"gres": f"gpu:{optin.gpus[0]}", **(options or {})}
    command = ["sbatch", "--parsable", *(f"--{name}={value}" for name, value in asked.items()), str(place / SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"sbatch refuses it: {done.stderr.strip()}")
    return SubmittedFunction(int(done.stdout.strip().partition(";")[0]), place)


def main() -> None:
    """Call the function in the folder that the command line names; rank 0 writes the result there."""
    import cloudpickle

    place = Path(sys.argv[1])
    fn, args, kwargs = cloudpickle.loads((place / CALL).read_bytes())
    found = fn(*args, **kwargs)
    if os.environ.get("RANK", "0") == "0":
        replace_small(place / RESULT, cloudpickle.dumps(found))


if __name__ == "__main__":
    main()
