"""Parts of a study: one policy on one seed each, run by any process that sees the study's directory.

A result is a file of its own, written atomically under a name that follows from all that determines it: the plan, the
policy, the seed, the workload's files, the code and the numerical libraries. So what is found under that name may be
taken, once its checksum holds, and whatever has changed is run anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.engines.outcome import JobOutcome, Outcome, Segment
from slurm_ones.simulate.study.plan import Plan, PolicySpec
from slurm_ones.simulate.study.runs import Run, RunProgress, attempt

FORMAT = 1
"""Of the files; another one is another name of every part."""
REPORT_S = 1.0
"""Seconds between two reports of how far a part has come."""
OURS = ("slurm_ones", "ones_db", "ones_wrapper")
LIBRARIES = ("numpy", "scipy")
"""Packages on which the last digits of a result depend."""

_OUTCOME = TypeAdapter(Outcome)


class BadResult(Exception):
    """A result that is not to be believed; the message says why."""


@dataclass(frozen=True)
class Part:
    """One policy on one seed."""

    policy: PolicySpec
    seed: int
    key: str
    """The name of its result: a digest of all that determines it."""

    @property
    def label(self) -> str:
        """How it is named to people."""
        return f"{self.policy.label}, seed {self.seed}"


def parts_of(plan: Plan) -> list[Part]:
    """All parts, in the order of `run_all`. Reads the workload's files and the code."""
    common = repr((FORMAT, replace(plan, policies=(), seeds=()), _files(plan), _code(), _libraries()))
    found = []
    for seed in plan.seeds:
        for policy in plan.policies:
            # Only the first seed keeps what is drawn.
            own = repr((policy, _module(policy.name), seed, seed == plan.seeds[0]))
            found.append(Part(policy, seed, hashlib.sha256(f"{common}\n{own}".encode()).hexdigest()[:24]))
    return found


def _files(plan: Plan) -> str:
    """A digest of what the workload is read from; empty for one that is generated."""
    profiles, workload = plan.source.profiles, Path(plan.source.workload)
    found = [_digest(workload.parent, [workload])] if workload.is_file() else []
    if profiles is not None:
        found.append(_digest(profiles, [path for path in profiles.rglob("*") if path.is_file()]))
    return " ".join(found)


@lru_cache
def _code() -> str:
    """A digest of our packages' sources: a version alone does not tell one checkout from the next."""
    found: list[str] = []
    for package in OURS:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found.append(_digest(Path(folder), [p for p in Path(folder).rglob("*") if p.suffix in (".py", ".npz")]))
    return " ".join(found)


