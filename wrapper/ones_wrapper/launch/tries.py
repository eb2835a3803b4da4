"""The file of a job's restarts and requeues: each is counted before it is tried."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ones_wrapper.files.job_directory import STEP_NAME
from ones_wrapper.files.small_files import read_json, replace_small
from ones_wrapper.launch.restart_policy import Tries
from ones_wrapper.process.log import log
from ones_wrapper.protocol.fields import build, types_of

TRIES = "tries.json"
MOST_BYTES = 4096


def _tries_name(task: int | None) -> str:
    return TRIES if task is None else f"tries-{task}.json"


def read_tries(job_dir: Path, job_id: int, task: int | None = None) -> Tries:
    """Read the tries of this job; another job's tries in the same directory do not count."""
    try:
        tries = build(Tries, types_of(Tries), read_json(job_dir / _tries_name(task), MOST_BYTES))
    except (OSError, ValueError):
        return Tries(job_id)
    sound = all(not name or STEP_NAME.fullmatch(name) for name in (tries.requeued_at, tries.failed_at))
    return tries if sound and tries.job_id == job_id else Tries(job_id)


def write_tries(job_dir: Path, tries: Tries, task: int | None = None) -> bool:
    """Replace the file; return False if it could not be written, so that nothing is tried without being counted."""
    path = job_dir / _tries_name(task)
    try:
        replace_small(path, (json.dumps(asdict(tries), indent=1) + "\n").encode())
    except OSError as error:
        log(f"{path} cannot be written ({error.strerror}), so nothing is tried again", "ones-run")
        return False
    return True
