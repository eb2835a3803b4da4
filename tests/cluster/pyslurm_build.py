"""PySlurm for a site, built inside the site's own root with the Python that the tests run on.

It is kept apart from the root, one folder for every pair of Slurm and Python, and shown in a box at
/opt/pyslurm. Where it cannot be built the folder holds the reason instead, and all else goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import interpreter, paths, root
from .box import Box
from .errors import ClusterError
from .report import Report, step
from .sites import Site
from .spec import Bind

INSIDE = "/opt/pyslurm"
WHY_NOT = "why-not.txt"
BUILD_SECONDS = 900.0
# The first of each is what PySlurm's pyproject.toml asks for.
BUILD_REQUIREMENTS = ("setuptools>=59.2.0", "wheel>=0.37.0", "Cython>=0.29.37", "packaging>=21.3")
# Compiling with optimisation takes twice as long and gains tests nothing.
COMPILER_FLAGS = "-O0 -g0 -w"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True)
class PySlurm:
    """PySlurm as built, or why there is none."""

    folder: Path | None
    why: str


def key(site: Site) -> str:
    tag = sys.implementation.cache_tag
    return f"{site.pyslurm}-slurm{root.slurm_version(site)}-{tag}-{site.pyslurm_recipe()}"


def find(site: Site) -> PySlurm | None:
    """What an earlier build came to, or None if there was none."""
    if site.pyslurm is None:
        return PySlurm(None, f"site {site.name!r} has an old Slurm that no PySlurm fits")
    final = paths.pyslurm() / key(site)
    if not final.is_dir():
        return None
    reason = final / WHY_NOT
    return PySlurm(None, reason.read_text()) if reason.exists() else PySlurm(final, "")


def build(site: Site, report: Report, again: bool = False) -> PySlurm:
    """Build PySlurm for the site unless that was done (or tried, unless `again`)."""
    found = find(site)
    if found and (found.folder or not again or site.pyslurm is None):
        return found
    final = paths.pyslurm() / key(site)
    with root.locked(final.with_name(final.name + ".lock"), report):
        found = find(site)
        if found and (found.folder or not again):
            return found
        work = final.with_name(final.name + ".work")
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        work.mkdir(parents=True)
        result = work / "result"
        try:
            with step(report, f"{site.name}: PySlurm {site.pyslurm}"):
                _build(site, work, result, report)
        except (ClusterError, OSError, subprocess.SubprocessError) as why:
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            command = f"python -m tests.cluster build {site.name} --again"
            text = f"PySlurm {site.pyslurm} could not be built ({command} tries anew): {why}"
            (result / WHY_NOT).write_text(text)
        result.rename(final)
        shutil.rmtree(work)
    built = find(site)
    assert built is not None
    if built.why:
        report.note(built.why)
    return built


def _build(site: Site, work: Path, result: Path, report: Report) -> None:
    report.detail("downloading")
    environment, source = work / "env", work / "source"
    # Made by the interpreter itself: made by that of an environment, it may lean on the environment.
    _host(os.path.realpath(sys.executable), "-m", "venv", str(environment))
    python = str(environment / "bin/python")
    _host(python, "-m", "pip", "install", "--quiet", *BUILD_REQUIREMENTS)
    _host(
        *(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-binary", "pyslurm", "--dest", str(work), f"pyslurm=={site.pyslurm}"),
    )
    with tarfile.open(next(work.glob("pyslurm-*.tar.gz"))) as archive:
        archive.extractall(source)
    (unpacked,) = source.iterdir()
    box = Box(work / "box")
    # At its own path, writable: an environment knows where it is.
    binds = [*interpreter.base_binds(), Bind(str(work), str(work), writable=True)]
    box.start(root.folder(site), binds, owner=os.getpid())
    try:
        headers = work / "include"
        _pose(box.root / "usr/include/slurm", headers / "slurm", site.pyslurm_poses_as)
        report.detail("compiling")
        steps = ["build", "--parallel", "2", "bdist_wheel", "--dist-dir", str(work / "dist")]
        began = time.monotonic()
        process = box.popen(
            [python, "setup.py", *steps],
            cwd=unpacked,
            env={
                "PATH": "/usr/bin:/bin",
                "CFLAGS": f"{site.pyslurm_cflags} {COMPILER_FLAGS} -I{headers}",
                "SLURM_LIB_DIR": LIBRARIES,
                "SLURM_INCLUDE_DIR": str(headers),
                "PYSLURM_BUILD_JOBS": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said = []
        for line in process.stdout or ():
            said.append(line)
            if line.startswith(("building '", "[")):
                report.detail(line.strip())
            if time.monotonic() - began > BUILD_SECONDS:
                process.kill()
        if process.wait() != 0:
            log = work.with_suffix(".log")
            log.write_text("".join(said))
            errors = [line for line in said if "error" in line.lower()]
            raise ClusterError(f"{(errors or said or ['no output'])[0].strip()} (all of it is in {log})")
    finally:
        box.stop()
    wheel = str(next((work / "dist").glob("*.whl")))
    _host(*(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"), *("--target", str(result), wheel))


def _pose(original: Path, copy: Path, version: str) -> None:
    """Slurm's headers with another version number in them: PySlurm refuses any but its own."""
    shutil.copytree(original, copy)
    header = copy / "slurm_version.h"
    lines = header.read_text().splitlines()
    name = "#define SLURM_VERSION_NUMBER"
    changed = [f"{name} {version}" if line.startswith(name + " ") else line for line in lines]
    header.write_text("\n".join(changed) + "\n")


def _host(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
