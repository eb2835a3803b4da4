"""Groups formed while training goes on in another one, and the change from one to the other.

The raw groups are formed by a thread over the board's store. At the change the script's default group is left, and
one is initialised whose registered backend hands out what was formed: so everything that names no group of its own
(the script's collectives, DDP) uses the new ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ones_wrapper.devices.patience import collective
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership.board import Board, in_time
from ones_wrapper.membership.plan import Plan
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.pairwise import prove_groups, prove_pairwise
from ones_wrapper.network.proof import ProofError
from ones_wrapper.network.store import GroupStore, native_store

FORM_S = 20.0
"""How long ranks may take to form a group."""

_NAMES = re.compile(r"(?:control|data|copy|default|formed|next)-(\d+)(?:-\d+)?")
"""What ranks put on the board when they form a membership's groups, by its generation."""
_BACKENDS = {"gloo": ("ones_gloo", ["cpu", "cuda"]), "nccl": ("ones_nccl", ["cuda"])}
_kept: deque[Any] = deque(maxlen=8)
"""Groups that were left, for two more changes, each of which leaves up to four: the destructor of one that was just
left can wait for ever for a thread that wants the interpreter's lock (torch 2.13; pytorch#56297)."""
_formed: dict[str, Any] = {}
_stores: deque[Store] = deque(maxlen=2)
"""Of the present default group and of the one before."""
_lock = threading.Lock()


@dataclass
class Formed:
    """The groups of a membership, as one rank holds them."""

    plan: Plan
    rank: int
    board: Board
    """That of the plan's term."""
    data: Any
    """A raw group of the script's backend."""
    control: Any
    """A raw gloo group for agreements."""
    store: Store
    """By which torch.distributed's later groups of the same ranks find each other."""
    copies: int = 0

    def duplicate(self) -> Any:
        """Another raw gloo group of the same ranks. Collective."""
        self.copies += 1
        return control_group(self.board, f"copy-{self.plan.generation}-{self.copies}", self.rank, self.plan.world)


def forget_groups(board: Board, before: int) -> None:
    """Remove what ranks put on the board when they formed the groups of generations before this one: some 0.2 KB a rank
    and group. Nobody may need those groups any more. Raises `StoreLostError`.
    """

    def past(name: str) -> bool:
        found = _NAMES.fullmatch(name)
        return found is not None and int(found[1]) < before

    board.forget(past)


def control_group(board: Board, name: str, rank: int, world: int, timeout_s: float = FORM_S) -> Any:
    """A raw gloo group of ranks that all call this. Raises RuntimeError where they don't within the time."""
    return raw_group(board.store(name, timeout_s), rank, world, timeout_s)


def raw_group(store: GroupStore, rank: int, world: int, timeout_s: float) -> Any:
    """The same, by a store. Raises `ProofError` if one of them is none of this job's."""
    group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    prove_pairwise(group, store.key(), rank, world, timeout_s)
    group.set_timeout(collective(os.environ))
    return group


def _nccl_group(store: Store, rank: int, world: int, device: torch.device) -> Any:
    torch.cuda.set_device(device)  # a thread begins on the first one
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = collective(os.environ)
    group = dist.ProcessGroupNCCL(store, rank, world, options)
    group.eager_connect_single_device(device)
    return group


