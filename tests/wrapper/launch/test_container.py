"""`ones-run --container`: what passes in and out, whatever the runtime hands on by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ones_wrapper.launch import container, main, outside
from ones_wrapper.process.exit_codes import STOP_CODE
from ones_wrapper.process.placement import LaunchError
from tests.marks import nightly

DEAF = """#!/bin/sh
# The worst of runtimes: in a session of its own, hands on no signal, and leaves what it started when it is killed.
trap '' TERM USR1 USR2 URG
setsid "$@" & wait $!
"""
RUNTIMES = {
    "deaf": "./deaf",
    "bubblewrap": "bwrap --dev-bind / / --unshare-pid --proc /proc",
    "unshare": "unshare --user --map-root-user --pid --fork --mount-proc",
    "charliecloud": "ch-run --bind /usr:/usr --bind /lib:/lib --bind /bin:/bin --bind /lib64:/lib64"
    " --bind {python} --bind {here} --bind {repository} image --",
}
"""Real ones are tried where they are installed and the machine lets them make namespaces."""

SCRIPT = """
import os, pathlib, sys, time
from ones_wrapper.process.hooks import FLAGS
rank, here = os.environ["RANK"], pathlib.Path(f"rank-{os.environ['RANK']}-{os.environ['ONES_ATTEMPT']}")
here.write_text(f"{os.environ['HELLO']} {sys.argv[1:]} {os.getcwd()} {os.environ['PYTHONPATH']}")
FLAGS.armed = True
while not FLAGS.stop:
    if FLAGS.checkpoint:
        FLAGS.checkpoint_taken()
        here.write_text("checkpoint")
    time.sleep(0.05)
