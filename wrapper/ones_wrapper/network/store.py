"""The job's store as a `torch.distributed.Store`, over which groups are formed."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ones_wrapper.network.client import StoreClient
from ones_wrapper.network.door import listen

_kept: deque[GroupStore] = deque(maxlen=16)
"""The newest stores, kept alive: torch keeps only the C++ half of a store, which needs the Python half. A group that
lives longer must keep its own."""


class GroupStore(Store):
    """A torch store of the keys under one prefix, over one connection."""

    def __init__(self, client: StoreClient, begin: str, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._client, self._begin, self._timeout_s = client, f"{begin}/", timeout_s
        _kept.append(self)

    def key(self) -> bytes:
        """Return the key for the pairwise proofs of a group that is formed by this store."""
        return self._client.key("group", self._begin)

    def _key(self, key: str) -> bytes:
        return (self._begin + key).encode()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time for which `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, which replaces the present one."""
        self._client.ask("set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values, in one request."""
        return self._get(keys, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values in one request."""
        pairs = zip(keys, values, strict=True)
        self._client.ask("set", *(part for key, value in pairs for part in (self._key(key), _bytes(value))))

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to a value's end."""
        self._client.ask("append", self._key(key), _bytes(value))

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        return int(self._client.ask("add", self._key(key), b"%d" % value)[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all these keys exist."""
        return all(self._client.ask("peek", *map(self._key, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys exist."""
        self._get(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        milliseconds = b"%d" % max(0, int(1000 * timeout_s))
        return self._client.ask("get", milliseconds, *map(self._key, keys), wait_s=timeout_s)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Write `value` if the present value is `expected`; return the resulting value."""
        return self._client.ask("swap", self._key(key), _bytes(expected), _bytes(value))[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it existed."""
        return self._client.ask("delete", self._key(key)) == [b"1"]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._client.ask("keys", self._begin.encode()))

    # Names that torch's C++ half looks for.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def native_store(store: Store, host: str, rank: int, timeout_s: float) -> Store:
    """Return a TCPStore of torch for NCCL. NCCL's threads must not wait for the interpreter's lock, as they would with
    a Python store (pytorch#56297). Rank 0 serves the TCPStore at this node's address `host`. The address, and a random
    prefix for keys, are sent over `store`."""
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        listener = listen(host)
        port, begin = listener.getsockname()[1], secrets.token_hex(16)
        served = partial(TCPStore, master_listen_fd=listener.detach(), is_master=True, wait_for_workers=False)
        native = served(host, port, timeout=timeout)
        store.set("native", f"{host} {port} {begin}")
    else:
        where, number, begin = store.get("native").decode().split()
        native = TCPStore(where, int(number), is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(begin, native)
