"""Blocks that are too few for their strategy wait for others, and end when they are told to."""

from __future__ import annotations

import signal
from collections.abc import Callable
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
from tests.waiting import until
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import ARRAY, Job, scripted
from tests.wrapper.membership.forked import ForkedBlock
from tests.wrapper.strategies import optimus_script

SOON_S = 20.0


@pytest.fixture
def job(tmp_path: Path, kept: Callable[[Job], Job]) -> Job:
    """It trains on one mesh, of one rank or of four."""
    return kept(scripted(tmp_path / "job", optimus_script, 300, SQUARES="1"))


def waiting(job: Job, restart: int) -> ForkedBlock:
    """A block of three ranks that is left, and waits."""
    block = job.start(1, 3, restart)
    until(lambda: "waiting for other blocks of the job" in block.errors, job.errors)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGUSR2)], ids=lambda number: number.name)
def test_told_to_end(job: Job, number: signal.Signals) -> None:
    """By scancel or its time limit: another one may go on with the job; or by the owner, who ends it."""
    job.start(0)
    job.wait(First)
    job.blocks[0].kill()
    block = waiting(job, 0)
    block.signal(number)
    assert block.end(SOON_S) == STOP_CODE, block.errors
    assert not HotFolder(job.directory, ARRAY).over()
    block = waiting(job, 1)
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
    """A block at its time limit waits for nobody that has time left; these look again."""
    assert teams[2].run(one_is_told, str(tmp_path)) == ["another block ends", STOP_CODE]
