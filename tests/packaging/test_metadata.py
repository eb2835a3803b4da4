"""What an index, those who cite, pip, an old Python and `man` are told of the three distributions."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ones_db
import ones_wrapper
import slurm_ones
from slurm_ones.cli import _MODULES

TOP = Path(__file__).parents[2]
FOLDERS = {"slurm-ones": TOP, "ones-db": TOP / "db", "ones-wrapper": TOP / "wrapper"}


def metadata(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(FOLDERS[name] / "setup.cfg")
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_all_three_say_the_same(name: str) -> None:
    """Author, licence and versions of Python; a classifier for the oldest that may install it."""
    here, main = metadata(name)["metadata"], metadata("slurm-ones")["metadata"]
    assert here["name"] == name
    assert (here["author"], here["license"]) == (main["author"], main["license"])
    pythons = re.findall(r"Python :: (3\.\d+)", here["classifiers"])
    assert pythons == re.findall(r"Python :: (3\.\d+)", main["classifiers"])
    assert metadata(name)["options"]["python_requires"] == f">={pythons[0]}"


def test_one_version() -> None:
    (cited,) = re.findall(r"^version: (.+)$", (TOP / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert {slurm_ones.__version__, ones_db.__version__, ones_wrapper.__version__} == {cited}
    for name in ("slurm-ones", "ones-db"):
        pinned = re.findall(r"^ones-\w+(?:\[\w+\])?==(.+)$", metadata(name)["options"]["install_requires"], flags=re.M)
        assert pinned and {*pinned} == {cited}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_old_python_is_told_apart(name: str) -> None:
    """Protects from riddles: a SyntaxError, a missing name of `typing`, or a module that is not there."""
    # By which pip says: requires a different Python: 3.9.18 not in '>=3.10'.
    assert metadata(name)["options"]["python_requires"] == ">=3.10"
    package = name.replace("-", "_")
    ast.parse((FOLDERS[name] / package / "__init__.py").read_text(), feature_version=(3, 8))
    pretend = f"import sys; sys.version_info = (3, 9, 18, 'final', 0); import {package}"
    done = subprocess.run([sys.executable, "-c", pretend], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{package.replace('m_o', 'm-o')} needs Python 3.10 or newer; {sys.executable} is 3.9" in done.stderr


@pytest.mark.slow
def test_every_command_has_a_page(tmp_path: Path) -> None:
    """Its name and what it does for `man -k`, its options, and nothing that groff does not understand."""
    subprocess.run([sys.executable, TOP / ".ci/man.py", tmp_path], check=True, cwd=TOP)
    pages = {page.stem: page.read_text() for page in tmp_path.glob("*.1")}
    assert set(pages) == {"slurm-ones", *(f"slurm-ones-{name}" for name in _MODULES)}
    assert all("\n.SH NAME\n" in page and "\n.SH OPTIONS\n" in page for page in pages.values())
    assert "\\fB\\-\\-sql " in pages["slurm-ones-db"] and ".SH QUERY\n" in pages["slurm-ones-db"]
    assert "\nJob id; " in pages["slurm-ones-resize"] and "\\-h" in pages["slurm-ones-resize"]
    if shutil.which("groff"):
        command = ["groff", "-k", "-man", "-Tutf8", "-ww", "-z", *sorted(tmp_path.glob("*.1"))]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert not [line for line in found.splitlines() if "break line" not in line]
