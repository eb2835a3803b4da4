"""Empty environments that wheels are installed into, with what the wheels require and nothing else.

Nothing is downloaded: what a wheel requires is linked from the environment that runs the tests, with what that requires
in turn, so gigabytes of torch are there at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

OURS = {"slurm-ones", "ones-db", "ones-wrapper"}
TOP = Path(__file__).parents[2]


def pip(*arguments: object) -> str:
    """What pip says; it asks no index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def release(folder: Path) -> dict[str, Path]:
    """The wheels of a release by their names; the sdists that they were built from lie next to them."""
    subprocess.run([sys.executable, TOP / ".ci/release.py", folder], check=True, capture_output=True)
    return {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    """What a wheel says of itself, with its description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel says it requires, its extras' requirements included."""
    return [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether it is required here when these extras are asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


class Environment:
    """A virtual environment of its own, at first with the standard library alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._linked: set[tuple[str, ...]] = set()
        venv.create(folder / "env", symlinks=True)
        self.bin = folder / "env/bin"
        (self.site,) = (folder / "env/lib").glob("python*/site-packages")

    def install(self, wheels: dict[str, Path], name: str, *extras: str) -> None:
        """Install one distribution with what it requires: ours from the folder of the wheels, as from an index."""
        self._link_all(wheels, name, extras)
        wanted = f"{name}[{','.join(extras)}]" if extras else name
        index = f"--find-links={wheels[name].parent}"
        pip("--python", self.bin / "python", "install", "--quiet", "--no-index", index, wanted)

    def _link_all(self, wheels: dict[str, Path], name: str, extras: Iterable[str]) -> None:
        for wanted in requirements(wheels[name]):
            if applies(wanted, extras):
                if wanted.name in OURS:
                    self._link_all(wheels, wanted.name, wanted.extras)
                else:
                    self.link(wanted)

    def link(self, wanted: Requirement) -> None:
        """Link a distribution of the environment that runs the tests, and what it requires."""
        if (wanted.name, *sorted(wanted.extras)) in self._linked:
            return
        self._linked.add((wanted.name, *sorted(wanted.extras)))
        found = distribution(wanted.name)
        files = found.files or ()
        parts = {file.parts[0] for file in files} - {"..", "__pycache__"}
        fresh = [part for part in parts if not (self.site / part).is_symlink()]
        for part in fresh:
            (self.site / part).symlink_to(Path(str(found.locate_file(part))))
        for line in found.requires or ():
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
