"""What the wrapper needs: standard library, numpy, torch (mpi4py for MPI); and what it says where torch is missing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ones_wrapper
from ones_wrapper.process.log import TORCH_MISSING

PACKAGE = Path(ones_wrapper.__file__).parent
ALLOWED = {"numpy", "torch", "mpi4py", "ones_wrapper"}


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_nothing_else_is_needed() -> None:
    """Protects training environments, which get torch and numpy and nothing that the companion needs. A framework is
    imported only by the modules of its name.
    """
    modules = list(PACKAGE.rglob("*.py"))
    others = {path: imported(path) - ALLOWED - sys.stdlib_module_names for path in modules}
    for path in modules:
        if path.parent.name == "frameworks":
            others[path].discard(path.stem.partition("_")[0])
    others[PACKAGE / "launch/submit.py"].discard("cloudpickle")  # the extra `submit`
    assert len(modules) > 30
    assert {name: names for name, names in others.items() if names} == {}


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A Python process in which importing torch fails, as in an environment that has none."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean | {"PYTHONPATH": path} | env, capture_output=True, text=True
    )


def test_the_companions_side_needs_no_torch(tmp_path: Path) -> None:
    """Protects service nodes and notebooks, which have no torch, and the start of every run from seconds of imports."""
    modules = ("ones_wrapper", "ones_wrapper.protocol", "ones_wrapper.protocol.hostlist", "ones_wrapper.launch")
    done = run(tmp_path, "-c", f"import {', '.join(modules)}")
    assert (done.returncode, done.stderr) == (0, "")
    assert run(tmp_path, "-c", "import torch").returncode == 1


NODE = {"ONES_NODES": "1", "ONES_GPUS_PER_NODE": "1", "ONES_JOB_DIR": "."}


@pytest.mark.parametrize(
    ("command", "prefix", "env"),
    [
        (("script.py",), "", {}),
        (("-m", "ones_wrapper.launch", "script.py"), "ones-run: ", {}),
        (("-m", "ones_wrapper.launch.node", "script.py"), "ones-run: ", NODE),
    ],
)
def test_a_missing_torch_is_one_sentence(
    tmp_path: Path, command: tuple[str, ...], prefix: str, env: dict[str, str]
) -> None:
    """Protects who forgot to load a module: the sentence with the command, and no traceback."""
    (tmp_path / "script.py").write_text("import ones_wrapper as ones\nones.init(batch=8)\n")
    done = run(tmp_path, *command, **env)
    assert (done.returncode, done.stderr) == (2, f"{prefix}{TORCH_MISSING}\n")
