"""Runs SCRIPT ARGS as it is, and sends signals to a rank after given steps: `ONES_INTERRUPT="7:TERM 11:KILL"`.

Each comes once, whatever steps are made again: its file in the job's directory says that it came. The last rank gets
them, so that rank 0 can write what it has to say. `ONES_SLOW="0.5:FILE"` makes each step half a second longer until
there is a file of that name.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from ones_wrapper.run.run import Run


def main() -> None:
    """Interrupt the run of the script that the arguments name."""
    wanted = [entry.split(":") for entry in os.environ.get("ONES_INTERRUPT", "").split()]
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    pause, _, hurry = os.environ.get("ONES_SLOW", "0:").partition(":")
    commit = Run.commit

    def interrupted(run: Run, total: int) -> None:
        if hurry and not Path(hurry).exists():
            time.sleep(float(pause))
        commit(run, total)
        for step, name in wanted:
            mark = Path(os.environ["ONES_JOB_DIR"], f"came-{restart}-{step}")
            if run.progress.step == int(step) and run.rank == run.group.world - 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])

    Run.commit = interrupted  # type: ignore[method-assign]  # a test's only way in, and no script's
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
