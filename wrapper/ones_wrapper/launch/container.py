"""Command and variables by which `ones-run` starts the launcher in a container."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ones_wrapper.process.log import log
from ones_wrapper.process.placement import LaunchError

PYTHON = "python3"
"""Python of the image, found in the image's PATH: its path may differ from that of `ones-run`'s Python."""

CONTAINER, CWD, VERSION = "ONES_CONTAINER", "ONES_CWD", "ONES_OUTSIDE_VERSION"
"""Variables for the launcher in the container: the container's command, the working directory, our version."""


# -- for ones-run ------------------------------------------------------------------------------------------------------


def words_of(text: str | None) -> list[str]:
    """Split a container's command into words. Raises `LaunchError`."""
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise LaunchError(f"--container {text!r}: {error}") from None
    if text is not None and not words:
        raise LaunchError("--container: give the words that stand before a command, such as 'apptainer exec IMAGE'")
    return words


def command(words: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Return the command that runs `launcher`, a module and its arguments, in the container on a node."""
    return [sys.executable, "-m", "ones_wrapper.launch.outside", *words, PYTHON, "-m", *launcher]


def outside(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the launcher in the container needs."""
    return {CONTAINER: shlex.join(words), CWD: str(Path.cwd()), VERSION: own_version()}


def own_version() -> str:
    """Return the version of this package; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # not at the top: it takes longer than all else here

    try:
        return version("ones-wrapper")
    except PackageNotFoundError:
        return ""


# -- inside ------------------------------------------------------------------------------------------------------------


def arrive(env: Mapping[str, str]) -> None:
    """Check in the container that variables and folders are there, and change to the directory of `ones-run`. A node's
    launcher calls this first. Raises `LaunchError` with a remedy."""
    if "ONES_JOB_DIR" not in env:
        raise LaunchError(
            "ONES_JOB_DIR is not set: in a container, let the environment of the job pass (Apptainer: no --cleanenv or "
            "--containall; podman: --env-host)"
        )
    if not env.get(CONTAINER):
        return
    for path in (env["ONES_JOB_DIR"], env.get(CWD) or "."):
        if not Path(path).is_dir():
            raise LaunchError(f"{path} is not there in the container: bind it (Apptainer: --bind {path})")
    os.chdir(env.get(CWD) or ".")
    outside, inside = env.get(VERSION, ""), own_version()
    if outside and inside and outside != inside:
        log(f"ones-wrapper is {inside} in the container and {outside} outside: install the same in both", "ones-run")
