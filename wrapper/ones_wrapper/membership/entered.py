"""Entry of a process into its run: its block's ranks meet, and in a job of blocks also the ranks of other blocks.

If each change of ranks begins a term, they meet before the script's first line: a Trainer copies the number of ranks
when made. Otherwise they meet in `init`, while other blocks train.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ones_wrapper.files.job_io import OrderReader, read_spec
from ones_wrapper.files.places import find_job_directory, find_spool
from ones_wrapper.files.resume import prepare_job_directory
from ones_wrapper.group import Group, TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.blocks import Blocks
from ones_wrapper.membership.entrance import NextTermError, come_in, wait_for_term
from ones_wrapper.membership.files import Leader
from ones_wrapper.membership.link import Link
from ones_wrapper.membership.machine import BlockState, Carrier
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError, is_peer_lost
from ones_wrapper.membership.node_check import NodeCheck
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.job_network import PLACE, JobNetwork
from ones_wrapper.network.proof import ProofError
from ones_wrapper.network.rendezvous import meet
from ones_wrapper.network.store import GroupStore
from ones_wrapper.process.block import Block, own_block
from ones_wrapper.process.ending import leave
from ones_wrapper.process.exit_codes import NEXT_TERM, PEER_LOST
from ones_wrapper.process.hooks import FLAGS, on_error
from ones_wrapper.process.log import log
from ones_wrapper.process.placement import Placement
from ones_wrapper.protocol import HOT

_MEET_S = 300.0
"""Seconds in which the ranks of a block must meet; torch has the same limit."""
_ELSEWHERE = (
    "a Trainer must start again at each change of ranks, and the other blocks train on without a new start: "
    "all blocks of a job must run the same script"
)


class Entered:
    """Ranks that have met, before `init` makes a run of them."""

    def __init__(self, group: Group, block: Block | None = None) -> None:
        """`block` is the block whose ranks are in `group`; None in a plain job."""
        self.group, self._block, self._local = group, block, group.rank
        self.blocks: Blocks | None = None
        """The job's blocks, once these ranks have found them; None in a plain job."""
        self.early = False
        """True if the ranks met before the script, and torch.distributed is not set up yet."""
        self.begun = False

    @property
    def leads(self) -> bool:
        """True if these ranks begin a term."""
        return self.blocks is None or self.blocks.machine.settled is not BlockState.ADMITTED

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Context for the time before `init` makes the run. Ends the process if the job is over, or if other blocks are
        lost."""
        block = self._block
        assert block is not None
        try:
            yield
        except NextTermError:
            raise SystemExit(NEXT_TERM) from None
        except NotWantedError as why:
            if self._local == 0:
                log(f"block {block.task} ends: {why}")
            raise SystemExit(0) from None
        except (StoreLostError, PeersLostError) as why:  # perhaps only on some ranks of the block: all look again
            log(f"block {block.task}: the blocks that it found are lost ({why}); its ranks start again")
            self._give_up(str(why))
            raise SystemExit(PEER_LOST) from None
        except RuntimeError as error:  # ranks of this block are gone, which say why, or of its peers
            if not is_peer_lost(error) or (self.blocks is not None and not self.blocks.has_others):
                raise
            log(
                f"block {block.task}: other blocks are lost ({str(error).splitlines()[0][:300]}); its ranks start again"
            )
            self._give_up("ranks were lost as they began")
            raise SystemExit(PEER_LOST) from None

    def _give_up(self, why: str) -> None:
        if self.blocks is not None and self.blocks.has_others:
            self.blocks.give_up(why)

    def keep_ranks(self) -> None:
        """Make each change of ranks begin a term, for a framework that stores rank and world size. Ends this block if
        members send their state from memory instead."""
        if self.blocks is None:
            return
        self.blocks.machine.carrier = Carrier.CHECKPOINT
        if not self.leads:
            with self.losing():
                raise NotWantedError(_ELSEWHERE)

    def set_up(self, group: Group) -> None:
        """Take over control group and device from `group`, because torch.distributed is set up only after the ranks
        have met."""
        mine = self.group
        assert isinstance(mine, TorchGroup) and isinstance(group, TorchGroup)
        connections.keep(mine.control)
        mine.become(mine.rank, mine.world, mine.nodes, mine.gpus_per_node, group.control, None)
        mine.device, self.early = group.device, False

    def failed(self, error: BaseException) -> tuple[int, str] | None:
        """Return (exit code, reason) if other blocks are lost, for an error before `init` has made the run; None for
        other errors. Not collective."""
        blocks = self.blocks
        if blocks is None or self.begun or not blocks.has_others or not is_peer_lost(error):
            return None
        why = str(error).splitlines()[0][:300]
        blocks.machine.go(BlockState.LOST)
        blocks.give_up(why)
        return PEER_LOST, f"other blocks are lost ({why}); its ranks start again"


def enter_before_script() -> Entered | None:
    """Let a block's ranks meet before the script, if the last run reported that each change of ranks begins a term;
    otherwise return None.

    Afterwards the launcher's variables, from which the script reads its rank, count the ranks of all blocks. CUDA and
    torch.distributed are not set up here.
    """
    env = os.environ
    again = env.pop("ONES_NEXT_TERM", "")  # not for jobs that this one submits
    if (block := own_block(env)) is None:
        return None
    directory = find_job_directory(env, Path.cwd())
    spec = read_spec(directory)
    by_terms = bool(again) or (spec is not None and not spec.hot)
    rank, world, local, each = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    store = GroupStore(meet(env, JobNetwork.found(env, directory / HOT)), "block", _MEET_S) if world > 1 else None
    if store is not None:  # the first rank decides: a shared file system may show a spec only to some nodes
        if rank == 0:
            store.set("by-terms", str(int(by_terms)))
            with suppress(TimeoutError):  # the place ends with its last rank, perhaps before the others have come
                store.wait([f"came-{other}" for other in range(1, world)])
        else:
            store.set(f"came-{rank}", "")
        by_terms = store.get("by-terms") == b"1"
    if not by_terms:
        return None
    try:
        control = connections.raw_group(store, rank, world, _MEET_S) if store is not None else None
    except ProofError as error:
        log(f"block {block.task}: {error}; its ranks start again")
        raise SystemExit(PEER_LOST) from None
    group = TorchGroup(rank, world, local, world // each, each, torch.device("cpu"), control)
    entered = enter_block(group, block)
    entered.early = True
    if (blocks := entered.blocks) is None:
        return entered
    if blocks.present is not None:  # the script copies these ranks
        blocks.machine.carrier = Carrier.CHECKPOINT
    if spec is not None and spec.limits is not None:
        limits = spec.limits
        blocks.fits = lambda world: limits.at(world) is not None
    return entered


def enter_block(group: TorchGroup, block: Block) -> Entered:
    """Find the members that train, or become the leader. Collective over `group`, which has the block's ranks.

    Afterwards `group` has the ranks with which this block begins. Ends the process if the job is over, or if ranks must
    start again.
    """
    env = os.environ
    directory = find_job_directory(env, Path.cwd())
    local, armed = group.rank, FLAGS.armed
    entered = Entered(group, block)

    def orders(term: int) -> OrderReader:
        return OrderReader(directory, term, find_spool(env), block.array)

    def abandon(why: str) -> None:
        log(f"block {block.task}: {why}; its ranks start again")
        leave(PEER_LOST)

    with entered.losing():
        if local == 0:
            prepare_job_directory(directory, env, Path.cwd())
        found = come_in(group, directory, block, env)
        link = Link(found.board, f"{found.me.uid}-{local}", lambda: FLAGS.stop, abandon)
        link.start()
        try:
            group.maximum([0])  # all ranks have sent a heartbeat
            check = NodeCheck(group, found.folder.path, block.array)
            if found.state is BlockState.LEADING and found.present is None:
                check.take()
            if found.state is BlockState.ADMITTED:
                FLAGS.armed = True
                if why := check.why_unfit():
                    if local == 0:
                        found.board.put(f"unfit-{found.me.uid}", f"{block.task}: {why}")
                    raise NotWantedError(why)
                wait_for_term(group, found, link, lambda: FLAGS.stop)
                FLAGS.armed = armed
            if found.present is not None:
                _tell_script(group, block, found.leader, found.present.nodes_before(found.me.uid))
            entered.blocks = Blocks(group, found, link, orders, lambda: FLAGS.stop)
        except BaseException:
            link.stop()
            raise
    on_error(entered.failed)
    return entered


def _tell_script(group: TorchGroup, block: Block, leader: Leader, nodes_before: int) -> None:
    """Set the launcher's variables to the present ranks. init_process_group uses the leader's board in place of the
    store of torchrun's agents. TORCHELASTIC_RESTART_COUNT, which some releases of torch put into the store's keys, is
    set to the term: it must be equal on all ranks."""
    env = os.environ
    local, each, node = (int(env[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    env.update(Placement(group.rank, group.world, local, each, nodes_before + node, group.nodes).env())
    env.update(TORCHELASTIC_RUN_ID=str(block.array), TORCHELASTIC_RESTART_COUNT=str(leader.term))
    env.update(MASTER_ADDR=leader.host, MASTER_PORT=str(leader.port), TORCHELASTIC_USE_AGENT_STORE="True")
    env[PLACE] = f"{leader.host} {leader.port} {leader.place}"
