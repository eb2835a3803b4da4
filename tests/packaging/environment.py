"""Empty environments that wheels are installed into, with what the wheels require and nothing else.

Nothing is downloaded: what a wheel requires is linked from the environment that runs the tests, with what that requires
in turn, so gigabytes of torch are there at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

OURS = {"slurm-ones", "ones-db", "ones-wrapper"}
TOP = Path(__file__).parents[2]
SOURCES = ("slurm_ones", "db", "wrapper", "sbatch_templates", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def clean_copy(target: Path) -> Path:
    """The sources without what an earlier build left: setuptools puts a stale build/lib into the wheel."""
    stale = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in SOURCES:
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, target / name, ignore=stale, symlinks=True)
        else:
            shutil.copy(TOP / name, target / name)
    return target


def pip(*arguments: object) -> str:
    """What pip says; it asks no index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(sources: Iterable[Path], wheels: Path) -> dict[str, Path]:
    """The wheels of these distributions, by their names."""
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={wheels}", *sources)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in wheels.glob("*.whl")}


def members(wheel: Path) -> set[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel says it requires, its extras' requirements included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [Requirement(line) for line in lines]


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether it is required here when these extras are asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


class Environment:
    """A virtual environment of its own, at first with the standard library alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "env", symlinks=True)
        self.bin = folder / "env/bin"
        (self.site,) = (folder / "env/lib").glob("python*/site-packages")

    def install(self, wheels: dict[str, Path], name: str, *extras: str) -> None:
        """Install one of the wheels with what it requires, as `pip install NAME[EXTRAS]` would."""
        pip("--python", self.bin / "python", "install", "--quiet", "--no-deps", "--no-index", wheels[name])
        for wanted in requirements(wheels[name]):
            if applies(wanted, extras):
                if wanted.name not in OURS:
                    self.link(wanted)
                elif not list(self.site.glob(f"{wanted.name.replace('-', '_')}-*.dist-info")):
                    self.install(wheels, wanted.name, *wanted.extras)
                else:
                    self._link_extras(wheels, wanted)

    def _link_extras(self, wheels: dict[str, Path], wanted: Requirement) -> None:
        for further in requirements(wheels[wanted.name]):
            if further.name not in OURS and applies(further, wanted.extras):
                self.link(further)

    def link(self, wanted: Requirement) -> None:
        """Link a distribution of the environment that runs the tests, and what it requires."""
        found = distribution(wanted.name)
        files = found.files or ()
        parts = {file.parts[0] for file in files} - {"..", "__pycache__"}
        fresh = [part for part in parts if not (self.site / part).is_symlink()]
        for part in fresh:
            (self.site / part).symlink_to(Path(str(found.locate_file(part))))
        for line in found.requires or () if fresh else ():
            further = Requirement(line)
            if applies(further, wanted.extras):
                self.link(further)

    def check(self) -> None:
        """All that is installed has all that it requires, says pip."""
        assert "No broken requirements" in pip("--python", self.bin / "python", "check")

    def run(self, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's programs, in a folder of its own and with no variable of ours."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        clean = {"PATH": f"{self.bin}{os.pathsep}/usr/bin:/bin", "HOME": str(work), "PYTHONNOUSERSITE": "1"}
        return subprocess.run(
            [self.bin / str(command[0]), *map(str, command[1:])],
            env=clean | {"OMP_NUM_THREADS": "1"} | env,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def python(self, code: str, *arguments: object) -> str:
        """What a piece of Python prints."""
        done = self.run("python", "-c", code, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def lacks(self, *modules: str) -> bool:
        """Whether none of these can be imported."""
        code = "import sys, importlib.util as u; print([m for m in sys.argv[1:] if u.find_spec(m)])"
        return self.python(code, *modules) == "[]"
