"""A strategy's limits in a column of `jobs`, as a JSON object that the view `size_limits` takes apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

from ones_wrapper.checks import ProtocolError, build, types_of
from ones_wrapper.limits import Limits


def encode_limits(limits: Limits) -> str:
    """The text of the column. Names were read as printable text, so that every database takes it for JSON."""
    return json.dumps(asdict(limits), allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=256)
def decode_limits(text: str) -> Limits:
    """The limits again; many jobs have the same. Raises `ProtocolError` for what this version does not believe."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProtocolError("not a JSON object")
    return build(Limits, types_of(Limits), data)
