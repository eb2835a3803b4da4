"""Profiles: measurements of applications on real GPUs, in the layout of Pollux's simulator.

Each application has a folder with `placements.csv`, `scalability.csv` and `validation-<batch>.csv`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
from scipy.spatial import QhullError

from ones_wrapper.protocol.choices import listed
from slurm_ones.policy.contract import Floats
from slurm_ones.simulate import BadInput as BadInput
from slurm_ones.simulate.training.application import Application, Submission
from slurm_ones.simulate.workloads.trace import bad, number, table

MAX_LOCAL = {"yolov3": 8}
"""Largest local batch of each application that cannot use its profile's largest."""
FIXED_BATCH = {"ncf": 32768}
"""Batch of each application for which the profiles' authors allow only one batch."""
MOST_GPUS = {"ncf": 1}
"""Largest number of GPUs of applications for which the profiles' authors set a limit."""
PASSES_ALONE = 2
"""Fewest passes in a step on one GPU, if the batch is above the base batch. Pollux needs two passes to measure the
gradient noise."""
RESIZE_S = {"ncf": 15.0, "deepspeech2": 25.0, "cifar10": 50.0, "yolov3": 80.0, "bert": 120.0, "imagenet": 250.0}
"""Seconds that a resize of each application took on real machines (Sia, SOSP 2023)."""
PARAMETERS = {"ncf": 32e6, "deepspeech2": 38e6, "cifar10": 11e6, "yolov3": 62e6, "bert": 110e6, "imagenet": 26e6}
"""Published number of parameters of each application's model."""
FALLING = {"deepspeech2"}
"""Applications whose metric is better if it is lower."""
MAX_NODES = 16
_PLACEMENT = re.compile(r"[1-9]{1,100}")
_BATCH = re.compile(r"[1-9][0-9]{0,8}")


def read_table(path: Path, columns: Sequence[str], text: Sequence[str] = ()) -> list[dict[str, str | float]]:
    """Return the rows of a CSV file. Columns in `text` hold text; all others must hold finite numbers, negative only in
    `metric`.

    Raises `BadInput`.
    """
    rows = table(path, columns)
    return [{name: _value(path, line, name, row[name].strip(), name in text) for name in columns} for line, row in rows]


def _value(path: Path, line: int, column: str, given: str, is_text: bool) -> str | float:
    if is_text and not given:
        bad(path, line, f"column {column}: empty", "correct or remove that line")
    value = given if is_text else number(path, line, f"column {column}", given)
    if isinstance(value, float) and value < 0 and column != "metric":
        bad(path, line, f"column {column}: {given!r:.40} is negative", "correct or remove that line")
    return value


@dataclass(frozen=True)
class MeasuredSpeed:
    """Step times from a profile.

    At a measured placement they are interpolated over the local batch. At other placements they are interpolated over
    nodes, GPUs and local batch. Outside the measured range the nearest measurement is used.
    """

    placements: Mapping[tuple[int, ...], Floats]
    """Rows (local batch, step, sync) of each measured placement, by its smallest rotation."""
    points: Floats
    """(P, 3) nodes, GPUs and local batch of each measurement."""
    values: Floats
    """(P, 2) seconds of a step and of its gradient exchange (sync) at each of the `points`."""

    def step(self, nodes: int, gpus: int, local: Floats) -> tuple[Floats, Floats]:
        return self.placed(_packed(nodes, gpus, max(max(key) for key in self.placements)), local)

    def placed(self, placement: tuple[int, ...], local: Floats) -> tuple[Floats, Floats]:
        rows = self.placements.get(smallest_rotation(placement))
        if rows is not None:
            return np.interp(local, rows[:, 0], rows[:, 1]), np.interp(local, rows[:, 0], rows[:, 2])
        nodes = min(len(placement), MAX_NODES)
        local = np.clip(local, self.points[:, 2].min(), self.points[:, 2].max())
        wanted = np.stack([np.full(len(local), nodes), np.full(len(local), sum(placement)), local], axis=1)
        found = self.inside(wanted)
        outside = ~np.isfinite(found[:, 0])
        if outside.any():
            found[outside] = self.nearest(wanted[outside] / self.scale)
        return found[:, 0], found[:, 1]

    def enough(self) -> bool:
        """Return True if there are enough measurements to interpolate between nodes, GPUs and local batches."""
        try:
            return self.inside is not None
        except (QhullError, ValueError):
            return False

    @cached_property
    def inside(self) -> LinearNDInterpolator:
        """Interpolator from (nodes, GPUs, local batch) to (step, sync); NaN outside the measured range."""
        return LinearNDInterpolator(self.points, self.values)

    @cached_property
    def nearest(self) -> NearestNDInterpolator:
        """Function from (nodes, GPUs, local batch) / `scale` to (step, sync) of the nearest measurement."""
        return NearestNDInterpolator(self.points / self.scale, self.values)

    @cached_property
    def scale(self) -> Floats:
        """(3,) largest measured values of nodes, GPUs and local batch."""
        result: Floats = self.points.max(axis=0)
        return result


