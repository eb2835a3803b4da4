"""Parts of a study, one contender on one seed each, and the directory that keeps their results.

Each result is a file, written atomically and named by a digest of everything that determines it. These are the plan,
the contender, the seed, the workload's files, the code and the numerical libraries. If any of them changes, the part is
run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.study.plan import Contender, StudyPlan
from slurm_ones.simulate.study.runs import OnProgress, RunProgress, StudyRun, attempt, run_all

FORMAT = 3
"""Version of the file format, part of every digest."""
REPORT_S = 1.0
"""Least seconds between two progress reports of a part."""
OURS = ("slurm_ones", "ones_db", "ones_wrapper")
LIBRARIES = ("numpy", "scipy")
"""Packages whose versions may change the last digits of a result."""


@dataclass(frozen=True)
class StudyPart:
    """Part of a study: one contender on one seed."""

    contender: Contender
    seed: int
    key: str
    """Digest of everything that determines the result, and the name of the result's file."""

    @property
    def label(self) -> str:
        """Name of the part shown to users."""
        return f"{self.contender.label}, seed {self.seed}"


def parts_of(plan: StudyPlan) -> list[StudyPart]:
    """Return all parts, in the order of `run_all`. Reads the workload's files and the code."""
    common = repr((FORMAT, replace(plan, contenders=(), seeds=()), _files(plan), _code(), _libraries()))
    found = []
    for contender, seed in plan.runs():
        # Only the first seed keeps what is drawn.
        own = repr((contender, _module(contender.policy), seed, seed == plan.seeds[0]))
        found.append(StudyPart(contender, seed, hashlib.sha256(f"{common}\n{own}".encode()).hexdigest()[:24]))
    return found


def _files(plan: StudyPlan) -> str:
    profiles, workload = plan.source.profiles, Path(plan.source.workload)
    found = [_digest(workload.parent, [workload])] if workload.is_file() else []
    if profiles is not None:
        found.append(_digest(profiles, [path for path in profiles.rglob("*") if path.is_file()]))
    return " ".join(found)


@lru_cache
def _code() -> str:
    """Return a digest of our packages' sources, since several checkouts may have the same version."""
    found: list[str] = []
    for package in OURS:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found.append(_digest(Path(folder), [p for p in Path(folder).rglob("*") if p.suffix in (".py", ".npz")]))
    return " ".join(found)


def _module(policy: str) -> str:
    name, colon, _ = policy.partition(":")
    spec = importlib.util.find_spec(name) if colon else None
    return _digest(Path(spec.origin).parent, [Path(spec.origin)]) if spec is not None and spec.origin else ""


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()!r} {len(data)}\n".encode() + data)
    return found.hexdigest()


def _libraries() -> list[str]:
    found = [platform.python_version()]
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


