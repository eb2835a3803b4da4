"""Process groups that are formed during training, and the change to them.

A thread forms the new groups over the job's board, a key-value store. When training pauses for the change, a small
all-reduce tests each group. Then torch's default group is replaced by one whose backend is the new groups. So all
collectives without a group argument (the script's, DDP's) use the new ranks. A *raw* group is an object of torch's
backend that torch.distributed does not know.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ones_wrapper.devices import streams
from ones_wrapper.group import TorchGroup
from ones_wrapper.membership.board import Board
from ones_wrapper.membership.plan import Plan
from ones_wrapper.network.client import StoreLostError
from ones_wrapper.network.pairwise import prove_groups, prove_pairwise
from ones_wrapper.network.proof import ProofError
from ones_wrapper.network.store import GroupStore, native_store
from ones_wrapper.process.background import run_behind
from ones_wrapper.process.hang_detector import collective

T = TypeVar("T")

FORM_S = 20.0
"""Seconds in which few ranks must form a group, or complete an all-reduce over it; `form_s` has the seconds for many
ranks."""
LOOK_S = 0.5
"""Seconds between two checks for ended ranks in a wait for other ranks."""
MOST_STUCK = 3
"""Number of overdue communicators at which no further one is made. Each has a thread and GPU memory."""
TRIED = (1, 1 << 18, 1 << 23)
"""Numbers of elements in the all-reduces that test NCCL's groups. NCCL chooses an algorithm by size, and connects ranks
at the first use of an algorithm."""

_NAMES = re.compile(r"(?:control|data|copy|default|formed|next)-(\d+)(?:-\d+)?")
"""Pattern of the names of a membership's groups on the board; the first number is the generation."""
_BACKENDS = {"gloo": ("ones_gloo", ["cpu", "cuda"]), "nccl": ("ones_nccl", ["cuda"])}
_PAIR = "cpu:ones_gloo,cuda:nccl"
"""Backend configuration for groups formed later, if the script uses both gloo and NCCL."""
_kept: deque[Any] = deque(maxlen=8)
"""Abandoned groups, at most four for each change, kept during two more changes. The destructor of a group just left can
hang, because its thread waits for the interpreter's lock (torch 2.13; pytorch#56297)."""
_formed: dict[str, Any] = {}
_stores: deque[Store] = deque(maxlen=2)
"""Stores of the present default group and of the previous one."""
_inherited: list[Any] = []
"""Groups and stores of the process that this one was forked from."""
_lock = threading.Lock()
_stuck: list[Future[Any]] = []
"""Overdue communicators, which will not be used."""


def _after_fork() -> None:
    """Keep the parent's groups and stores for ever: their destructors would wait for threads that a fork lacks."""
    _inherited.extend((*_kept, *_stores))


os.register_at_fork(after_in_child=_after_fork)


def form_s(world: int) -> float:
    """Return the seconds in which `world` ranks must form a group."""
    return FORM_S + world / 16


@dataclass
class Formed:
    """The process groups of a membership on one rank."""

    plan: Plan
    rank: int
    board: Board
    data: dict[str, Any]
    """Raw groups of the script's backends, by the backend's name."""
    control: Any
    """A raw gloo group for small messages on the CPU."""
    store: Store
    """Store over which torch.distributed forms later groups of the same ranks."""
    copies: int = 0

    def duplicate(self) -> Any:
        """Form and return another raw gloo group of the same ranks. Collective."""
        self.copies += 1
        return control_group(self.board, f"copy-{self.plan.generation}-{self.copies}", self.rank, self.plan.world)


def forget_groups(board: Board, before: int) -> None:
    """Remove from the board the keys of all groups of generations before `before`, about 0.2 KB for each rank and
    group. All ranks must have left these groups. Raises `StoreLostError`."""

    def past(name: str) -> bool:
        found = _NAMES.fullmatch(name)
        return found is not None and int(found[1]) < before

    board.forget(past)


def control_group(board: Board, name: str, rank: int, world: int, timeout_s: float = FORM_S) -> Any:
    """Return a raw gloo group of the ranks that call this with the same name. Collective. Raises RuntimeError after
    `timeout_s`."""
    return raw_group(board.store(name, timeout_s), rank, world, timeout_s)


def raw_group(store: GroupStore, rank: int, world: int, timeout_s: float) -> Any:
    """Return a raw gloo group of the ranks that use the same store. Raises `ProofError` if a rank is not of this
    job."""
    group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
    prove_pairwise(group, store.key(), rank, world, timeout_s)
    group.set_timeout(collective(os.environ))
    return group


