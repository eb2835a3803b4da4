"""Submissions in order of time: the workloads of published studies, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.profiles import read_table

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True)
class Workload:
    """Submissions in order of time, and what their applications truly are."""

    name: str
    submissions: tuple[Submission, ...]
    applications: Mapping[str, Application]


def read_workload(path: Path, applications: Mapping[str, Application]) -> Workload:
    """The workload of a CSV file; raises `BadInput` with file, line and column."""
    submissions: list[Submission] = []
    names: set[str] = set()
    for line, row in enumerate(read_table(path, COLUMNS, text=("name", "application")), 2):
        name, application = str(row["name"]), str(row["application"])
        where = f"{path}: line {line}, column"
        if name in names:
            raise BadInput(f"{where} name: {name!r:.60} is there twice")
        if application not in applications:
            known = ", ".join(sorted(applications))
            raise BadInput(f"{where} application: {application!r:.60} has no profile; there are {known}")
        for column in ("num_replicas", "batch_size"):
            if float(row[column]) < 1 or float(row[column]) != int(float(row[column])):
                raise BadInput(f"{where} {column}: {row[column]:g} is not a whole number above 0")
        names.add(name)
        submissions.append(
            Submission(
                name, float(row["time"]), application, int(float(row["num_replicas"])), int(float(row["batch_size"]))
            )
        )
    if not submissions:
        raise BadInput(f"{path}: no job in it")
    return Workload(path.stem, tuple(sorted(submissions, key=lambda s: s.time)), applications)


def check_fits(workload: Workload, gpus: int) -> None:
    """Raises `BadInput` if a job of the workload fits the cluster at no size."""
    for s in workload.submissions:
        if not s.elastic and s.gpus > gpus:
            raise BadInput(f"{workload.name}: job {s.name} asks for {s.gpus} GPUs, the cluster has {gpus}")
