"""How the ranks of a block come to the run of their job: they lead it or find those who train; or they end, or have to
start again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ones_wrapper.group import TorchGroup
from ones_wrapper.hot_run import HotRun
from ones_wrapper.job_io import log
from ones_wrapper.launch import find_job_directory, prepare_job_directory
from ones_wrapper.launch.ending import leave
from ones_wrapper.launch.process_hooks import FLAGS
from ones_wrapper.launch.restart_policy import NEXT_TERM, PEER_LOST
from ones_wrapper.membership import rescue
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.board import BoardLostError
from ones_wrapper.membership.entrance import NextTermError, come_in, wait_for_term
from ones_wrapper.membership.files import Block
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError, is_peer_lost
from ones_wrapper.protocol import Spec
from ones_wrapper.run_settings import Identity, Settings
from ones_wrapper.too_few import wait_for_others


def meet(
    group: TorchGroup,
    settings: Settings,
    started: float,
    block: Block,
    spec_of: Callable[[], Spec],
    fits: Callable[[int], bool] = lambda world: True,
) -> HotRun:
    """Find those who train, or lead. Collective over the block. `spec_of` is called once the group's ranks are
    those with which this block begins; `fits` says whether the strategy can use so many. Leaves the process where
    the job is over, and where ranks have to start again.
    """
    directory = find_job_directory(os.environ, Path.cwd())
    if group.rank == 0:
        prepare_job_directory(directory, os.environ, Path.cwd())

    def ready(term: int) -> None:
        rescue.wait(directory / "hot", term)

    local, armed = group.rank, FLAGS.armed
    blocks: Blocks | None = None
    try:
        found, leads = come_in(group, directory, block, os.environ, ready)
        if not leads:
            FLAGS.armed = True
            wait_for_term(group, found, lambda: FLAGS.stop, lambda why: leave(PEER_LOST))
            FLAGS.armed = armed
        name = f"{block.task}.{block.restart}.{local}"
        identity = Identity(block.array, found.leader.term, leads, name)
        blocks = Blocks(group, found)
        if leads and found.leader.term > 0 and not fits(group.world):
            wait_for_others(group, blocks, directory, fits)
        return HotRun(group, spec_of(), settings, started, identity, blocks)
    except NextTermError:
        raise SystemExit(NEXT_TERM) from None
    except NotWantedError as why:
        if local == 0:
            log(f"block {block.task} ends: {why}")
        raise SystemExit(0) from None
    except (BoardLostError, PeersLostError) as why:  # on some ranks of the block, perhaps: all look again
        log(f"block {block.task}: the others that were found are gone ({why}); it looks again")
        raise SystemExit(PEER_LOST) from None
    except RuntimeError as error:  # ranks are gone: of this block, which say why, or of those that it began with
        if not is_peer_lost(error) or (blocks is not None and blocks.alone):
            raise
        log(f"block {block.task}: others are lost ({str(error).splitlines()[0][:300]}); it looks again")
        raise SystemExit(PEER_LOST) from None