def _nccl_group(store: Store, rank: int, world: int, device: torch.device) -> Any:
    torch.cuda.set_device(device)  # a new thread uses the first GPU
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = collective(os.environ)
    group = dist.ProcessGroupNCCL(store, rank, world, options)
    group.eager_connect_single_device(device)
    return group


def in_time(function: Callable[[], T], timeout_s: float, look: Callable[[], object] = bool) -> T:
    """Return the result of a function that may never return. A thread calls it, and the caller's thread calls `look`
    meanwhile. Raises `StoreLostError` after `timeout_s` seconds, and any error of `look`."""
    future, until = run_behind("ones-ask", function), time.monotonic() + timeout_s
    while not wait((future,), min(LOOK_S, timeout_s)).done:
        look()
        if time.monotonic() > until:
            raise StoreLostError(f"no answer within {timeout_s:g} s")
    return future.result()


def connect(make: Callable[[], Any], within_s: float) -> Any:
    """Return the communicator from `make`. Raises RuntimeError after `within_s` seconds, and at once if `MOST_STUCK`
    communicators are overdue. A communicator that is made later is aborted.

    A thread calls `make`, since ncclCommInitRank has no time-out, and its nonblocking mode hangs in some releases
    (pytorch#153960).
    """
    _stuck[:] = [one for one in _stuck if not one.done()]
    if len(_stuck) >= MOST_STUCK:
        raise RuntimeError(
            f"{len(_stuck)} NCCL communicators were not formed in time: no more are tried until the ranks start again"
        )
    future = run_behind("ones-connect", make)
    try:
        return future.result(within_s)
    except FutureTimeoutError:
        _stuck.append(future)
        future.add_done_callback(lambda late: None if late.exception() else _abort(late.result()))
        raise RuntimeError(f"no NCCL communicator was formed within {within_s:g} s") from None


def try_groups(formed: Formed, device: torch.device, within_s: float, given_up: Callable[[], object] = bool) -> str:
    """Test a plan's groups by all-reduces before training uses them. Return why they cannot be used; empty if they can,
    or if `given_up` returns True because the plan was dropped.

    Collective over the plan's ranks, whose devices must be idle. A broken link is found here, while training can still
    continue with the old ranks. All ranks that reach each other return the same.
    """
    why, until = run_behind("ones-try", partial(_try_all, formed, device)), time.monotonic() + within_s
    while not wait((why,), 0.002).done and not given_up():
        if time.monotonic() > until:
            return f"an all-reduce over the new ranks did not end within {within_s:g} s"
    return why.result() if why.done() else ""


def _try_all(formed: Formed, device: torch.device) -> str:
    why = ""
    try:
        for name, group in formed.data.items():
            on_gpu = name == "nccl"
            for elements in TRIED if on_gpu else TRIED[:1]:
                _try_sum(group, elements, formed.plan.world, device if on_gpu else torch.device("cpu"))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:300]
    failed = torch.tensor([float(bool(why))])
    try:
        formed.control.allreduce([failed]).wait()
    except Exception as error:
        why = why or f"{type(error).__name__}: {error}"[:300]
    return why or ("another rank could not" if float(failed) else "")


