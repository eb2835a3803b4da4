"""Others who would requeue the same job are noticed.

The handlers here have the modules and names of submitit 1.5.4 and Lightning 2.6.6, as read in their sources; where
submitit is installed, its own handler is asked too.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ones_wrapper.process.hooks import FLAGS, requeue_conflict


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Leave the process's signal handlers as they were."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def method(module: str, name: str) -> Any:
    """A bound method that looks as if it came from a module that is not there."""

    def handler(self: object, number: int, frame: object) -> None: ...

    handler.__module__, handler.__name__ = module, name
    return getattr(type("Owner", (), {name: handler})(), name)


class Compose:
    """As Lightning's: passes a signal on to others."""

    def __init__(self, *handlers: Any) -> None:
        self.signal_handlers = list(handlers)

    def __call__(self, number: int, frame: object) -> None: ...


def test_an_ordinary_job_is_left_alone() -> None:
    assert requeue_conflict({}) == ""
    FLAGS.install()
    assert requeue_conflict({"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "local"}) == ""


def test_submitit() -> None:
    """By its environment, in ranks that are not its own process, and by its handler of any signal."""
    assert "SUBMITIT_EXECUTOR=slurm" in requeue_conflict({"SUBMITIT_EXECUTOR": "slurm"})
    signal.signal(signal.SIGUSR2, method("submitit.core.job_environment", "checkpoint_and_try_requeue"))
    assert "checkpoint_and_try_requeue handles SIGUSR2" in requeue_conflict({})


LIGHTNING = [f"{package}.trainer.connectors.signal_connector" for package in ("pytorch_lightning", "lightning.pytorch")]


@pytest.mark.parametrize("module", LIGHTNING)
def test_lightning(module: str) -> None:
    """Under any signal; behind our handlers, where it composes SIGTERM alone; not if its requeue is switched off."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        before = signal.signal(number, Compose(method(module, "_slurm_sigusr_handler_fn")))
        assert "SLURMEnvironment(auto_requeue=False)" in requeue_conflict({})
        signal.signal(number, before)
    FLAGS.install()
    ours, notifier = signal.getsignal(signal.SIGTERM), method(module, "_sigterm_notifier_fn")
    for more, said in (([method(module, "_sigterm_handler_fn")], True), ([], False)):
        signal.signal(signal.SIGTERM, Compose(notifier, *more, ours))
        assert ("Lightning" in requeue_conflict({})) is said


def test_handlers_that_hold_themselves() -> None:
    handler = Compose()
    handler.signal_handlers = [handler, handler]
    signal.signal(signal.SIGUSR1, handler)
    assert requeue_conflict({}) == ""


SUBMITIT = """
from submitit.slurm.slurm import SlurmJobEnvironment
from ones_wrapper.process.hooks import requeue_conflict
assert not requeue_conflict({})
SlurmJobEnvironment()._handle_signals(None, None)
print(requeue_conflict({}))
"""


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
def test_submitit_itself() -> None:
    """Protects against a name that changed in submitit."""
    found = subprocess.run([sys.executable, "-c", SUBMITIT], capture_output=True, text=True, check=True)
    assert "checkpoint_and_try_requeue" in found.stdout
