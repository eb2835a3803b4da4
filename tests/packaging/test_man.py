"""Man pages are made from the words of `--help`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ones.cli import _MODULES

TOP = Path(__file__).parents[2]


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
