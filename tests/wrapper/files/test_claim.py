"""One training at a time in a job's directory: the second ends with a sentence and touches nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ones_wrapper.files import claim
from ones_wrapper.files.claim import CLAIM, ClaimedError, Holder, take_claim
from ones_wrapper.protocol import CHECKPOINTS, Hello, Throughput
from tests.waiting import until
from tests.wrapper.preloaded import Started
from tests.wrapper.runs import TRAIN, Run

ME = Holder(7, 1, "", claim.socket.gethostname(), os.getpid())
HOLD = (
    "import sys, time; from pathlib import Path; from ones_wrapper.files import claim\n"
    "from ones_wrapper.files.claim import Holder, take_claim\n"
    "claim.BEAT_S = 0.1\n"
    "one = take_claim(Path(sys.argv[1]), Holder(int(sys.argv[2]), int(sys.argv[3]), '0', sys.argv[4], 1))\n"
    "print('held', flush=True); time.sleep(600)"
)


@contextmanager
def held(directory: Path, job_id: int = 7, restart: int = 1, host: str = ME.host) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the directory."""
    command = [sys.executable, "-c", HOLD, str(directory), str(job_id), str(restart), host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WAIT_S": 0.2, "WATCH_S": 0.6, "BEAT_S": 0.05, "_SETTLE_S": 0.01}.items():
        monkeypatch.setattr(claim, name, value)


def take_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim it and let it go; fails if that waits for anybody."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits for {seconds} s")

    with monkeypatch.context() as patch:
        patch.setattr(claim.time, "sleep", sleep)
        take_claim(directory, ME).release()


@pytest.mark.parametrize(
    ("job_id", "restart", "says"),
    [
        (7, 1, r"job 7 trains in .* already \(process 1 on .*, step 0\).*with ones-run in the batch script"),
        (7, 2, "job 7 trains in .* already"),  # we are the earlier run, which Slurm has ended
        (8, 0, "job 8 is running in .*ONES_JOB_DIR"),
        (0, 0, "a training runs in .*ONES_JOB_DIR"),
        (7, 0, ""),
    ],
)
def test_who_may_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: int, restart: int, says: str) -> None:
    """Not a second training, but a requeued job whose run lingers on a lost node."""
    with held(tmp_path, job_id, restart) as process:
        if says:
            with pytest.raises(ClaimedError, match=says):
                take_claim(tmp_path, ME)
            assert Holder.of((tmp_path / CLAIM).read_text()) == Holder(job_id, restart, "0", ME.host, 1)
        else:
            take_claim(tmp_path, ME).release()
        process.send_signal(signal.SIGKILL)
        process.wait()
        take_at_once(tmp_path, monkeypatch)  # kill -9 leaves nothing behind


def test_a_claim_that_was_released_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of jobs in one directory does not wait."""
    take_claim(tmp_path, Holder(6, 0, "", "elsewhere", 1)).release()
    take_at_once(tmp_path, monkeypatch)


@pytest.mark.parametrize("locks", ["none", "of the host alone"])
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str) -> None:
    """Or whose locks do not reach other hosts: the holder's beat counts."""

    def lockf(handle: int, how: int) -> None:
        if locks == "none":
            raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with held(tmp_path, host="elsewhere"):
        monkeypatch.setattr(claim, "WATCH_S", 20.0)  # one look a second, until it has beaten
        with pytest.raises(ClaimedError, match="on elsewhere"):
            take_claim(tmp_path, ME)
    monkeypatch.setattr(claim, "WATCH_S", 0.3)
    one = take_claim(tmp_path, ME)  # its holder was killed
    assert Holder.of((tmp_path / CLAIM).read_text()) == ME
    before = (tmp_path / CLAIM).stat().st_mtime_ns
    until(lambda: (tmp_path / CLAIM).stat().st_mtime_ns != before, "another time of its file")
    one.release()


@pytest.mark.slow
def test_second_training_in_a_directory(tmp_path: Path) -> None:
    """By ones-run or plain python it ends with code 2, says why in one line, and leaves every file as it was."""
    job = tmp_path / "job"
    first = Run(job, "--epochs", "1000", "--step-ms", "50", SLURM_RESTART_COUNT="0")
    first.wait_for(Throughput)
    first.signal(signal.SIGUSR1)
    until(lambda: [*(job / CHECKPOINTS).glob("step-*")])
    (job / ".exit-0-0").write_text("0 7")
    kept = {p: p.read_bytes() for p in job.glob("**/*") if p.is_file() and p.name.startswith((".exit", "step", "spec"))}
    second = Run(job)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ONES_"))} | {"ONES_JOB_DIR": str(job)}
    plain = Started([str(TRAIN)], env, main="plain")
    _, said = plain.communicate(timeout=180)
    for code, errors in ((second.end(), second.errors), (plain.returncode, said)):
        assert code == 2, errors
        assert errors.count("\n") == 1 and "a training runs in" in errors, errors
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(first.of(Hello)) == 1
    first.signal(signal.SIGTERM)
    assert first.end() == 143
    assert (job / CLAIM).read_text() == ""
