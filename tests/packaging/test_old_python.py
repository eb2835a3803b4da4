"""On a Python that is too old each package says so in one sentence, at its installation and at its start."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PACKAGES = {"slurm_ones": TOP, "ones_db": TOP / "db", "ones_wrapper": TOP / "wrapper"}


@pytest.mark.parametrize("name", PACKAGES)
def test_an_old_python_is_told_apart(name: str) -> None:
    """Protects from riddles: a SyntaxError, a missing name of `typing`, or a module that is not there."""
    settings = configparser.ConfigParser()
    settings.read(PACKAGES[name] / "setup.cfg")
    # By which pip says: requires a different Python: 3.9.18 not in '>=3.10'.
    assert settings["options"]["python_requires"] == ">=3.10"
    first = PACKAGES[name] / name / "__init__.py"
    ast.parse(first.read_text(), feature_version=(3, 8))
    pretend = f"import sys; sys.version_info = (3, 9, 18, 'final', 0); import {name}"
    done = subprocess.run([sys.executable, "-c", pretend], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{name.replace('m_o', 'm-o')} needs Python 3.10 or newer; {sys.executable} is 3.9" in done.stderr