here.write_text("stop")
sys.exit(int(rank) * 5)
"""


def make_deaf(folder: Path) -> None:
    (folder / "deaf").write_text(DEAF)
    (folder / "deaf").chmod(0o755)


@pytest.fixture(params=[nightly("deaf"), *[name for name in RUNTIMES if name != "deaf"]])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    make_deaf(tmp_path)
    repository = Path(__file__).resolve().parents[3]
    places = {"python": sys.base_prefix, "here": str(tmp_path), "repository": str(repository)}
    words = RUNTIMES[name].format(**places)
    for place in ("usr", "lib", "bin", "lib64", "etc", "dev", "proc", "sys", "tmp", "home", "root", *places.values()):
        (tmp_path / "image" / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for file in ("passwd", "group", "hosts", "resolv.conf"):
        (tmp_path / "image/etc" / file).touch()
    if name != "deaf":
        env = os.environ | {"USER": "root"}
        if shutil.which(words.split()[0]) is None:
            pytest.skip(f"{words.split()[0]} is not installed")
        tried = subprocess.run([*words.split(), "true"], cwd=tmp_path, env=env, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"{name} does not run here: {tried.stderr.strip()[:200]}")
    return words


def test_a_process_that_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the exit code of a container whose helper ends in the moment in which it is to be ended."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = iter([[gone.pid], []])
    monkeypatch.setattr(outside, "descendants", lambda pid: next(left))
    monkeypatch.setattr(outside, "TIDY_S", 0.01)
    monkeypatch.setattr(outside, "_is_launcher", lambda pid: True)
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    outside.Outside._end_the_rest()
    assert next(left, None) is None


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `ones-run`; whatever is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(runtime: str, **env: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(SCRIPT)
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))}
        # The launcher inside is this environment's, whichever python3 comes first here.
        keep |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        keep |= {"USER": "root", "HELLO": "hello", "PYTHONPATH": ":".join(["/nowhere", *sys.path])} | env
        command = [sys.executable, "-m", "ones_wrapper.launch", "--container", runtime, "--gpus-per-node", "2"]
        process = subprocess.Popen(
            [*command, "script.py", "--lr", "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=keep,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            for pid in [*outside.descendants(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(holds: Callable[[], object], what: str, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until or process.poll() is not None:
            process.kill()
            assert process.stdout is not None
            raise AssertionError(f"no {what}: {process.stdout.read()}")
        time.sleep(0.1)


def texts(tmp_path: Path, attempt: int = 1) -> list[str]:
    return [text for path in sorted(tmp_path.glob(f"rank-?-{attempt}")) if (text := path.read_text())]


@pytest.mark.slow
def test_what_passes_and_what_a_killed_container_leaves(runtime: str, tmp_path: Path, start: Start) -> None:
    """Environment, signals, exit code; of a runtime that is killed nothing trains on next to the second start."""
    process = start(runtime)
    wait_for(lambda: len(texts(tmp_path, 0)) == 2, "ranks", process)
    told = texts(tmp_path, 0)[0]
    assert told.startswith(f"hello ['--lr', '0.1'] {tmp_path} /nowhere:"), told
    (guard,) = outside._children(process.pid)
    (inner,) = outside._children(guard)
    ranks = list(outside.descendants(inner))
    os.kill(inner, signal.SIGKILL)
    wait_for(lambda: len(texts(tmp_path)) == 2, "second start", process)
    for pid in ranks:
        with suppress(OSError):  # it is gone
            assert "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: texts(tmp_path) == ["checkpoint"] * 2, "checkpoints", process)
    process.terminate()
    output = process.communicate(timeout=180)[0]
    assert texts(tmp_path) == ["stop"] * 2 and process.returncode == 5, output
    assert not list((tmp_path / "ones-0").glob(".exit*"))


def test_a_stop_does_not_wait_for_imports(tmp_path: Path, start: Start) -> None:
    """A stop that waited would reach its ranks."""
    begun = tmp_path / "begun"
    (tmp_path / "torch.py").write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(300)\n")
    make_deaf(tmp_path)
    process = start("./deaf", PYTHONPATH=":".join([str(tmp_path), *sys.path]))
    wait_for(begun.exists, "import of torch", process)
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == STOP_CODE, output


@pytest.mark.slow
def test_what_is_missing_is_said(tmp_path: Path, start: Start) -> None:
    """No runtime; no ones_wrapper in the image."""
    output = start("apptainer-is-not-there exec image.sif").communicate(timeout=180)[0]
    assert "there is no apptainer-is-not-there on this node" in output
    empty = tmp_path / "empty"
    empty.write_text("#!/bin/sh\nexec env -u PYTHONPATH python3 -I -S -c 'import ones_wrapper'\n")
    empty.chmod(0o755)
    process = start("./empty")
    output = process.communicate(timeout=180)[0]
    assert "ones_wrapper installed for its python3?" in output and process.returncode == 1


def test_what_does_not_come_along_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="--env-host"):
        container.arrive({})
    env = {"ONES_JOB_DIR": "/not/bound", "ONES_CONTAINER": "apptainer exec image.sif", "ONES_CWD": str(tmp_path)}
    with pytest.raises(LaunchError, match="--bind /not/bound"):
        container.arrive(env)
    env |= {"ONES_JOB_DIR": str(tmp_path), "ONES_OUTSIDE_VERSION": "0.0.1"}
    container.arrive(env)
    assert "0.0.1 outside" in capfd.readouterr().err
    container.arrive({"ONES_JOB_DIR": "/not/bound"})  # no container: nothing is to be bound


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Before anything starts."""
    monkeypatch.chdir(tmp_path)
    for words, said in (("apptainer exec 'image", "No closing quotation"), (" ", "words that stand before")):
        assert main(["--container", words, "script.py"]) == 2
        assert said in capfd.readouterr().err
    assert main(["--container", "apptainer exec image", "--backend", "mpi", "--launcher", "mpirun", "script.py"]) == 2
    assert "MPI" in capfd.readouterr().err
    monkeypatch.setenv("ONES_CONTAINER", "apptainer exec --nv 'my image.sif'")
    monkeypatch.setenv("ONES_JOB_DIR", str(tmp_path / "job"))
    assert main(["--dry-run", "script.py"]) == 0 and not (tmp_path / "job").exists()
    line = capfd.readouterr().out
    assert "ones_wrapper.launch.outside apptainer exec --nv my image.sif python3 -m ones_wrapper.launch.node" in line