@dataclass(frozen=True)
class StudyFolder:
    """Directory of a study, visible to all its processes. Several studies may use it, one after the other."""

    root: Path

    @property
    def jobs(self) -> Path:
        """Directory of the jobs' scripts and logs."""
        return self.root / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context of sole use of the folder. Raises `BadInput` if it is in use, open to others, or not writable."""
        try:
            for folder in ("", "results", "progress", "sent", "jobs"):
                (self.root / folder).mkdir(mode=0o700, parents=not folder, exist_ok=True)
                _check_ours(self.root / folder)
            file = (self.root / ".lock").open("a")
        except OSError as error:
            raise BadInput(f"--directory: {self.root} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise BadInput(
                    f"--directory: another study works in {self.root}: wait for it, or name another"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def result(self, part: StudyPart) -> StudyRun | None:
        """Return a part's run; None if there is no readable result."""
        try:
            key, run = pickle.loads(self._result(part).read_bytes())
        except Exception:  # whatever a damaged pickle raises
            return None
        return run if key == part.key and isinstance(run, StudyRun) else None

    def put_result(self, part: StudyPart, run: StudyRun) -> None:
        """Store a part's result atomically."""
        _write(self._result(part), pickle.dumps((part.key, run)))

    def drop_result(self, part: StudyPart) -> None:
        """Remove a part's result, so that it is run again."""
        self._result(part).unlink(missing_ok=True)

    def done(self, plan: StudyPlan) -> dict[tuple[str, int], StudyRun]:
        """Return the runs that ended without error, by label and seed."""
        runs = [self.result(part) for part in parts_of(plan)]
        return {(run.label, run.seed): run for run in runs if run is not None and run.outcome is not None}

    def progress(self, part: StudyPart) -> RunProgress | None:
        """Return a part's last progress report; None if there is none."""
        try:
            found = json.loads((self.root / "progress" / f"{part.key}.json").read_text(encoding="utf-8"))
            return RunProgress(part.contender.label, part.seed, float(found[0]), int(found[1]), int(found[2]))
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def put_progress(self, part: StudyPart, progress: RunProgress) -> None:
        """Write a part's progress report; losing one is harmless."""
        words = json.dumps([float(progress.simulated_s), progress.ended, progress.jobs])
        with contextlib.suppress(OSError):
            _write(self.root / "progress" / f"{part.key}.json", words.encode())

    def sent(self) -> dict[tuple[str, int], str]:
        """Return the key of each part that was ever sent, by its jobs' name and its index in their array."""
        found = {}
        for path in sorted((self.root / "sent").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                keys = json.loads(path.read_text(encoding="utf-8"))
                found.update({(path.stem, index): str(key) for index, key in enumerate(keys)})
        return found

    def put_sent(self, name: str, parts: Sequence[StudyPart]) -> None:
        """Record, before sending, the name by which the next command finds these parts in Slurm."""
        _write(self.root / "sent" / f"{name}.json", json.dumps([part.key for part in parts]).encode())

    def drop_sent(self, name: str) -> None:
        """Forget parts recorded under this name, which were not sent."""
        (self.root / "sent" / f"{name}.json").unlink(missing_ok=True)

    def _result(self, part: StudyPart) -> Path:
        return self.root / "results" / f"{part.key}.pkl"


def run_kept(plan: StudyPlan, processes: int, folder: StudyFolder, on_progress: OnProgress) -> list[StudyRun]:
    """Run a plan like `run_all`, reusing results in the folder and adding new ones. Needs `folder.locked()`."""
    parts = {(part.contender.label, part.seed): part for part in parts_of(plan)}

    def keep(run: StudyRun) -> None:
        # What cannot be kept, as on a full disk, is only run again.
        with contextlib.suppress(OSError):
            folder.put_result(parts[run.label, run.seed], run)

    return run_all(plan, processes, on_progress, folder.done(plan), keep)


def run_part(plan: StudyPlan, key: str, root: Path) -> None:
    """Run a part here, in a Slurm job. Raises RuntimeError if plan, code or libraries are not the sender's."""
    part = {part.key: part for part in parts_of(plan)}.get(key)
    if part is None:
        raise RuntimeError(
            "this node has another version of slurm-ones, Python, numpy or scipy than this part's sender, "
            "or the workload's files or the code have changed since: start the study again"
        )
    folder = StudyFolder(root)
    if folder.result(part) is not None:
        return  # a job that Slurm started again after its end
    sent, latest = 0.0, RunProgress(part.contender.label, part.seed)

    def on_progress(progress: RunProgress) -> None:
        nonlocal sent, latest
        now, latest = time.monotonic(), progress
        if now - sent >= REPORT_S:
            sent = now
            folder.put_progress(part, progress)

    run = attempt(plan, part.contender, part.seed, on_progress)
    folder.put_progress(part, latest)
    folder.put_result(part, run)


def _check_ours(folder: Path) -> None:
    """Raise `BadInput` if others may write to the folder, as jobs and results are unpickled from it."""
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise BadInput(
            f"--directory: {folder} belongs to uid {info.st_uid}, who could decide what your jobs run: name another"
        )
    if info.st_mode & 0o022:
        raise BadInput(
            f"--directory: others may write {folder}, and so decide what your jobs run: see whether anybody has, and "
            "chmod go-w it, or name another"
        )


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically; concurrent readers find the old or the new content."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
