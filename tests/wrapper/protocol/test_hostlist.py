"""Slurm's compressed host lists."""

from __future__ import annotations

import pytest

from ones_wrapper.protocol.hostlist import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,5]", ["n1", "n2", "n3", "n5"]),
        ("gpu[08-11],login", ["gpu08", "gpu09", "gpu10", "gpu11", "login"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("c1-[3,7]-ib,d.example", ["c1-3-ib", "c1-7-ib", "d.example"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_expansion(text: str, hosts: list[str]) -> None:
    """Protects MASTER_ADDR and the node count: names come as Slurm means them, in its order."""
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-3", "n1-3]", "n[1-x]", "n[]", "a,,b", "n[1-99999999]", "n[[1]]"])
def test_nonsense_is_refused(text: str) -> None:
    """Protects against a run that waits for a node that is not there."""
    with pytest.raises(ValueError, match="host list"):
        expand(text)
