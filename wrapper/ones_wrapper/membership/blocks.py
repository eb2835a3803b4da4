"""One rank in a job of blocks: it begins or joins a term, prepares for plans, and changes to them at step
boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ones_wrapper.devices import streams
from ones_wrapper.devices.room import make_room
from ones_wrapper.files.job_io import OrderReader
from ones_wrapper.files.node_memory import MemoryFolder, folder_for
from ones_wrapper.group import RankError, TorchGroup
from ones_wrapper.membership import connections
from ones_wrapper.membership.back_off import BackOff
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.coming import LOST, Coming, find_coming
from ones_wrapper.membership.connections import Former, form_s, in_time, try_groups
from ones_wrapper.membership.coordinator import DEAD_S, Coordinator
from ones_wrapper.membership.entrance import MODE, FoundBlocks, say_ready
from ones_wrapper.membership.files import Leader
from ones_wrapper.membership.link import Link
from ones_wrapper.membership.machine import LAST, BlockMachine, BlockState, Carrier
from ones_wrapper.membership.meeting import NotWantedError, PeersLostError
from ones_wrapper.membership.plan import Member, Plan, decode_plan
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.transfer import (
    Received,
    Receiver,
    SendersLostError,
    TransferError,
    patience_s,
    send,
    senders,
    state_for,
    unpacked,
)
from ones_wrapper.process.log import log

Tensors: TypeAlias = dict[str, torch.Tensor]
Collected: TypeAlias = Callable[[], tuple[Tensors, dict[str, Any]]]
"""Function that returns the state as (tensors, everything else)."""
TakeOver: TypeAlias = Callable[[dict[str, Any], Tensors], None]
"""Function that loads everything but the tensors of a state. It is also given the tensors, which have been received
already."""

VERDICT_S = 30.0
"""Seconds that a new rank waits for the leader's decision on a change, in addition to the time to send the state."""
LOOK_S = 0.5
"""Longest time, in seconds, after which the first rank of a joining block reports to the block's other ranks."""
LOST_S = DEAD_S + 2.0
"""Seconds in which the board must confirm that this block has lost ranks, if no other block trains."""
GIVE_UP_S = 2.0
"""Longest time, in seconds, that a rank takes to announce the loss of other ranks."""
THROUGH_S = 10.0
"""Longest time, in seconds, for which a leader that leaves keeps its board for the other ranks."""


@dataclass(frozen=True)
class Change:
    """Result of a change to a plan."""

    plan: Plan
    leaves: bool
    """True if this rank's block is not in the plan."""
    bytes: int
    """Bytes of state that were sent to all new blocks."""
    transfer_s: float
    began: float
    rest: dict[str, Any]
    """State besides the tensors, on a new rank; empty on ranks that were members."""


