"""Build the sdists and wheels of all three distributions into a folder, each wheel from its sdist: as for an index.

    python .ci/release.py dist

It needs the setuptools that is installed, and asks no index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "https://example.org/slurm-ones"
"""The public repository. There is none yet: nothing built with this address is to be uploaded."""

TOP = Path(__file__).resolve().parents[1]
PARTS = ("slurm_ones", "db", "wrapper", "sbatch_templates")
FILES = ("setup.cfg", "pyproject.toml", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE")
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def clean_copy(target: Path) -> None:
    """Copy the sources without what an earlier build left: setuptools puts a stale build/lib into the wheel."""
    for name in PARTS:
        stale = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        shutil.copytree(TOP / name, target / name, ignore=stale, symlinks=True)
    for name in FILES:
        shutil.copy(TOP / name, target / name)


def publish(folder: Path, top: Path) -> None:
    """Say where the project is, and have the description's links lead there."""
    version = re.findall(r'__version__ = "(.+)"', (top / "slurm_ones/__init__.py").read_text())[0]

    def absolute(link: re.Match[str]) -> str:
        path = os.path.relpath(folder / link[2], top)
        kind = "raw" if link[2].endswith((".png", ".svg", ".webp")) else "blob"
        return f"{link[1]}{ADDRESS}/{kind}/v{version}/{path})"

    readme, settings = folder / "README.md", folder / "setup.cfg"
    readme.write_text(re.sub(r"(\]\()(?![a-z]+:|#)([^)]+)\)", absolute, readme.read_text()))
    urls = f"    Source = {ADDRESS}\n    Changelog = {ADDRESS}/blob/v{version}/CHANGELOG.md\n"
    settings.write_text(settings.read_text().replace("[metadata]\n", f"[metadata]\nproject_urls =\n{urls}", 1))


def main(target: Path) -> None:
    """Build all six files."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        clean_copy(top)
        for folder in (top / "wrapper", top / "db", top):
            publish(folder, top)
            subprocess.run([sys.executable, "-c", SDIST, target], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index"]
    sdists = sorted(target.glob("*.tar.gz"))
    subprocess.run([*pip, "--no-build-isolation", f"--wheel-dir={target}", *sdists], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