def smallest_rotation(placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest rotation of a placement, which stands for all its rotations."""
    return min(placement[i:] + placement[:i] for i in range(len(placement)))


def _packed(nodes: int, gpus: int, per_node: int) -> tuple[int, ...]:
    """Return GPUs on each node: one on each, and all further GPUs on the first nodes."""
    counts = [1] * nodes
    left = gpus - nodes
    for i in range(nodes):
        more = min(left, per_node - 1)
        counts[i] += more
        left -= more
    return tuple(counts)


def read_profile(folder: Path) -> Application:
    """Return the application whose measurements are in a folder. Raises `BadInput`."""
    path = folder / "placements.csv"
    rows: dict[tuple[int, ...], list[tuple[float, float, float]]] = defaultdict(list)
    points: dict[tuple[int, int, float], list[tuple[float, float]]] = defaultdict(list)
    for line, row in enumerate(
        read_table(path, ("placement", "local_bsz", "step_time", "sync_time"), text=("placement",)), 2
    ):
        digits = str(row["placement"])
        if not _PLACEMENT.fullmatch(digits):
            raise BadInput(f"{path}: line {line}: column placement: {digits!r:.40} is not GPUs per node as digits")
        key = smallest_rotation(tuple(int(digit) for digit in digits))
        found = (float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
        if found[1] <= 0 or found[0] < 1:
            raise BadInput(f"{path}: line {line}: local_bsz {found[0]:g} and step_time {found[1]:g} must be above 0")
        rows[key].append(found)
        points[len(key), sum(key), found[0]].append(found[1:])
    if (1,) not in rows or len(rows[(1,)]) < 2:
        raise BadInput(f"{path}: too few points: placement 1 needs two local batches at least")
    scale = folder / "scalability.csv"
    if scale.exists():
        names = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for row in read_table(scale, names):
            at = (int(row["num_nodes"]), int(row["num_replicas"]), float(row["local_bsz"]))
            points[at].append((float(row["step_time"]), float(row["sync_time"])))
    means = np.array([np.mean(found, axis=0) for found in points.values()])
    speed = MeasuredSpeed({key: _merged(found) for key, found in rows.items()}, np.array(list(points), float), means)
    if not speed.enough():
        raise BadInput(f"{path}: too few points: several nodes, GPUs and local batches must have been measured")
    batches, progress, metric, sqr, var = _validation(folder)
    fixed = FIXED_BATCH.get(folder.name, 0)
    local = MAX_LOCAL.get(folder.name, int(max(found[0] for found in rows[(1,)])))
    return Application(
        name=folder.name,
        speed=speed,
        base_batch=batches[0],
        min_batch=fixed or batches[0],
        max_batch=fixed or batches[-1],
        max_local_batch=local,
        max_gpus=MOST_GPUS.get(folder.name, max(point[1] for point in points)),
        passes_alone=PASSES_ALONE,
        ends=progress.min(axis=1) * batches[0],
        batches=np.array(batches),
        sqr=sqr,
        var=var,
        metric=-metric if folder.name in FALLING else metric,
        resize_s=RESIZE_S.get(folder.name, 30.0),
        parameters=PARAMETERS.get(folder.name, 25e6),
    )


def _merged(rows: Sequence[tuple[float, float, float]]) -> Floats:
    table = np.array(rows)
    locals_, at = np.unique(table[:, 0], return_inverse=True)
    sums = np.zeros((len(locals_), 2))
    np.add.at(sums, at.ravel(), table[:, 1:])
    return np.column_stack([locals_, sums / np.bincount(at.ravel())[:, None]])


def _validation(folder: Path) -> tuple[list[int], Floats, Floats, Floats, Floats]:
    """Return the batches (B,), then four arrays (epochs, B): progress, metric, grad_sqr and grad_var.

    Progress is in steps of the base batch.
    """
    files = {}
    for path in folder.glob("validation-*.csv"):
        size = path.stem.partition("-")[2]
        if not _BATCH.fullmatch(size):
            raise BadInput(f"{path}: {size!r} in its name is not a batch")
        files[int(size)] = path
    if not files:
        raise BadInput(f"{folder}: no validation-BATCH.csv")
    names = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
    tables = {size: read_table(files[size], names) for size in sorted(files)}
    epochs = min(len(table) for table in tables.values())
    if epochs < 1:
        raise BadInput(f"{files[min(files)]}: too few points: no epoch")
    stacked = np.array([[[float(row[name]) for name in names] for row in t[:epochs]] for t in tables.values()])
    by_name = stacked.transpose(2, 1, 0)
    progress = by_name[0]
    if (np.diff(progress.min(axis=1)) <= 0).any() or progress[0].min() <= 0:
        raise BadInput(f"{folder}: progress does not rise from epoch to epoch")
    return sorted(files), progress, by_name[2], by_name[3], by_name[4]


def read_profiles(folder: Path) -> dict[str, Application]:
    """Return the applications of all profiles in a folder, by name; raises `BadInput`."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such directory of profiles")
    found = {path.name: read_profile(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if not found:
        raise BadInput(f"{folder}: no application's profile in it")
    return found


COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True)
class Workload:
    """Submissions in order of time, and the applications that they name."""

    name: str
    submissions: tuple[Submission, ...]
    applications: Mapping[str, Application]


def read_workload(path: Path, applications: Mapping[str, Application]) -> Workload:
    """Return the workload in a CSV file. Raises `BadInput` with file, line and column."""
    submissions: list[Submission] = []
    names: set[str] = set()
    for line, row in enumerate(read_table(path, COLUMNS, text=("name", "application")), 2):
        name, application = str(row["name"]), str(row["application"])
        where = f"{path}: line {line}: column"
        if name in names:
            raise BadInput(f"{where} name: {name!r:.60} is there twice")
        if application not in applications:
            known = listed(sorted(applications), application)
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
    """Raise `BadInput` if a rigid job requests more GPUs than the cluster has."""
    for s in workload.submissions:
        if not s.elastic and s.gpus > gpus:
            raise BadInput(f"{workload.name}: job {s.name} asks for {s.gpus} GPUs, the cluster has {gpus}")
