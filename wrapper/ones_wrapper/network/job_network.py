"""This process's access to other processes of its job: the job's secret, and the store server of its block. Imports
only the standard library."""

from __future__ import annotations

import fcntl
import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ones_wrapper.network.client import StoreClient
from ones_wrapper.network.secret import JobSecret
from ones_wrapper.network.server import StoreServer

STORE = "ONES_STORE"
"""Environment variable with host and port of the store server that `ones-run` keeps for its ranks."""
PLACE = "ONES_PLACE"
"""Environment variable with host, port and name of the place where ranks of several blocks meet."""
_PATIENCE_S = 60.0
"""Seconds that the secret may be missing: a network file system may show another node's new file late."""
_LOCAL = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux's ioctl request for the address of an interface: netdevice(7)."""
_here: dict[str, StoreServer] = {}


def node_name(env: Mapping[str, str]) -> str:
    """Return the name or address at which the job's other nodes reach this node; the loopback address outside of Slurm.
    `ONES_SOCKET_IFNAME` may name an interface, if a node's name resolves to a slow network."""
    if interface := env.get("ONES_SOCKET_IFNAME"):
        return address_of(interface)
    if not env.get("SLURM_JOB_ID"):
        return _LOCAL
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def address_of(interface: str) -> str:
    """Return the interface's IPv4 address. Raises OSError with the reason."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
        except OSError as error:
            raise OSError(error.errno, f"ONES_SOCKET_IFNAME={interface}: {error.strerror}") from None
    return socket.inet_ntoa(found[20:24])


@dataclass(frozen=True)
class JobNetwork:
    """The job's secret, and the address of this block's store server, for one process."""

    secret: JobSecret
    host: str
    """Host of this block's store server."""
    port: int

    @classmethod
    def found(cls, env: Mapping[str, str], folder: Path) -> JobNetwork:
        """Return the network in the variables of `ones-run`. Without `ones-run` this process serves a store. `folder`
        has the job's secret. Raises `LaunchError`."""
        if given := env.get(STORE):
            host, _, port = given.rpartition(":")
            return cls(JobSecret.read(folder, _PATIENCE_S), host, int(port))
        return cls.here(node_name(env), JobSecret.make(folder))

    @classmethod
    def here(cls, host: str = _LOCAL, secret: JobSecret | None = None) -> JobNetwork:
        """Return a network whose store server runs in this process at the name `host`. There is one server for each
        secret."""
        secret = secret or JobSecret.fresh()
        name = secret.key("server").hex()
        if name not in _here:
            _here[name] = StoreServer.at(host, secret)
        return cls(secret, host, _here[name].port)

    def client(self, role: str, place: str) -> StoreClient:
        """Connect to this block's own store server. Raises `StoreLostError`."""
        return StoreClient(self.host, self.port, self.secret, role, place)

    def number(self, purpose: str) -> int:
        """Return a number of 63 bits that only this job's processes know."""
        return int.from_bytes(hashlib.sha256(self.secret.key(purpose)).digest()[:8], "big") >> 1
