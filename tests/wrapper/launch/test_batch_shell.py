"""A batch shell that Slurm's warning would kill is noticed, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ones_wrapper.launch.batch_shell import BatchShell

LOOK = "import ones_wrapper.launch.batch_shell as b; print(b.BatchShell().pid > 0)"


@pytest.mark.parametrize(
    ("before", "doomed"),
    [("", True), ("exec ", False), ("trap 'kill -USR2 $!' USR2; ", False), ("trap '' USR2; ", False)],
)
def test_a_shell_that_the_warning_kills(tmp_path: Path, before: str, doomed: bool) -> None:
    """Protects whoever forgets `exec` from finding that out at the job's end."""
    script = tmp_path / "slurm_script"
    script.write_text(f"#!/bin/bash\n{before}{sys.executable} -c '{LOOK}'\n:\n")
    script.chmod(0o755)
    # Slurm leaves signals as they are by default; a test runner may not.
    said = subprocess.run([script], capture_output=True, text=True, check=True).stdout
    assert said == f"{doomed}\n"


def status(proc: Path, name: str, state: str = "S (sleeping)", parent: int = 1) -> None:
    (proc / "5").mkdir(exist_ok=True)
    text = f"Name:\t{name}\nState:\t{state}\nPPid:\t{parent}\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000010000\n"
    (proc / "5/status").write_text(text)


def test_its_end_is_seen(tmp_path: Path) -> None:
    """Protects a job from a requeue while its shell lives, and from another process of the same number."""
    status(tmp_path, "slurm_script")
    shell = BatchShell(5, tmp_path)
    assert shell.pid == 5 and not shell.died
    for name, state in (("slurm_script", "Z (zombie)"), ("sleep", "S (sleeping)")):
        status(tmp_path, name, state)
        assert shell.died
    (tmp_path / "5/status").unlink()
    assert shell.died
    assert not BatchShell(5, tmp_path).died  # none was found, so none dies
