"""Set-up of a job's directory at its start, with an earlier job's checkpoints if requested (`ones-run --resume-from
JOB`).

The earlier job's directory does not change: its undamaged checkpoints are linked, or copied, into the new directory.
Imports only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ones_wrapper.files.checksums import RESUMED_FROM, damage, sync
from ones_wrapper.files.claim import CLAIM, Claim, Holder, take_claim
from ones_wrapper.files.job_directory import LEFT, MEMORY, RESULT, TAKEN, checkpoints, newest_checkpoint
from ones_wrapper.files.job_io import SAVE, STOP
from ones_wrapper.files.job_lock import WAIT_S, holder, last_job
from ones_wrapper.files.places import leave_pointer, make_job_directory, make_root, own_job
from ones_wrapper.files.run_id import FILE as RUN_ID
from ones_wrapper.files.small_files import replace_small
from ones_wrapper.process.block import Block
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import LaunchError
from ones_wrapper.protocol import (
    CHECKPOINTS,
    FUSION,
    HOT,
    MANIFEST,
    MAX_POINTER,
    ORDERS,
    SPEC,
    ProtocolError,
    decode_pointer,
    directory_name,
    pointer_name,
)

OWNER = ".job"
"""File with the id of the job whose directory this is."""
_JOB = re.compile(r"([0-9]{1,15})(?:_[0-9]{1,9})?", re.ASCII)


def prepare_job_directory(
    path: Path, env: Mapping[str, str], cwd: Path, resume_from: str = "", block: Block | None = None
) -> Claim | None:
    """Create or check the job's directory, claim it, and write a pointer if needed; return the claim.

    With `resume_from`, a job's id or directory, the job begins with the undamaged checkpoints of that job. Ranks that
    `ones-run` started only check the directory and return None, since `ones-run` has done the rest. Each block of a job
    claims the directory for its own task. Raises `LaunchError`, and `ClaimedError` before anything in the directory is
    changed.
    """
    make_root(env, cwd)
    make_job_directory(path)
    if "ONES_LAUNCHED" in env:
        return None
    claim = take_claim(path, Holder.here(env), f"{CLAIM}-{block.task}" if block else CLAIM)
    take_over(path, own_job(env))
    if not block:  # others of the job may train
        drop_left(path)
    if resume_from:
        resume(resume_from, path, env, cwd)
    leave_pointer(path, env, cwd)
    return claim


def drop_left(path: Path) -> None:
    """Remove requests of the owner that an earlier run did not fulfil before it ended."""
    for name in (STOP, SAVE):
        with suppress(OSError):
            asked = (path / name).lstat().st_mtime
            (path / name).unlink()
            log(f"{name} of {time.strftime('%Y-%m-%d %H:%M', time.localtime(asked))}, before this start, is removed")


def take_over(path: Path, job_id: int) -> None:
    """Make the directory this job's. Spec, reports and orders of another job are moved to `earlier-<id>`, since each
    job numbers them from the start. Checkpoints stay. Raises `LaunchError` if the other job still runs."""
    before = _owner(path)
    if not job_id or before == job_id:
        return
    names = (SPEC, ORDERS, HOT, FUSION, TAKEN, LEFT, RESULT)
    left = [*(path / name for name in names), *path.glob("reports-*.jsonl")]
    left = [one for one in left if os.path.lexists(one)]
    if before or (left and path.name != directory_name(job_id)):
        if running := holder(path, WAIT_S):
            raise LaunchError(
                f"job directory {path}: {running} is running there, and two jobs cannot share it: end that one, or "
                "have a directory for each job (ONES_JOB_ROOT in place of ONES_JOB_DIR)"
            )
        aside = path / f"earlier-{before or 'unknown'}"
        aside.mkdir(exist_ok=True)
        for one in left:
            with suppress(FileNotFoundError):  # another block of this job was faster
                one.replace(_free(aside / one.name))
        log(f"{path} was the directory of job {before or 'unknown'}: this job continues there", "ones-run")
    with suppress(OSError):  # a full disk: the next start does this again
        replace_small(path / OWNER, f"{job_id}\n".encode())


def _owner(path: Path) -> int:
    try:
        word = (path / OWNER).read_text(errors="replace").strip()
    except OSError:
        return last_job(path)
    match = _JOB.fullmatch(word)
    return int(match[1]) if match else last_job(path)


def _free(path: Path) -> Path:
    number, found = 1, path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def resume(source: str, path: Path, env: Mapping[str, str], cwd: Path) -> None:
    """Copy the undamaged checkpoints of `source`, a job's id or directory, into this job's directory `path`. Does
    nothing if this job has already resumed from them. Raises `LaunchError`."""
    what, job_id = f"--resume-from {source}", own_job(env)
    earlier = find_earlier(source, what, path, env, cwd)
    if earlier.resolve() == path.resolve():
        return
    if newest := newest_checkpoint(path):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if int(json.loads((newest / MANIFEST).read_text())["job_id"]) == job_id:
                return
        raise LaunchError(f"{what}: {path} has checkpoints of another job; name another directory, or leave it out")
    if (uid := earlier.stat().st_uid) != os.geteuid():
        raise LaunchError(f"{what}: {earlier} belongs to user {uid}, not to you; continue from one of your own jobs")
    if running := holder(earlier):
        raise LaunchError(f"{what}: {running} still runs in {earlier}; wait for its end, or end it")
    try:
        found = list(_good(earlier, what))
    except OSError as error:
        raise LaunchError(f"{what}: {error}") from None
    if not found:
        raise LaunchError(
            f"{what}: there is no good checkpoint in {earlier / CHECKPOINTS}; leave it out to start again"
        )
    try:
        _copy(found, path, job_id)
        for name in (MEMORY, RUN_ID):  # with the same run id a script draws the same numbers
            if (earlier / name).exists() and not (path / name).exists():
                shutil.copyfile(earlier / name, path / name, follow_symlinks=False)
    except OSError as error:
        if not newest_checkpoint(path):  # else another block of this job was faster
            raise LaunchError(f"{what}: {error}") from None
    log(f"going on from {found[0][0]}", "ones-run")


def find_earlier(source: str, what: str, path: Path, env: Mapping[str, str], cwd: Path) -> Path:
    """Return an earlier job's directory. Searches next to this job's directory, in `cwd`, and in the submit
    directory."""
    match = _JOB.fullmatch(source)
    if match is None:
        found = cwd / source
        if not found.is_dir():
            raise LaunchError(f"{what}: there is no such directory (looked from {cwd})")
        return found
    places = dict.fromkeys((path.parent, cwd, Path(env.get("SLURM_SUBMIT_DIR") or cwd)))
    for place in places:
        with suppress(OSError, ProtocolError):
            with (place / pointer_name(int(match[1]))).open("rb") as pointer:
                pointed = Path(decode_pointer(pointer.read(MAX_POINTER + 1)))
            if pointed.is_dir():
                return pointed
        if (beside := place / directory_name(int(match[1]))).is_dir():
            return beside
    raise LaunchError(
        f"{what}: its directory {directory_name(int(match[1]))} is not in "
        f"{', '.join(map(str, places))}; name the directory itself"
    )


def _good(earlier: Path, what: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for one in checkpoints(earlier):
        if problem := damage(one):
            log(f"{what}: checkpoint {one.name} is damaged ({problem}) and was passed over", "ones-run")
            continue
        yield one, json.loads((one / MANIFEST).read_text())


def _copy(found: list[tuple[Path, dict[str, Any]]], path: Path, job_id: int) -> None:
    """Link or copy checkpoints into the job's directory, and publish them by one rename. Raises OSError."""
    new = path / f".resumed-{os.urandom(4).hex()}"
    try:
        for one, manifest in found:
            folder = new / one.name
            folder.mkdir(parents=True)
            for file in manifest["files"]:
                _link(one / file, folder / file)
            manifest |= {RESUMED_FROM: manifest.get(RESUMED_FROM, manifest.get("job_id")), "job_id": job_id}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
            sync(folder / MANIFEST)
            sync(folder)
        sync(new)
        new.replace(path / CHECKPOINTS)  # takes the place of an empty folder, and of no other
        sync(path)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _link(old: Path, new: Path) -> None:
    """Hard-link a checkpoint's file, which is never written again; copy it to another file system."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copyfile(old, new, follow_symlinks=False)
        sync(new)
