"""Blocks that are too few for their strategy wait for others, and end when they are told to."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ones_wrapper.files.job_io import STOP, OwnerRequests
from ones_wrapper.group import Group
from ones_wrapper.membership.files import HotFolder
from ones_wrapper.membership.meeting import PeersLostError
from ones_wrapper.membership.too_few import wait
from ones_wrapper.process.exit_codes import DONT_RESTART, STOP_CODE
from ones_wrapper.process.hooks import FLAGS
from ones_wrapper.protocol import First
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import ARRAY, Job
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.strategies import optimus

SOON_S = 20.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """It trains on one mesh, of one rank or of four."""
    more = {"HURRY": str(tmp_path / "hurry"), "PACE_MS": "300", "SQUARES": "1"}
    script = Path(str(optimus.__file__)).with_name("optimus_script.py")
    job = Job(tmp_path / "job", script=script, PYTHONPATH=str(Path(__file__).parents[3]), **more)
    yield job
    job.kill()


def waiting(job: Job) -> ForkedBlock:
    """A block of three ranks that is left, and waits."""
    job.start(0)
    job.wait(First)
    job.blocks[0].kill()
    block = job.start(1, 3)
    while "waiting for other blocks of the job" not in block.errors:
        assert not block.ended(), block.errors
        time.sleep(0.02)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGUSR2)], ids=lambda number: number.name)
def test_told_to_end(job: Job, number: signal.Signals) -> None:
    """Protects the queue from a block that scancel or its time limit ends; another one may go on with the job."""
    block = waiting(job)
    block.signal(number)
    assert block.end(SOON_S) == STOP_CODE, block.errors
    assert not HotFolder(job.directory, ARRAY).over()


@pytest.mark.slow
def test_the_owner_ends_the_job(job: Job) -> None:
    """Protects the owner's word: it counts also where nobody trains."""
    block = waiting(job)
    (job.directory / STOP).touch()
    assert block.end(SOON_S) == DONT_RESTART, block.errors
    assert not (job.directory / STOP).exists()
    assert HotFolder(job.directory, ARRAY).over()


def one_is_told(group: Group, directory: str) -> object:
    """What `wait` says to a rank whose block was told to end, and to one of another block."""
    blocks = SimpleNamespace(proposal=lambda: (0, 0), obey=lambda *_: False)
    FLAGS.stop = group.rank == 1
    try:
        return wait(group, blocks, OwnerRequests(Path(directory)))  # type: ignore[arg-type]
    except PeersLostError as why:
        return str(why)
    finally:
        FLAGS.stop = False


def test_one_of_several_ends(teams: dict[int, Team], tmp_path: Path) -> None:
    """Protects a block at its time limit from waiting for those that have time left; these look again."""
    assert teams[2].run(one_is_told, str(tmp_path)) == ["another block ends", STOP_CODE]
