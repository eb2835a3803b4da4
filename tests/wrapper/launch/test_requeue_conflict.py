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
    """Protects everybody else: no false alarm from our own handlers, nor from the defaults."""
    assert requeue_conflict({}) == ""
    FLAGS.install()
    assert requeue_conflict({"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "local"}) == ""


def test_submitit_by_its_environment() -> None:
    """Protects jobs whose ranks are not submitit's own process: its handlers are not in them."""
    assert "SUBMITIT_EXECUTOR=slurm" in requeue_conflict({"SUBMITIT_EXECUTOR": "slurm"})


def test_submitit_by_its_handler() -> None:
    """Protects a script that submitit calls directly, whatever signal it was told to use."""
    signal.signal(signal.SIGUSR2, method("submitit.core.job_environment", "checkpoint_and_try_requeue"))
    assert "checkpoint_and_try_requeue handles SIGUSR2" in requeue_conflict({})


LIGHTNING = [f"{package}.trainer.connectors.signal_connector" for package in ("pytorch_lightning", "lightning.pytorch")]


@pytest.mark.parametrize("module", LIGHTNING)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_lightning_by_its_handler(module: str, number: signal.Signals) -> None:
    """Protects against Lightning's requeue, under both of its names and any signal; the message says what to write."""
    signal.signal(number, Compose(method(module, "_slurm_sigusr_handler_fn")))
    assert "SLURMEnvironment(auto_requeue=False)" in requeue_conflict({})


@pytest.mark.parametrize("module", LIGHTNING)
def test_lightning_behind_our_handlers(module: str) -> None:
    """Protects the order in which it really comes: ours have SIGUSR1 then, and it composes SIGTERM alone."""
    FLAGS.install()
    notifier, bypass = method(module, "_sigterm_notifier_fn"), method(module, "_sigterm_handler_fn")
    signal.signal(signal.SIGTERM, Compose(notifier, bypass, signal.getsignal(signal.SIGTERM)))
    assert "Lightning" in requeue_conflict({})


@pytest.mark.parametrize("module", LIGHTNING)
def test_lightning_with_its_requeue_switched_off(module: str) -> None:
    """Protects those who did what the message says."""
    FLAGS.install()
    notifier = method(module, "_sigterm_notifier_fn")
    signal.signal(signal.SIGTERM, Compose(notifier, signal.getsignal(signal.SIGTERM)))
    assert requeue_conflict({}) == ""


def test_handlers_that_hold_themselves() -> None:
    """Protects the start of a run from looking for ever."""
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