def _try_sum(group: Any, elements: int, world: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ones = torch.ones(elements, device=device)
    group.allreduce([ones]).wait()
    streams.wait(device)
    if not float(ones.min()) == float(ones.max()) == world:
        raise RuntimeError(f"a sum of ones over {world} ranks is {float(ones.min()):g} to {float(ones.max()):g}")


class Former(threading.Thread):
    """Thread that forms a plan's groups on one rank."""

    def __init__(
        self, plan: Plan, rank: int, board: Board, backend: str, device: torch.device, address: str, listening: int = 0
    ) -> None:
        """`board` is this thread's own connection to the present term's board, and `address` is this node's. `backend`
        is a configuration as in `backends_of`. `listening` is the port on which a new rank waits for its state."""
        super().__init__(name="ones-form", daemon=True)
        self.plan, self.rank, self._board = plan, rank, board
        self._backends, self._device, self._address = backends_of(backend), device, address
        self.formed: Formed | None = None
        """The groups; None until they are formed, or if that failed."""
        self.error = ""
        """Reason why the groups could not be formed."""
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
        plan, rank, within_s = self.plan, self.rank, form_s(self.plan.world)
        board = self._next_board() if plan.moves else self._board
        control = control_group(board, f"control-{plan.generation}", rank, plan.world, within_s)
        store: Store = board.store(f"default-{plan.generation}", within_s)
        data: dict[str, Any] = {}
        if "gloo" in self._backends:
            data["gloo"] = control_group(board, f"data-{plan.generation}", rank, plan.world, within_s)
        if "nccl" in self._backends:
            store = native_store(store, self._address, rank, within_s)
            make = partial(_nccl_group, PrefixStore("data", store), rank, plan.world, self._device)
            data["nccl"] = connect(make, within_s)
        return Formed(plan, rank, board, data, control, store)

    def _next_board(self) -> Board:
        """Return the board of the next term. The plan's rank 0 hosts it, and posts its address on the present board."""
        key = f"next-{self.plan.generation}"
        if self.rank == 0:
            board = Board.hosted(self._board.network, self.plan.term)
            self._board.put(key, json.dumps([*board.address, board.place]))
            return board
        if (text := self._board.wait(key, FORM_S)) is None:
            raise StoreLostError("the next leader posted no address of its board")
        host, port, place = json.loads(text)
        return Board(self._board.network, str(host), int(port), str(place))


def destroy() -> None:
    """Leave the default group, if there is one."""
    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.destroy_process_group()


def drop(formed: Formed | None) -> None:
    """Abort the NCCL groups of a failed plan, to free threads and memory at once. References to all groups are kept."""
    if formed is None:
        return
    keep((formed.data, formed.control))
    for group in formed.data.values():
        if hasattr(group, "abort"):
            run_behind("ones-abort", partial(_abort, group))


def _abort(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def backends_of(config: str) -> set[str]:
    """Return the backends in a configuration of torch.distributed (`dist.get_backend_config`), such as "nccl" or
    "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in config.split(",")} & {"gloo", "nccl"}


def enter(formed: Formed) -> None:
    """Replace the process's default group by the formed groups. Not collective."""
    name = _register(next(iter(formed.data)))
    hook = sys.excepthook
    destroy()
    with _lock:
        _formed[name] = next(iter(formed.data.values()))
        dist.init_process_group(name, store=formed.store, rank=formed.rank, world_size=formed.plan.world)
        del _formed[name]
        _stores.append(formed.store)
    if len(formed.data) > 1:
        _add_nccl(formed.data["nccl"])
    sys.excepthook = hook  # each initialisation wraps the hook once more


def _add_nccl(group: Any) -> None:
    """Add NCCL for CUDA to the default group, which uses gloo. `init_process_group` cannot name both, since torch keeps
    one backend for all names that it does not know."""
    world: Any = dist.group.WORLD
    world._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, group)
    state: Any = dist.distributed_c10d._world
    state.pg_map[world] = (_PAIR, state.pg_map[world][1])
    state.pg_backend_config[world] = _PAIR


def begin(group: TorchGroup, board: Board, plan: Plan, rank: int, within_s: float) -> None:
    """Extend `group`, and torch's default group if there is one, to all ranks that begin a term.

    Collective over these ranks. Raises `StoreLostError` if not all of them arrive within `within_s` seconds, or if one
    ends meanwhile.
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
            torch.cuda.set_device(device)  # a new thread uses the first GPU
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

    def look() -> None:
        if any(plan.first_rank(name.rpartition("-")[0]) is not None for name in board.names("gone")):
            raise StoreLostError("a rank ended")

    try:
        control = in_time(form, within_s, look)
    except (RuntimeError, TimeoutError, ProofError) as error:
        raise StoreLostError(f"the ranks of term {plan.term} did not find each other: {error}"[:300]) from None
    finally:
        sys.excepthook = hook
    group.become(rank, plan.world, plan.nodes, plan.ranks_per_node, control, None)


def keep(left: Any) -> None:
    """Keep a reference to an abandoned group or board during two more changes; do nothing for None."""
    if left is not None:
        _kept.append(left)


def _register(backend: str) -> str:
    name, devices = _BACKENDS[backend]
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, partial(_create, name), extended_api=True, devices=devices)
    return name


def _create(name: str, asked: Any, options: Any) -> Any:
    """Return the formed group as the default group's backend, and a new group for each later torch group."""
    if name in _formed:
        return _formed[name]
    if name == "ones_gloo":
        return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)
    options = options or dist.ProcessGroupNCCL.Options()
    options._timeout = asked.timeout
    return dist.ProcessGroupNCCL(asked.store, asked.group_rank, asked.group_size, options)