def _module(policy: str) -> str:
    """A digest of the file that a policy of the user's own is in."""
    name, colon, _ = policy.partition(":")
    spec = importlib.util.find_spec(name) if colon else None
    if spec is None or not spec.origin:
        return ""
    return _digest(Path(spec.origin).parent, [Path(spec.origin)])


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    """Of files within a folder: their names there and what is in them."""
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
    """The directory of a study, which all its processes see. Several studies may use it, one after the other."""

    root: Path

    @property
    def jobs(self) -> Path:
        """Where the jobs' scripts and logs are."""
        return self.root / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else sends parts from here meanwhile. Raises `BadInput` where somebody does, where others may write
        here, or where it cannot be made."""
        try:
            for folder in ("", "results", "progress", "sent", "jobs"):
                (self.root / folder).mkdir(mode=0o700, parents=not folder, exist_ok=True)
                _check_ours(self.root / folder)
            handle = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadInput(f"--directory: {self.root} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise BadInput(
                    f"--directory: another study works in {self.root}: wait for it, or name another"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(handle)

    def result(self, part: Part) -> Run | None:
        """What became of a part; None where nothing did yet. Raises `BadResult`."""
        try:
            text = self._result(part.key).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadResult(f"{self._result(part.key)}: {error}") from None
        except OSError:  # there is none, or it cannot be read now; a good one is not to be thrown away for that
            return None
        digest, _, body = text.partition("\n")
        if digest != hashlib.sha256(body.encode()).hexdigest():
            raise BadResult(f"{self._result(part.key)}: its checksum does not hold")
        try:
            found = json.loads(body)
            if (found["key"], found["policy"], found["seed"]) != (part.key, part.policy.label, part.seed):
                raise BadResult(f"{self._result(part.key)}: it is another part's")
            outcome = None if found["outcome"] is None else _outcome(found["outcome"])
            return Run(part.policy.label, part.seed, outcome, str(found["error"]))
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise BadResult(f"{self._result(part.key)}: {type(error).__name__}: {error}") from None

    def put_result(self, part: Part, run: Run) -> None:
        """Store it durably, all of it or nothing."""
        outcome = None if run.outcome is None else asdict(run.outcome)
        found = {"key": part.key, "policy": run.policy, "seed": run.seed, "error": run.error, "outcome": outcome}
        body = json.dumps(found, default=_plain)
        _write(self._result(part.key), f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}", durable=True)

    def drop_result(self, part: Part) -> None:
        """It is to be run again."""
        self._result(part.key).unlink(missing_ok=True)

    def progress(self, part: Part) -> RunProgress | None:
        """How far a part has come, as it said last."""
        try:
            found = json.loads((self.root / "progress" / f"{part.key}.json").read_text(encoding="utf-8"))
            return RunProgress(part.policy.label, part.seed, float(found[0]), int(found[1]), int(found[2]))
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def put_progress(self, part: Part, progress: RunProgress) -> None:
        """Say how far it has come. What is lost of this is not missed."""
        words = json.dumps([progress.simulated_s, progress.ended, progress.jobs], default=_plain)
        with contextlib.suppress(OSError):
            _write(self.root / "progress" / f"{part.key}.json", words)

    def sent(self) -> dict[str, list[str]]:
        """The parts that were ever sent, by the name that their jobs have, in the order of the tasks."""
        found = {}
        for path in sorted((self.root / "sent").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found[path.stem] = [str(key) for key in json.loads(path.read_text(encoding="utf-8"))]
        return found

    def put_sent(self, name: str, parts: Sequence[Part]) -> None:
        """Written before they are sent: whoever goes on with the study finds them in Slurm by that name."""
        _write(self.root / "sent" / f"{name}.json", json.dumps([part.key for part in parts]), durable=True)

    def drop_sent(self, name: str) -> None:
        """They were not sent."""
        (self.root / "sent" / f"{name}.json").unlink(missing_ok=True)

    def _result(self, key: str) -> Path:
        return self.root / "results" / f"{key}.json"


def run_part(plan: Plan, key: str, root: Path) -> None:
    """One part in this process: the job of a study. Raises RuntimeError where this is not what was asked for."""
    part = {part.key: part for part in parts_of(plan)}.get(key)
    if part is None:
        raise RuntimeError(
            "this node has another version of slurm-ones, Python, numpy or scipy than the machine that sent this part, "
            "or the workload's files or the code have changed since: start the study again"
        )
    folder = StudyFolder(root)
    with contextlib.suppress(BadResult):
        if folder.result(part) is not None:
            return  # a job that Slurm started again after its end
    sent, latest = 0.0, RunProgress(part.policy.label, part.seed)

    def on_progress(progress: RunProgress) -> None:
        nonlocal sent, latest
        now, latest = time.monotonic(), progress
        if now - sent >= REPORT_S:
            sent = now
            folder.put_progress(part, progress)

    run = attempt(plan, part.policy, part.seed, on_progress)
    folder.put_progress(part, latest)
    folder.put_result(part, run)


def _check_ours(folder: Path) -> None:
    """Raises `BadInput` for a folder that others may write: jobs are pickled there, and results are believed."""
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise BadInput(
            f"--directory: {folder} belongs to uid {info.st_uid}, who could decide what your jobs run: name another"
        )
    if info.st_mode & 0o022:
        raise BadInput(
            f"--directory: others may write {folder}, and so decide what your jobs run: chmod go-w it, if nobody has, "
            "or name another"
        )


def _outcome(found: Mapping[str, Any]) -> Outcome:
    """Checked by its types, and built of the very numbers that were written: 1 and 1.0 differ in JSON."""
    _OUTCOME.validate_python(found)
    return Outcome(
        **{
            **found,
            "jobs": tuple(JobOutcome(**job) for job in found["jobs"]),
            "segments": tuple(Segment(**segment) for segment in found["segments"]),
            "decision_s": tuple(found["decision_s"]),
            "goodput": tuple((at, value) for at, value in found["goodput"]),
            "notes": tuple(found["notes"]),
        }
    )


def _plain(value: Any) -> Any:
    """A number of numpy's as Python has it."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _write(path: Path, text: str, *, durable: bool = False) -> None:
    """The whole file or none; whoever reads it meanwhile finds the old one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