class Blocks:
    """View of one rank on its job of blocks. Methods are not collective unless they say so."""

    def __init__(
        self,
        group: TorchGroup,
        found: FoundBlocks,
        link: Link,
        orders: Callable[[int], OrderReader],
        leaving: Callable[[], bool],
    ) -> None:
        """`orders` returns a reader for a term's orders. `leaving` returns True if this block is asked to end."""
        self.folder = found.folder
        self.block = found.block
        self.leader = found.leader
        self._group = group
        self._board = found.board
        self._address = found.address
        self.local_rank = found.local
        """This process's number within its block."""
        self._backend: str = ""
        self._me = found.me
        self.present = found.present
        """The present membership; None before this block has joined."""
        self.machine = BlockMachine(found.state, Carrier.MEMORY)
        self.stood_still_at = found.stood_still_at
        """Unix time at which training paused for this term; 0 if the term was not announced."""
        self._former: Former | None = None
        self._told = ("", "")
        self._coordinator: Coordinator | None = None
        self.link = link
        self.may_leave: Callable[[], bool] = lambda: True
        """Function that returns True if ranks may leave at the next boundary."""
        self.fits: Callable[[int], bool] = lambda world: True
        """Function that returns True if the script's strategy can use this number of ranks."""
        self._orders, self._leaving = orders, leaving
        if self.present is not None and group.rank == 0:
            self._coordinate(self.present)  # so that losses are found from now on

    @property
    def hot(self) -> bool:
        """True if blocks that join get the state from memory. If False, each change begins a term from a checkpoint."""
        return self.machine.carrier is Carrier.MEMORY

    @property
    def alone(self) -> bool:
        """True if no other block trains with this one."""
        return self.present is None or len(self.present.members) == 1

    @property
    def has_others(self) -> bool:
        """True if other blocks train with this one, or if this one is about to join them. An error about a lost peer is
        then not due to the script."""
        return not self.alone or self.machine.settled is BlockState.ADMITTED

    def lost_ranks(self) -> bool:
        """Return True if an error about a lost peer is due to lost ranks. In a single block the script may be the
        cause: wait up to `LOST_S` seconds until the board reports a lost rank or a script's error (`post_failure`)."""
        if self.has_others:
            return True
        until = time.monotonic() + LOST_S
        while self._group.world > 1 and time.monotonic() < until:
            lost = self.link.lost  # first: a leader that fails posts that before its board ends
            if self.link.heard(f"failed-{self._me.uid}") is not None:
                return False
            if lost:
                return True
            time.sleep(0.01)
        return False

    def post_failure(self) -> None:
        """Post on the board, for the block's other ranks, that the script failed on this rank."""
        if self._group.world > 1 and not self.has_others:
            with suppress(StoreLostError):
                self._board.put(f"failed-{self._me.uid}", "1")

    def trains(self, max_local: int) -> None:
        """Record that torch.distributed is set up. `max_local` is this rank's largest local batch in samples.
        Collective."""
        self._backend = dist.get_backend_config()
        each, members = iter(self._group.gather(max_local)), []
        for member in self.present.members if self.present is not None else (self._me,):
            members.append(replace(member, max_local=min(islice(each, member.ranks))))
        if self.present is None:
            self._me = members[0]
        else:
            self.present = replace(self.present, members=tuple(members))

    def lead_first(self, generation: int, carrier: Carrier) -> Plan:
        """Return the first membership of a term, with the number `generation`: the announced blocks, or only this
        block. Later changes use `carrier`."""
        self.machine.carrier = carrier
        self.present = plan = self.present or Plan(generation, self.leader.term, (self._me,), why="first")
        if self.hot:
            self._form_after(plan)
        if self._group.rank == 0:
            if self._coordinator is None:
                self._coordinate(plan)
            self._take_in()
        return plan

    def close(self) -> None:
        """Stop the threads of the membership, because training has finished or this block leaves."""
        self.link.stop()
        if self._coordinator is not None:
            self._coordinator.stop()

    def give_up(self, why: str) -> None:
        """Post on the board that this membership is lost, and announce a term with the remaining members."""

        def say() -> None:
            self.link.stop()
            self.announce_left()
            self._board.put("lost", why)

        with suppress(StoreLostError):
            in_time(say, GIVE_UP_S)

    def announce_left(self) -> None:
        """Announce a term with the remaining members, unless one is announced already. The leader announces the members
        that are not lost. If the leader's board is gone, another block announces all members but the leader."""
        present, term, newest = self.present, self.leader.term, self.folder.newest()
        if present is None or newest is None or newest.term != term or find_coming(self.folder, newest) is not None:
            return
        if self._coordinator is not None:
            left = self._coordinator.left()
        elif self.local_rank or present.members[0].uid == self._me.uid or self._leader_answers():
            return
        else:
            left = present.members[1:]
        if len(left) > 1:
            generation = (self.machine.plan or present).generation + 1
            coming = Coming(Plan(generation, term + 1, left, why=LOST), time.time(), time.time())
            if why := self.folder.announce(coming.fields()):
                log(why)

    def _leader_answers(self) -> bool:
        try:
            self._board.read("lost")
        except StoreLostError:
            return False
        return True

    # -- what the boundary asks -------------------------------------------------------------------------------------

    def proposal(self) -> tuple[int, int]:
        """Return (generation of the newest plan, generation to change to now), with 0 for none. Ranks other than rank 0
        return 0 for both."""
        if self._coordinator is None:
            return 0, 0
        return self._coordinator.proposal(self._may)

    def _may(self, coming: Plan) -> bool:
        all_stay = self.present is not None and not self.present.newcomers(coming)
        return (self.hot and all_stay) or self.may_leave()

    def noted(self) -> list[str]:
        """Return the notes since the last call about nodes that new blocks found unfit; empty except on the leader's
        rank 0."""
        notes = self._coordinator.notes if self._coordinator is not None else ()
        return [notes.popleft() for _ in range(len(notes))] if notes else []

    def look(self) -> None:
        """Make the leader read its orders now."""
        if self._coordinator is not None:
            self._coordinator.look()

    def trains_as(self, tasks: tuple[int, ...] | None) -> bool:
        """Return True if `tasks` are None, or those of the present members, or that of this block before it has
        joined."""
        train = self.present.tasks if self.present is not None else (self._me.task,)
        return tasks is None or set(tasks) == set(train)

    def stops(self) -> bool:
        """Return True if a signal to this block stops the whole job, because no other block continues."""
        if self._coordinator is not None and self._coordinator.alive:
            return self._coordinator.stop_all
        return self.alone

    def stop_all(self) -> bool:
        """Return True if all blocks are asked to end."""
        return self._coordinator is not None and self._coordinator.stop_all

    def obey(self, newest: int, change: int) -> bool:
        """Prepare for the plan of generation `newest`. Return True if the ranks change to generation `change` now.
        Raises `PeersLostError`."""
        if self.link.lost:
            raise PeersLostError(self.link.lost)
        if self.machine.state in LAST:
            return False
        if newest and (self.machine.plan is None or self.machine.plan.generation != newest):
            self._prepare(newest)
        plan = self.machine.plan
        return change > 0 and plan is not None and plan.generation == change

    def shapes(self) -> str:
        """Return the shapes of the models' input, as the members posted them (`warm_up.Shapes`); empty if unknown.
        Raises `StoreLostError`."""
        return self._board.read("shapes") or ""

    def ordered(self) -> tuple[int, int]:
        """Return (global batch in samples, number of blocks) of the newest order; each is 0 if the order does not set
        it."""
        order = self._orders(self.leader.term).poll()
        return (order.batch or 0, len(order.blocks or ())) if order is not None else (0, 0)

    def tell_shapes(self, text: str) -> None:
        """Post the shapes of the models' input on each term's board, for blocks that join. Called on rank 0."""
        if self._told != (self._board.place, text):
            self._told = self._board.place, text
            with suppress(StoreLostError):
                self._board.put("shapes", text)

    # -- the next term ------------------------------------------------------------------------------------------------

    @property
    def coming(self) -> Plan:
        """Plan for which this rank prepares."""
        assert self.machine.plan is not None
        return self.machine.plan

    @property
    def memory(self) -> tuple[MemoryFolder, int] | None:
        """Folder in memory into which this rank writes, and the largest size of the whole checkpoint in bytes; see
        `folder_for`."""
        assert self.present is not None
        coming, present = ([one.memory for one in plan.members] for plan in (self.coming, self.present))
        return folder_for(coming, present)

    def announce(self, began: float) -> str:
        """Announce the members of the next term, in the job's folder and on the board; return an error, or ''. Called
        on rank 0 when the checkpoint is complete. `began` is the Unix time at which training paused."""
        why = self.folder.announce(Coming(self.coming, began, time.time()).fields())
        if not why:
            with suppress(StoreLostError):
                self._board.put(f"verdict-{self.coming.generation}", "committed")
        return why

    def stay(self, why: str) -> None:
        """Drop the plan because of `why`, and continue with this term."""
        if self._coordinator is not None:
            self._coordinator.dropped(why)
        self._forget()

    @property
    def leaves(self) -> bool:
        """True if this block is not in the plan for which it prepares."""
        return self.coming.first_rank(self._me.uid) is None

    # -- the change ---------------------------------------------------------------------------------------------------

    def change(self, collected: Collected, began: float) -> Change | None:
        """Send the state to new ranks, test the new groups, and change to them. Return None if training continues with
        the old ranks.

        Collective. Training has paused since the Unix time `began`. `collected` returns the state. Raises
        `PeersLostError`.
        """
        plan, present, group = self.coming, self.present, self._group
        assert present is not None
        # The device may still work for the old group. Destroying the group first would cut a sum short
        # (pytorch#141510), and a sum with a process that is gone never ends. All ranks wait here, and agree below.
        streams.wait(group.device)
        make_room(group.device)
        sent, seconds, why = 0, 0.0, ""
        if newcomers := plan.newcomers(present):
            started = time.monotonic()
            try:
                sent = self._send(plan, newcomers, collected, began)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:300]
            if self._failed("the state did not arrive", why):
                return None
            seconds = time.monotonic() - started
        if self._former is not None and self._former.formed is not None:
            why = try_groups(self._former.formed, group.device, form_s(plan.world))
        if self._failed("the new ranks cannot reach each other", why):
            return None
        if group.rank == 0:
            self._board.put(f"verdict-{plan.generation}", "committed")
        result = Change(plan, self.leaves, sent * len(newcomers), seconds, began, {})
        if not result.leaves:
            assert self._former is not None
            self._become(self._former)
        return result

    def _failed(self, what: str, why: str) -> bool:
        """Return True if the change failed on any rank, and drop the plan then. `why` is this rank's error, or ''."""
        if not self._group.maximum([int(bool(why))])[0]:
            return False
        if why:
            log(f"{what}: {why}")
        self.stay(what)
        return True

    def leave(self) -> None:
        """Stop the threads after a change to a plan without this block. A leader first waits until all ranks of the
        plan have left its board."""
        self.link.stop()
        if self._coordinator is None:
            return
        self._coordinator.stop()
        coming, until = self.coming, time.monotonic() + THROUGH_S
        while time.monotonic() < until:
            if self._board.count(f"through-{coming.generation}") >= coming.world:
                break
            time.sleep(0.02)

    def join(self, tensors: Tensors, take_over: TakeOver) -> Change:
        """Announce that this block is ready, wait for a plan, and change to it. Collective over the block.

        The state is received into `tensors`, with which this rank trains; `take_over` loads everything else. Raises
        `NotWantedError`, `TransferError`, and `PeersLostError` if the leader is lost.
        """
        receiver = Receiver(self._board.network.secret, self._address)
        try:
            self._group.maximum([0])  # all listen
            if self._group.rank == 0:
                say_ready(self._board, self._me)
            seen = 0
            while True:
                newest, unwanted, lost = self._group.on_first(lambda seen=seen: self._newer_plan(seen))  # type: ignore[misc]
                if unwanted:
                    raise NotWantedError(unwanted)
                if lost:
                    raise StoreLostError(lost)
                if newest > seen:
                    seen = newest
                    change = self._try_to_join(newest, receiver, tensors, take_over)
                    if change is not None:
                        return change
        except StoreLostError as error:
            if self.folder.over():
                raise NotWantedError("the job is over") from None
            raise PeersLostError(f"the leader is gone: {error}") from None
        finally:
            receiver.close()

    def _newer_plan(self, seen: int) -> tuple[int, str, str]:
        """Return (generation of the newest plan, why this block is not wanted, why the board is lost) within `LOOK_S`
        seconds. Called on the block's first rank."""
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            if self._leaving():
                return 0, "it was asked to end before it joined", ""
            if why := self.link.heard(f"leave-{self._me.uid}"):
                return 0, why, ""
            if (newest := int(self.link.heard("newest") or 0)) > seen:
                return newest, "", ""
            if self.link.lost:
                return 0, "", self.link.lost
            time.sleep(0.01)
        return seen, "", ""

    def _try_to_join(self, generation: int, receiver: Receiver, tensors: Tensors, take_over: TakeOver) -> Change | None:
        plan = self._plan(generation)
        if plan.first_rank(self._me.uid) is None:
            return None
        self._begin_forming(plan, receiver.port)
        former = self._former
        assert former is not None
        former.join()
        if former.formed is None:
            log(f"membership {generation} could not be formed: {former.error}")
        if self._group.maximum([int(former.formed is None)])[0] or former.formed is None:
            self._forget()
            return None

        def verdict() -> str:
            if not (found := self.link.heard(f"verdict-{generation}") or "") and self.link.lost:
                raise StoreLostError(self.link.lost)
            return found

        def given_up() -> str:
            return verdict() or ("it is to end" if self._leaving() else "")

        place = state_for(self._board.place, generation, former.rank)
        got = self._receive(place, receiver, tensors, take_over, given_up)
        if got is None:
            self._forget()
            return None
        rest, size, seconds = got
        until = time.monotonic() + VERDICT_S + patience_s(size)
        # A leader that leaves may commit before these sums end. Until then nothing else may use the groups.
        within_s = form_s(plan.world) + patience_s(size)
        why = try_groups(former.formed, self._group.device, within_s, lambda: verdict() not in ("", "committed"))
        while not (found := verdict()):
            if time.monotonic() > until:
                raise PeersLostError("the leader did not say whether the ranks change")
            time.sleep(0.002)
        if found != "committed":
            self._forget()
            return None
        if why:
            raise PeersLostError(f"the other blocks change without this one: {why}")
        self._become(former)
        return Change(plan, False, size, seconds, float(rest["began"]), rest)

    def _receive(
        self, place: str, receiver: Receiver, tensors: Tensors, take_over: TakeOver, given_up: Callable[[], str]
    ) -> tuple[dict[str, Any], int, float] | None:
        """Receive the state on the block's first rank, and copy it to the block's other ranks. Collective over the
        block. Return (state besides the tensors, bytes, seconds); None if no state comes. Raises `TransferError`."""
        group, held = self._group, list[Received]()

        def first() -> tuple[list[str], int, int, float] | str:
            try:
                received = receiver.receive(place, tensors, given_up)
            except StoreLostError as error:
                return str(error) or "lost"
            except SendersLostError as error:  # the senders dropped the plan, or are lost: the board shows which
                log(f"the state did not arrive ({error}); the block waits for another plan")
                received = None
            if received is None:
                return [], 0, 0, 0.0
            held.append(received)
            return received.names, len(received.packed), received.bytes, received.seconds

        try:
            got = group.on_first(first)
            if isinstance(got, str):
                raise StoreLostError(got)
            names, length, size, seconds = got
            if not length:
                return None
            packed = torch.empty(length, dtype=torch.uint8)
            if held:
                packed = torch.frombuffer(held[0].packed, dtype=torch.uint8)
            sent = {name: tensors[name] for name in names}
            group.share([packed, *sent.values()])
            rest = unpacked(packed.numpy().tobytes())
            group.here(lambda: take_over(rest, sent))
            for received in held:
                received.answer()
            return rest, size, seconds
        except RankError as error:
            raise TransferError(str(error)) from None
        finally:
            for received in held:
                received.close()

    def _send(self, plan: Plan, newcomers: tuple[Member, ...], collected: Collected, began: float) -> int:
        """Send this rank's part of the state; return the bytes of the whole state."""
        places, board = [], self._board
        for member in newcomers:
            first = plan.first_rank(member.uid)
            assert first is not None
            _, host, port = (board.read(f"formed-{plan.generation}-{first}") or "").split()
            places.append((host, int(port), state_for(board.place, plan.generation, first)))
        mine = senders(self._group.world, self._group.rank, places)
        if not mine:
            return 0
        tensors, rest = collected()
        rest = rest | {"began": began}
        secret = board.network.secret
        with ThreadPoolExecutor(len(mine)) as pool:
            list(pool.map(lambda one: send(one, secret, tensors, rest), mine))
        return sum(tensor.nbytes for tensor in tensors.values())

    def _plan(self, generation: int) -> Plan:
        key = f"plan-{generation}"
        text = self.link.heard(key) or self._board.read(key)
        if text is None:
            raise PeersLostError(f"plan {generation} is not on the board")
        return decode_plan(text)

    def _prepare(self, generation: int) -> None:
        self._forget()
        make_room(self._group.device)
        try:
            plan = self._plan(generation)
            self.machine.prepare(plan)
            if not self.hot:
                return
            self._former = self.link.take(generation)
            if self._former is None and not self.leaves:
                self._begin_forming(plan, 0)
        except StoreLostError as error:
            raise PeersLostError(f"the leader's board is gone: {error}") from None

    def _begin_forming(self, plan: Plan, listening: int) -> None:
        first = plan.first_rank(self._me.uid)
        assert first is not None
        self.machine.prepare(plan)
        self._former = self._make_former(plan, first, self._board.again(), listening)
        self._former.start()

    def _make_former(self, plan: Plan, first: int, board: Board, listening: int = 0) -> Former:
        rank, device = first + self.local_rank, self._group.device
        return Former(plan, rank, board, self._backend, device, self._address, listening)

    def _form_after(self, present: Plan) -> None:
        self.link.form(present.generation, self._me.uid, self._make_former)

    def _forget(self) -> None:
        former, self._former = self._former, None
        self.machine.back()
        connections.drop(former.formed if former is not None else None)

    def _become(self, former: Former) -> None:
        """Change to the groups of `former`, without waiting for other ranks."""
        formed, group = former.formed, self._group
        assert formed is not None
        plan = formed.plan
        connections.keep(group.control)
        connections.enter(formed)
        group.become(formed.rank, plan.world, plan.nodes, plan.ranks_per_node, formed.control, formed.duplicate)
        self.present, self._former = plan, None
        self.machine.go(BlockState.LEADING if plan.members[0].uid == self._me.uid else BlockState.MEMBER)
        if plan.moves:
            self._move(formed.board, formed.rank, plan)
        elif self._coordinator is not None:
            self._coordinator.committed(plan)
        self._form_after(plan)

    def _move(self, board: Board, rank: int, plan: Plan) -> None:
        """Follow the board of the next leader; on the plan's rank 0, claim the term and become the leader."""
        old, self._board = self._board, board
        connections.keep(old)  # new ranks may still read the verdict there
        if self._coordinator is not None:  # this block stays, but leads no longer
            self._coordinator.stop()
            self._coordinator = None
        head = plan.members[0]
        self.leader = Leader(plan.term, *board.address, board.place, head.task, head.restart)
        if rank == 0:
            if not self.folder.claim(self.leader):
                raise PeersLostError(f"term {plan.term} was claimed by another block")
            self._coordinate(plan)
            self._take_in()
        else:
            self.link.follow(board)
        with suppress(StoreLostError):  # the old leader may have ended already
            old.count(f"through-{plan.generation}", 1)

    def _coordinate(self, plan: Plan) -> None:
        orders, back_off = self._orders(plan.term), BackOff(self.folder.path, self.block.array)
        self._coordinator = coordinator = Coordinator(
            self._board, plan, orders, self._superseded, lambda world: self.fits(world), back_off
        )
        self.link.follow(self._board, coordinator)

    def _take_in(self) -> None:
        """Let the coordinator publish plans from now on, and post the carrier on the board."""
        assert self._coordinator is not None
        assert self.present is not None
        self._coordinator.changes_by(self.present, self.hot)
        self._board.put(MODE, self.machine.carrier.value)

    def _superseded(self) -> bool:
        newest = self.folder.newest()
        return newest is not None and newest.term > self.leader.term
