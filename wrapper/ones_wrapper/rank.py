"""Started once a rank, where an MPI process manager starts the ranks itself: finds its place and runs the script."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ones_wrapper import watch
from ones_wrapper.ahead import read_ahead
from ones_wrapper.codes import HUNG, USAGE_ERROR
from ones_wrapper.jobdir import leave_exit_code
from ones_wrapper.place import PlaceError, own_place
from ones_wrapper.script import leave, preload, run_script, take_signals


def main(argv: Sequence[str]) -> int:
    """Run `SCRIPT ARGS` in this rank."""
    script, *arguments = argv
    env = os.environ
    job_dir, restart = Path(env["ONES_JOB_DIR"]), int(env.get("SLURM_RESTART_COUNT") or 0)
    try:
        place = own_place(env)
    except PlaceError as error:
        print(f"ones-run: {error}", file=sys.stderr)
        leave_exit_code(job_dir, restart, 0, USAGE_ERROR)
        return USAGE_ERROR
    sys.path[0] = str(Path(script).resolve().parent)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(place.env())
    take_signals()

    def hung() -> None:
        print(f"ones-run: rank {place.rank} was at no step boundary for too long (ONES_HANG_S)", file=sys.stderr)
        faulthandler.dump_traceback()
        leave_exit_code(job_dir, restart, place.rank, HUNG)
        os._exit(HUNG)

    watch.watch_myself(watch.longest_s(env), hung)
    if place.local_rank == 0:
        read_ahead(job_dir)
    env["ONES_IMPORT_S"] = f"{preload(env):.3f}"
    code = run_script(script, arguments)
    if code:
        leave_exit_code(job_dir, restart, place.rank, code)
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
