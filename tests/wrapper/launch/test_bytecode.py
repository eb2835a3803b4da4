"""What `ones-run` says where every start compiles torch again."""

from __future__ import annotations

import os
import py_compile
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ones_wrapper.launch import bytecode, main

NOBODY = 65534


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torch that everybody can read, without bytecode; what is made of it can be read, too."""
    umask = os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        source = Path(folder, "torch/__init__.py")
        source.parent.mkdir()
        source.write_text("")
        monkeypatch.setattr(sys, "path", [folder, *sys.path])
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        monkeypatch.setattr(sys, "pycache_prefix", None)
        yield source
    os.umask(umask)


def as_stranger(ask: Callable[[], str]) -> str:
    """The answer of a process of a user who owns nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            if os.getuid() == 0:
                os.setuid(NOBODY)
            os.write(write, ask().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_torch_that_each_start_compiles_is_named_with_what_ends_it(torch: Path) -> None:
    """Such a start takes the processor three times as long, and nothing shows why."""
    if os.getuid():
        torch.parent.chmod(0o555)
    said = as_stranger(lambda: bytecode.note({}))
    torch.parent.chmod(0o755)
    assert f"-m compileall -q {torch.parents[1]}" in said and "5 s" in said
    py_compile.compile(str(torch))
    assert as_stranger(lambda: bytecode.note({})) == ""


def test_a_place_for_bytecode_that_may_not_be_looked_at_ends_no_job(
    torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPYCACHEPREFIX may lie in somebody else's home."""
    closed = Path(torch.parents[1], "closed")
    closed.mkdir(mode=0)
    monkeypatch.setattr(sys, "pycache_prefix", str(closed / "cache"))
    assert "none can be kept" in as_stranger(lambda: bytecode.note({}))


def test_it_is_said_once_a_job(torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if this start leaves the bytecode for the next, nor at a requeue, nor by a block that joins."""
    assert not bytecode.note({})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    array = {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_ID": "0"}
    for env, said in (({}, True), ({"SLURM_RESTART_COUNT": "0"}, True), ({"SLURM_RESTART_COUNT": "1"}, False),
                      (array, True), (array | {"SLURM_ARRAY_TASK_ID": "3"}, False)):  # fmt: skip
        assert bool(bytecode.note(env)) is said, env


def test_ones_run_says_it_in_the_job_s_log(
    torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    ranks = SimpleNamespace(run=lambda start: 0)
    monkeypatch.setattr("ones_wrapper.launch.Supervisor", lambda *arguments: ranks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONES_JOB_DIR", str(tmp_path / "job"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    assert main(["train.py"]) == 0
    assert capfd.readouterr().err.count("compiles torch again") == 1
