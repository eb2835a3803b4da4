"""Compilation of the SPANK plugin with the site's compiler and Slurm's headers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

SPANK = "slurm_ones_spank.so"
"""File name of the compiled plugin."""
SECONDS = 60.0
_WITHOUT = "cannot be compiled here"
_NUMBER = re.compile(r"^\s*(?:\(?\s*)(0x[0-9a-fA-F]{6})\b", re.MULTILINE)


class PluginError(Exception):
    """Error while the plugin is built or installed. Its message says what is wrong and what to do."""


def source(name: str) -> str:
    """Return the text of one of the plugin's source files."""
    return files("slurm_ones.plugin").joinpath(name).read_text("utf-8")


def run(*command: str, text: str = "", seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result. Raises `PluginError` if there is no such command or it hangs."""
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except FileNotFoundError:
        raise PluginError(f"{command[0]} is not found: is it installed, and on the PATH?") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{command[0]}: {error}") from None


def compiler() -> list[str]:
    """Return the command of the C compiler: $CC, cc, gcc or clang. Raises `PluginError` if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise PluginError(f"the SPANK plugin {_WITHOUT}, since there is no C compiler: install gcc, or set CC")


def _flags(include: Path | None) -> list[str]:
    return [] if include is None else [f"-I{include}"]


def headers(include: Path | None = None) -> str:
    """Return the release of Slurm's headers, such as 26.05. Raises `PluginError` if there are no headers."""
    asked = "#include <slurm/spank.h>\n#include <slurm/slurm_version.h>\nSLURM_VERSION_NUMBER\n"
    # Before 22.05 the version was in slurm.h.
    older = "#include <slurm/slurm.h>\n#include <slurm/spank.h>\nSLURM_VERSION_NUMBER\n"
    for text in (asked, older):
        done = run(*compiler(), "-E", "-P", *_flags(include), "-x", "c", "-", text=text)
        match = _NUMBER.search(done.stdout) if done.returncode == 0 else None
        if match is not None:
            number = int(match[1], 16)
            return f"{number >> 16}.{number >> 8 & 255:02d}"
    where = "" if include is None else f" in {include}"
    raise PluginError(
        f"the SPANK plugin {_WITHOUT}, since Slurm's header slurm/spank.h is not found{where}: install it (Debian: "
        "libslurm-dev, Red Hat: slurm-devel), or name the folder that holds slurm/spank.h by --include"
    )


def running() -> str:
    """Return the release of the installed Slurm, such as 26.05. Raises `PluginError` if there is no Slurm."""
    match = re.match(r"slurm\S* (\d+)\.(\d+)", run("sbatch", "--version").stdout)
    if match is None:
        raise PluginError("sbatch --version does not say which Slurm this is")
    return f"{match[1]}.{int(match[2]):02d}"


def compile_spank(to: Path, include: Path | None = None) -> Path:
    """Compile the SPANK plugin into the folder `to`, atomically, and return its path. Raises `PluginError`."""
    compiled, here = headers(include), running()
    if compiled != here:
        raise PluginError(
            f"Slurm's headers are of {compiled}, and sbatch here is of {here}, which would not load the plugin: name "
            "the folder with the headers of this Slurm by --include"
        )
    to.mkdir(parents=True, exist_ok=True)
    with (
        as_file(files("slurm_ones.plugin").joinpath("slurm_ones_spank.c")) as code,
        tempfile.TemporaryDirectory(prefix=".slurm-ones-", dir=to) as folder,
    ):
        made = Path(folder) / SPANK
        # Slurm provides spank_… and slurm_… when it loads the plugin.
        options = ["-std=gnu99", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", *_flags(include)]
        done = run(*compiler(), *options, "-o", str(made), str(code))
        if done.returncode != 0 or not made.is_file():
            raise PluginError(f"the compiler refuses the SPANK plugin: {done.stderr.strip()[:2000]}")
        made.chmod(0o755)
        made.replace(to / SPANK)
    return to / SPANK
