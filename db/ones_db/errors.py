"""How the store fails."""

from __future__ import annotations


class StoreError(Exception):
    """The database could not do what was asked; nothing of the failed call was stored. The message says
    why."""


class SchemaError(StoreError):
    """The database is absent, older or newer than this version, or not ours; the message says what to run."""


class StoreBusy(StoreError):
    """Another process kept the database locked for longer than the store waits; the call may be repeated."""


class StoreLost(StoreError):
    """The server cannot be reached, or went away during the call. The call may be repeated: the next one connects
    anew, and where the server had just made the lost one durable, it changes nothing."""


class NotLeader(StoreError):
    """Another companion of the cluster leads, or may lead by now: nothing may be done in its place."""


class UnknownRecord(StoreError):
    """The job, run, decision or resize that the call names is not in the store."""


class ResizeConflict(StoreError):
    """The job has another resize open, or the resize that the call names has ended."""
