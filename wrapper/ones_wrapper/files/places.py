"""Paths of a job's directory, of the pointer to it, and of the site's spool.

The companion searches for a job in the directory from which it was submitted. If the job's directory is elsewhere, the
job writes a pointer into the submit directory (`protocol.pointer_name`).
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ones_wrapper.files.job_io import not_ours
from ones_wrapper.files.small_files import read_small, replace_small
from ones_wrapper.process.block import own_block
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import LaunchError, number
from ones_wrapper.protocol import MAX_POINTER, SPOOL_FILE, ProtocolError, directory_name, encode_pointer, pointer_name


def own_job(env: Mapping[str, str]) -> int:
    """Return the job's id; the array's id for a job of blocks, 0 outside Slurm."""
    block = own_block(env)
    return block.array if block else number(env, "SLURM_JOB_ID") or 0


def find_job_directory(env: Mapping[str, str], cwd: Path) -> Path:
    """Return the absolute path of the job's directory: ONES_JOB_DIR, or `ones-<job id>` in ONES_JOB_ROOT or else in
    `cwd`. A job of blocks uses its array's id."""
    path = cwd / (env.get("ONES_JOB_DIR") or Path(env.get("ONES_JOB_ROOT") or "", directory_name(own_job(env))))
    return path.resolve() if ".." in path.parts else path


def make_root(env: Mapping[str, str], cwd: Path) -> None:
    """Create the folder ONES_JOB_ROOT, unless ONES_JOB_DIR is set. Raises `LaunchError`."""
    root = env.get("ONES_JOB_ROOT")
    if not root or env.get("ONES_JOB_DIR"):
        return
    try:
        (cwd / root).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"ONES_JOB_ROOT={root}: cannot be made ({error.strerror}); name another") from None


def make_job_directory(path: Path, mode: int = 0o755) -> None:
    """Create the job's directory, or a folder in it; check it if it exists. Raises `LaunchError` if the path is a link
    or no directory, belongs to another user, is not writable, or has no parent."""
    try:
        path.mkdir(mode)
        path.chmod(mode)  # the companion may be another user, whatever our umask
        return
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise LaunchError(f"job directory {path}: its parent does not exist; make it first") from None
    except OSError as error:
        why = f"cannot be made ({error.strerror}); set ONES_JOB_DIR to a place you can write to"
        raise LaunchError(f"job directory {path}: {why}") from None
    if why := not_ours(path):
        raise LaunchError(f"job directory {path}: {why}")


def leave_pointer(path: Path, env: Mapping[str, str], cwd: Path) -> None:
    """Write a pointer to the job's directory `path` into the submit directory, SLURM_SUBMIT_DIR; a failure is logged.
    For jobs with --chdir, another pointer is written into the working directory."""
    job_id, given = own_job(env), env.get("SLURM_SUBMIT_DIR")
    if not job_id or not given:
        return
    submitted = Path(given)
    for place in dict.fromkeys((submitted, cwd)):
        pointer = place / pointer_name(job_id)
        try:
            if place / directory_name(job_id) == path:
                pointer.unlink(missing_ok=True)  # of an earlier job with this id
            else:
                _point(pointer, encode_pointer(str(path)))
        except (ProtocolError, OSError) as error:
            if place == submitted:
                log(
                    f"{pointer} cannot be written ({error}): slurm-ones will not find this job's directory {path}, "
                    "and not resize it, unless it was submitted with --chdir. Submit from a directory that the job "
                    "can write to"
                )


def _point(pointer: Path, text: bytes) -> None:
    with suppress(OSError, ValueError):
        if read_small(pointer, MAX_POINTER) == text:
            return
    replace_small(pointer, text, 0o644)


def find_spool(env: Mapping[str, str], published: Path = Path(SPOOL_FILE)) -> Path | None:
    """Return the spool from which this job reads orders: ONES_SPOOL, or the one named in the site's file
    (`protocol.SPOOL_FILE`); None if there is none."""
    if given := env.get("ONES_SPOOL"):
        return Path(given)
    if "ONES_LAUNCHED" in env:  # ones-run has looked, and complained once
        return None
    try:
        for path in (published.parent, published):
            state = path.lstat()
            if state.st_uid != 0 or state.st_mode & 0o022 or stat.S_ISLNK(state.st_mode):
                raise ValueError("it, or its folder, can be written by others than root")
        text = published.read_text().strip()
        if not text.startswith("/") or not text.isprintable():
            raise ValueError("it is not one absolute path")
        return Path(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log(f"{published} is not used ({error}): tell your administrator; ONES_SPOOL names the spool meanwhile")
        return None