class Former(threading.Thread):
    """Forms the groups of a plan in the background."""

    def __init__(
        self, plan: Plan, rank: int, board: Board, backend: str, device: torch.device, address: str, listening: int = 0
    ) -> None:
        """`board` is the present term's, a connection of this thread's own; `address` is this host's. A new rank is
        `listening` on this port for its state.
        """
        super().__init__(name="ones-form", daemon=True)
        self.plan, self.rank, self._board = plan, rank, board
        self._backend, self._device, self._address = backend, device, address
        self.formed: Formed | None = None
        """The groups, once they are there."""
        self.error = ""
        """Why there are none."""
        self._listening = listening

    def run(self) -> None:
        try:
            self.formed = self._form()
            told = f"formed {self._address} {self._listening}"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"[:300]
            told = f"failed: rank {self.rank}: {self.error}"
        with suppress(StoreLostError):
            self._board.put(f"formed-{self.plan.generation}-{self.rank}", told)

    def _form(self) -> Formed:
        plan, rank = self.plan, self.rank
        board = self._next_board() if plan.moves else self._board
        control = control_group(board, f"control-{plan.generation}", rank, plan.world)
        store: Store = board.store(f"default-{plan.generation}", FORM_S)
        if self._backend == "gloo":
            data = control_group(board, f"data-{plan.generation}", rank, plan.world)
        else:
            store = native_store(store, self._address, rank, FORM_S)
            data = _nccl_group(PrefixStore("data", store), rank, plan.world, self._device)
        return Formed(plan, rank, board, data, control, store)

    def _next_board(self) -> Board:
        """The board of the next term, which the plan's rank 0 hosts and tells of on the present one."""
        key = f"next-{self.plan.generation}"
        if self.rank == 0:
            board = Board.host(self._board.network, self.plan.term)
            self._board.put(key, json.dumps([*board.address, board.place]))
            return board
        until = time.monotonic() + FORM_S
        while (text := self._board.read(key)) is None:
            if time.monotonic() > until:
                raise StoreLostError("the next leader named no board")
            time.sleep(0.02)
        host, port, place = json.loads(text)
        return Board.connect(self._board.network, str(host), int(port), str(place))


def destroy() -> None:
    """Leave the default group, if there is one."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


def drop(formed: Formed | None) -> None:
    """A group that came to nothing: NCCL's threads and memory are given back at once, and the shells are kept."""
    if formed is None:
        return
    keep((formed.data, formed.control))
    if hasattr(formed.data, "abort"):
        threading.Thread(target=_abort, args=(formed.data,), name="ones-abort", daemon=True).start()


def _abort(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def enter(formed: Formed, backend: str) -> None:
    """Make what was formed the process's default group, in place of the one there is. Not collective."""
    name = _register(backend)
    hook = sys.excepthook
    destroy()
    with _lock:
        _formed[name] = formed.data
        dist.init_process_group(name, store=formed.store, rank=formed.rank, world_size=formed.plan.world)
        del _formed[name]
        _stores.append(formed.store)
    sys.excepthook = hook  # each initialisation puts another cover around it


def begin(group: TorchGroup, board: Board, plan: Plan, rank: int, within_s: float) -> None:
    """Make `group` anew, of all ranks with which a term begins, and torch.distributed where it was set up. Collective
    over them.

    Raises `StoreLostError` if they do not all come in time.
    """
    if len(plan.members) == 1:
        return
    keep(group.control)
    name, hook, device = f"term-{plan.term}", sys.excepthook, group.device
    if set_up := dist.is_initialized():
        backend, store = dist.get_backend(), board.again().store(name, within_s)
        keep(dist.group.WORLD)
        dist.destroy_process_group()

    def form() -> Any:
        if not set_up:
            return control_group(board.again(), name, rank, plan.world, within_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on the first one
        nccl = backend == "nccl"
        found = native_store(store, board.network.host, rank, within_s) if nccl else store
        _stores.append(found)
        dist.init_process_group(
            backend,
            store=found,
            rank=rank,
            world_size=plan.world,
            timeout=collective(os.environ),
            device_id=device if nccl else None,
        )
        control = dist.new_group(backend="gloo")
        prove_groups(control, store.key(), rank, plan.world)
        return control

    try:
        control = in_time(form, within_s)
    except (RuntimeError, ProofError) as error:
        raise StoreLostError(f"the ranks of term {plan.term} did not find each other: {error}"[:300]) from None
    finally:
        sys.excepthook = hook
    group.become(rank, plan.world, plan.nodes, plan.ranks_per_node, control, None)


def keep(left: Any) -> None:
    """A group or board that was left is held for two more changes. None is none."""
    if left is not None:
        _kept.append(left)


def _register(backend: str) -> str:
    name, devices = _BACKENDS[backend]
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, partial(_create, name), extended_api=True, devices=devices)
    return name


def _create(name: str, asked: Any, options: Any) -> Any:
    """What was formed, for the default group; a group that a script or a library asks for later is made as ever."""
    if name in _formed:
        return _formed[name]
    if name == "ones_gloo":
        return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)
    options = options or dist.ProcessGroupNCCL.Options()
    options._timeout = asked.timeout
    return dist.ProcessGroupNCCL(asked.store, asked.group_rank, asked.group_size, options)
