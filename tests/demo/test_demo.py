"""`slurm-ones demo` as a user runs it, and its parts."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slurm_ones.cli import app
from slurm_ones.demo import local_slurm, remote
from slurm_ones.demo.jobs import DemoJob
from slurm_ones.demo.local_slurm import LocalSlurm, Processes, Submitted, clean_environment
from slurm_ones.demo.remote import RemoteClient, Served
from slurm_ones.demo.run import address_in, samples_line
from slurm_ones.slurm.client import Refused, UnknownJob, Unreachable
from slurm_ones.slurm.model import Task
from tests.marks import nightly
from tests.slurm.simulated import SimulatedSite
from tests.waiting import until

LONGEST_S = 250.0


def in_folder(folder: Path) -> list[int]:
    """The processes that work in a folder, or are named by it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().decode(errors="replace")
            if (place / "cwd").readlink() == folder or str(folder) in words:
                found.append(int(place.name))
    return found


class Started:
    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, ""
        # Whoever started the tests in the background may have left SIGINT ignored.
        command = ["env", "--default-signal=INT", sys.executable, "-u", "-m", "slurm_ones.cli", "demo", "--small"]
        browser = folder.parent / "browser"
        browser.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$0.arguments"\n')
        browser.chmod(0o755)
        self.keyboard, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [*command, f"--directory={folder}"],
            env={**os.environ, "BROWSER": str(browser), "DISPLAY": ":0", "SSH_CONNECTION": "there"},
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.close(terminal)

    def until(self, pattern: str) -> str:
        """Read on to a line in which the pattern is found; what its first group has there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if match := re.search(pattern, line):
                return match[1] if match.groups() else match[0]
        raise AssertionError(f"{pattern} did not come:\n{self.text}")

    def end(self) -> int:
        """Read to its end; its exit code."""
        assert self.process.stdout is not None
        self.text += self.process.stdout.read()
        return self.process.wait(LONGEST_S)

    def gone(self, within_s: float) -> bool:
        """Whether nothing of it runs any more, so many seconds from now at the latest."""
        end = time.monotonic() + within_s
        while left := set(in_folder(self.folder)) - {self.process.pid}:
            if time.monotonic() > end:
                print(left)
                return False
            time.sleep(0.1)
        return True


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    demo = Started(tmp_path / "demo")
    timer = threading.Timer(LONGEST_S, demo.process.kill)
    timer.start()
    yield demo
    timer.cancel()
    demo.process.kill()
    demo.process.wait()
    os.close(demo.keyboard)


def get(address: str, cookie: str = "") -> tuple[int, str, str]:
    """Status, text and cookie of a page."""
    where = re.fullmatch(r"http://([\d.]+:\d+)(/.*)", address)
    assert where is not None
    connection = http.client.HTTPConnection(where[1], timeout=30)
    connection.request("GET", where[2], headers={"Cookie": cookie} if cookie else {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), (answer.getheader("set-cookie") or "").partition(";")[0]
    connection.close()
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_a_training_really_grows_and_shrinks(started: Started) -> None:
    """Protects what the demo promises: PyTorch processes change their size while they train, no sample is lost or used
    twice, the page answers and tells what is simulated, the report is written, and nothing is left running."""
    address = started.until(r"live page: (\S+)")
    assert address.startswith("http://127.0.0.1:")
    port = address.removeprefix("http://127.0.0.1:").partition("/")[0]
    assert started.until(r"From your own machine: (.+)").startswith(f"ssh -L {port}:localhost:{port} ")
    assert get(address.partition("?")[0])[0] == 403
    # Of the token the browser's command line says nothing: it is in a file that only this user can read.
    opened = started.folder / "page.html"
    assert opened.stat().st_mode & 0o777 == 0o600 and f'href="{address}"' in opened.read_text()
    status, _, cookie = get(address)
    assert status == 303
    started.until("spirals-1 trains on 1 GPU")
    started.until("spirals-1 grew from 1")
    end = time.monotonic() + 60
    while True:
        status, page, _ = get(address.partition("?")[0], cookie)
        if all(word in page for word in ("spirals-1", "cnn-1", "simulated-1")):
            break
        assert time.monotonic() < end, page
        time.sleep(0.5)
    assert status == 200
    started.until("spirals-1 shrank from")
    assert (started.folder.parent / "browser.arguments").read_text() == f"{opened.as_uri()}\n"
    # On a terminal the page outlives the report, until Ctrl-C.
    started.until("The page stays for an hour")
    assert get(address.partition("?")[0], cookie)[0] == 200
    started.process.send_signal(signal.SIGINT)
    assert started.end() == 0, started.text
    for job in ("spirals-1: each of 1536 samples was used once in each of 14", "spirals-2: each of 1536 samples"):
        assert job in started.text
    assert started.text.count("as the companion saw it") == started.text.count("by what each rank wrote down") == 1
    assert "vit-1" in (started.folder / "report.html").read_text()
    assert started.gone(20.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, nightly(signal.SIGKILL)])
def test_nothing_outlives_a_demo_that_is_ended(started: Started, number: signal.Signals) -> None:
    """Protects the machine from trainings that nobody watches: after Ctrl-C, and after a crash."""
    started.until("spirals-1 trains on 1 GPU")
    assert len(in_folder(started.folder)) >= 5  # itself, companion, page, and of a block three processes
    started.process.send_signal(number)
    code = started.end()
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), started.text
    assert "Traceback" not in started.text
    assert started.gone(20.0)


@pytest.mark.slow
def test_a_crash_leaves_no_process(tmp_path: Path) -> None:
    """The reaper ends what runs when its parent is killed, also what does not want to end."""
    code = (
        "import sys, time; from contextlib import closing; from pathlib import Path\n"
        "from slurm_ones.demo.local_slurm import *\n"
        "with closing(Processes()) as all_:\n"
        "    for text in ('import time; time.sleep(60)', 'import signal, time; '\n"
        "                 'signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'):\n"
        "        all_.start([sys.executable, '-S', '-c', text], clean_environment(), Path(sys.argv[1]), "
        "Path(sys.argv[1], 'log'))\n"
        "    while not Path(sys.argv[1], 'log').read_text():\n"
        "        time.sleep(0.05)\n"
        "    print('ready', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    assert len(in_folder(tmp_path)) == 3
    parent.kill()
    parent.wait()
    until(lambda: not in_folder(tmp_path))


def test_processes_end_with_their_context(tmp_path: Path) -> None:
    with closing(Processes()) as processes:
        sleeps = processes.start(["sleep", "60"], clean_environment(), tmp_path, tmp_path / "log")
        fails = processes.start(["sh", "-c", "exit 3"], clean_environment(), tmp_path, tmp_path / "log")
        fails.wait()
        assert (processes.poll(sleeps), processes.poll(fails)) == (None, 3)
    assert processes.poll(sleeps) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_during_a_start_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Protects the machine from a process that nobody knows of: the signal comes when it runs and is not yet noted."""
    code = (
        "import os, signal, subprocess, sys, threading, time; from pathlib import Path\n"
        "from contextlib import closing; from slurm_ones.demo.local_slurm import *\n"
        "folder = Path(sys.argv[1])\n"
        "class Slow(subprocess.Popen):\n"
        "    def __init__(self, command, **more):\n"
        "        super().__init__(command, **more)\n"
        "        if 'sleep' in command:\n"
        "            os.kill(os.getpid(), int(sys.argv[2]))\n"
        "            time.sleep(0.5)\n"
        "subprocess.Popen = Slow\n"
        "begin = threading.Thread.start\n"
        "def start_slowly(thread):\n"
        "    begin(thread)\n"
        "    time.sleep(0.3)\n"
        "threading.Thread.start = start_slowly\n"
        "try:\n"
        "    with closing(Processes()) as all_:\n"
        "        all_.start(['sleep', '60'], clean_environment(), folder, folder / 'log')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(int(number))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    end = time.monotonic() + 10
    while (left := in_folder(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    said = ("interrupted\n", 0) if number == signal.SIGINT else ("", -signal.SIGKILL)
    assert (done.stdout, done.returncode) == said and not left


def test_nothing_is_started_at_the_end(tmp_path: Path) -> None:
    """A call of the companion that comes late starts nothing that nobody would end."""
    with closing(Processes()) as processes:
        pass
    with pytest.raises(RuntimeError):
        processes.start(["sleep", "60"], clean_environment(), tmp_path, tmp_path / "log")


class TestRemoteClient:
    """The companion's end of the door."""

    @pytest.fixture
    def site(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedSite]:
        site = SimulatedSite()
        served = Served(site.owner, threading.RLock())
        for name, value in served.env.items():
            monkeypatch.setenv(name, value)
        yield site
        served.close()

    def test_answers_and_errors_come_through(self, site: SimulatedSite) -> None:
        client = RemoteClient()
        array_id = site.blocks("--array=0-3%1", "--nodes=1", "--gres=gpu:1")
        assert client.version() == site.owner.version()
        assert client.job(Task(array_id, 0)).running
        assert client.snapshot().jobs == site.owner.snapshot().jobs
        client.hold_waiting(array_id)
        assert site.owner.job(Task(array_id, 1)).held
        with pytest.raises(UnknownJob, match="99"):
            client.job(99)
        with pytest.raises(AttributeError):
            client.forbid_shape(1)
        with pytest.raises(Refused, match="no call"):
            client._ask("__class__")

    def test_strangers_are_not_heard(self, site: SimulatedSite, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who does not know the key; and the door goes on for who does."""
        port, _, key = os.environ[remote.DOOR].partition(" ")
        monkeypatch.setenv(remote.DOOR, f"{port} {'00' * 16}")
        with pytest.raises(Unreachable):
            RemoteClient()
        monkeypatch.setenv(remote.DOOR, f"{port} {key}")
        assert RemoteClient().version() == (26, 5)
        monkeypatch.delenv(remote.DOOR)
        with pytest.raises(Refused, match="slurm-ones demo"):
            RemoteClient()

    @pytest.mark.parametrize("said", [b"", struct.pack("!i", 300) + bytes(300)])
    def test_a_stranger_keeps_nobody_out(self, site: SimulatedSite, said: bytes) -> None:
        """Protects the companion from other users of the machine: one that says nothing, or far too much."""
        port = int(os.environ[remote.DOOR].partition(" ")[0])
        heard: list[object] = []
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            time.sleep(0.2)
            companion = threading.Thread(target=lambda: heard.append(RemoteClient().version()), daemon=True)
            companion.start()
            companion.join(60.0)
        assert heard == [(26, 5)]


def test_the_address_is_found_behind_warnings() -> None:
    """Protects a demo whose Python or libraries have something to say first; half a line is no address."""
    assert address_in("x.py:1: DeprecationWarning: y\nThe live page: http://127.0.0.1:5/?token=t\nCtrl-C") == (
        "http://127.0.0.1:5/?token=t"
    )
    assert address_in("The live page: http://127.0.0.1:5/?tok") == ""


def test_no_command_of_slurm_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a user's real jobs: those of a demo have numbers that may be theirs."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(local_slurm, "SCRIPT", "gone.py")
    with closing(Processes()) as processes:
        slurm = LocalSlurm(tmp_path, processes, [DemoJob("one", 0.0, 1)])
        slurm.look()
        end = time.monotonic() + 60
        while not (out := sorted(tmp_path.glob("slurm-*.out"))) or "no such file" not in out[0].read_text():
            assert time.monotonic() < end
            slurm.look()
            time.sleep(0.05)
    env = slurm._env
    found = subprocess.run(["sh", "-c", "command -v scancel"], env=env, capture_output=True, text=True, check=True)
    assert found.stdout == f"{tmp_path}/bin/scancel\n"
    assert "SLURM_JOB_ID" not in env


def test_what_a_job_cancels_is_cancelled(tmp_path: Path) -> None:
    """Protects the GPUs of the others: tasks that wait after the end of their job would be started for nothing."""
    with closing(Processes()) as processes:
        slurm = LocalSlurm(tmp_path, processes, [DemoJob("one", 0.0, 1)], simulated=0)
        slurm.look()
        (one,) = slurm.submitted
        subprocess.run(["scancel", "--state=PENDING", str(one.job_id)], env=slurm._env, check=True)
        assert len(slurm.client.tasks(one.job_id)) > 1
        slurm.look()
        assert not [job for job in slurm.client.tasks(one.job_id) if job.pending and not job.ended]
        assert subprocess.run(["scontrol", "requeue", "1"], env=slurm._env, capture_output=True).returncode == 1


def test_samples_are_counted(tmp_path: Path) -> None:
    one = Submitted(DemoJob("one", 0.0, 2, samples=4), 7, [])
    folder = tmp_path / "ones-7"
    folder.mkdir()
    lines = [
        {"epoch": 0, "samples": [0, 1]},
        {"begin": 3},
        {"epoch": 0, "samples": [2, 3]},
        {"epoch": 1, "samples": [3]},
    ]

    def write(more: dict[str, object]) -> tuple[bool, str]:
        (folder / "trace-0-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, more]))
        return samples_line(one, tmp_path)

    assert write({"epoch": 1, "samples": [0, 1, 2]})[0]
    good, words = write({"epoch": 1, "samples": [0, 0]})
    assert not good and "2 were not used, and 1 more than once" in words


class TestCommand:
    """What it says where it cannot go on."""

    def test_a_folder_in_use(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        done = CliRunner().invoke(app, ["demo", f"--directory={tmp_path}"])
        assert (done.exit_code, list(tmp_path.iterdir())) == (2, [tmp_path / "mine"])
        assert "is not empty: name a folder that is new or empty" in done.output

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = CliRunner().invoke(app, ["demo", f"--directory={tmp_path / 'file'}"])
        assert done.exit_code == 2 and "cannot be used" in done.output

    def test_a_folder_that_no_address_can_name(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(app, ["demo", f"--directory={tmp_path / 'what?'}"])
        assert done.exit_code == 2 and "name another folder" in done.output
        assert list(tmp_path.iterdir()) == []
