"""A study on this machine that goes on where it was stopped: what became of each run is a file, as in `parts`."""

from __future__ import annotations

import contextlib

from slurm_ones.simulate.study.parts import BadResult, StudyFolder, parts_of
from slurm_ones.simulate.study.plan import Plan
from slurm_ones.simulate.study.runs import OnProgress, Run, run_all


def kept(plan: Plan, folder: StudyFolder) -> dict[tuple[str, int], Run]:
    """The runs that are done, by policy and seed; not those that failed, nor files that cannot be believed."""
    found = {}
    for part in parts_of(plan):
        with contextlib.suppress(BadResult):
            run = folder.result(part)
            if run is not None and run.outcome is not None:
                found[run.policy, run.seed] = run
    return found


def run_kept(plan: Plan, processes: int, folder: StudyFolder, on_progress: OnProgress) -> list[Run]:
    """As `run_all`, but for the runs that are done; each is kept as it ends. To be called within `folder.locked()`."""
    parts = {(part.policy.label, part.seed): part for part in parts_of(plan)}

    def keep(run: Run) -> None:
        # What cannot be kept, as on a full disk, is only run again.
        with contextlib.suppress(OSError):
            folder.put_result(parts[run.policy, run.seed], run)

    return run_all(plan, processes, on_progress, kept(plan, folder), keep)
