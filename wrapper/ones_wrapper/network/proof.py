"""Mutual proof of two processes that they have the job's secret, over a connection that any process may have opened.

    caller: role, place, a nonce
    host:   a nonce, HMAC-SHA256 over both nonces, role and place
    caller: the same HMAC with the caller's label
    host:   nothing, or the reason to refuse the caller

The nonces make each proof valid for one connection. The key depends on the place (a term's store, the state for one
rank), so that a proof for one place is not valid for another. Because of the labels, no side can return the other's
proof as its own.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

from ones_wrapper.network.frames import FrameError, Frames, fields, frame, parts_of
from ones_wrapper.network.secret import JobSecret

PROOF_S = 2.0
"""Seconds that a proof may take."""
MOST_UNPROVEN = 1024
"""Largest number of bytes of a message from an unproven caller."""
_MAGIC = b"ones network 1"
_NONCE = 32
_MOST_NAME = 200


class ProofError(ConnectionError):
    """Error: the other process does not have the job's secret, or refuses this process. The message says which."""


class Challenge:
    """The host's side of the proof, for one connection."""

    def __init__(self, secret: JobSecret, hello: bytes) -> None:
        """`hello` is the caller's first message. Raises `ProofError`."""
        try:
            magic, role, place, nonce = parts_of(hello)
            self.role, self.place = role.decode("ascii"), place.decode("ascii")
        except ValueError:
            raise ProofError("it does not speak our protocol") from None
        if magic != _MAGIC or len(nonce) != _NONCE or len(role) > _MOST_NAME or len(place) > _MOST_NAME:
            raise ProofError("it does not speak our protocol")
        mine = os.urandom(_NONCE)
        self._expected = _proof(secret, "caller", self.role, self.place, nonce, mine)
        self.answer = fields(mine, _proof(secret, "host", self.role, self.place, nonce, mine))
        """The host's message to the caller."""

    def met_by(self, proof: bytes) -> bool:
        """Return True if this proof shows that the caller has the secret."""
        return hmac.compare_digest(proof, self._expected)


def prove(connection: socket.socket, secret: JobSecret, role: str, place: str, timeout_s: float = PROOF_S) -> None:
    """Make the proof on the caller's side. Raises `ProofError`, and OSError for a connection that fails."""
    until, nonce = time.monotonic() + timeout_s, os.urandom(_NONCE)
    frames = Frames(MOST_UNPROVEN)
    connection.settimeout(timeout_s)
    connection.sendall(frame(fields(_MAGIC, role.encode(), place.encode(), nonce)))
    try:
        theirs, proof = parts_of(_receive(connection, frames, until))
    except ValueError:
        raise ProofError("what listens there does not speak our protocol") from None
    if not hmac.compare_digest(proof, _proof(secret, "host", role, place, nonce, theirs)):
        raise ProofError("what listens there does not have this job's secret")
    connection.sendall(frame(_proof(secret, "caller", role, place, nonce, theirs)))
    try:
        why = _receive(connection, frames, until)
    except FrameError as error:
        raise ProofError(str(error)) from None
    if why:
        raise ProofError(why.decode(errors="replace"))


def _receive(connection: socket.socket, frames: Frames, until: float) -> bytes:
    while (body := frames.take()) is None:
        connection.settimeout(max(0.001, until - time.monotonic()))
        if not (data := connection.recv(4096)):
            raise ProofError("the connection was closed before the proof")
        frames.feed(data)
    return body


def _proof(secret: JobSecret, who: str, role: str, place: str, caller: bytes, host: bytes) -> bytes:
    message = fields(who.encode(), role.encode(), place.encode(), caller, host)
    return hmac.digest(secret.key("proof", place), message, hashlib.sha256)
