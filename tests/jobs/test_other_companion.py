"""Another companion on the same job: how each sees the other, and who yields."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db.shape import Shape
from ones_wrapper.protocol import ORDERS, SPOOL_MARK, Hello, Order, directory_name, encode, spool_order_name
from slurm_ones.jobs.elastic import WholeJob
from slurm_ones.jobs.other_companion import YIELD_S, OtherCompanion
from tests.jobs.make import HELLO
from tests.slurm.make import job_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root alone")
OWNER, SITE, NOW = 12345, 23456, 2_000_000_000.0


def job(tmp_path: Path, uid: int) -> WholeJob:
    return WholeJob.of(replace(job_of(Shape(1, 1)), uid=uid, work_dir=str(tmp_path)))


def test_the_owners_yields_while_the_sites_acts(tmp_path: Path) -> None:
    """Protects a job of an operator's site: the mark in the spool that the job reads counts, if the spool's owner made
    it and renewed it lately; a mark of others, of another spool, or of this companion's own does not."""
    spool = tmp_path / "spool"
    spool.mkdir()
    os.chown(spool, SITE, SITE)
    mine = job(tmp_path, os.geteuid())
    clock = [NOW]
    hello: list[Hello | None] = [replace(HELLO, directory=str(tmp_path / "x"), spool=str(spool))]
    rivals = OtherCompanion(os.geteuid(), lambda job: hello[0], lambda: clock[0])
    assert rivals.refusal(mine) is None and rivals.number(mine) == 0
    mark = spool / SPOOL_MARK
    mark.touch()
    os.utime(mark, (NOW, NOW))
    assert rivals.refusal(mine) is None  # root's, and the spool is not
    os.chown(mark, SITE, SITE)
    found = rivals.refusal(mine)
    assert found is not None and found.code == "site_acts" and str(SITE) in str(found)
    clock[0] += YIELD_S + 1
    assert rivals.refusal(mine) is None
    clock[0] = NOW
    hello[0] = replace(HELLO, directory=str(tmp_path / "x"))
    assert rivals.refusal(mine) is None
    hello[0] = replace(HELLO, directory=str(tmp_path / "x"), spool=str(spool))
    order = spool / spool_order_name(mine.job_id)
    order.write_bytes(encode(Order(77, 0)))
    os.chown(order, SITE, SITE)
    assert rivals.number(mine) == 77
    os.chown(spool, os.geteuid(), 0)
    assert rivals.refusal(mine) is None and rivals.number(mine) == 0


def test_the_sites_yields_after_an_order_of_the_owners(tmp_path: Path) -> None:
    """Protects a job whose owner's companion is at work; an order that is old, or from the future, keeps nobody."""
    theirs, clock = job(tmp_path, OWNER), [NOW]
    directory = tmp_path / directory_name(theirs.job_id)
    directory.mkdir()
    os.chown(directory, OWNER, OWNER)
    rivals = OtherCompanion(None, lambda job: None, lambda: clock[0])
    assert rivals.refusal(theirs) is None
    path = directory / ORDERS
    for number, owner, yields in (
        (NOW - 10, OWNER, True),
        (NOW - YIELD_S - 1, OWNER, False),
        (NOW + 10 * YIELD_S, OWNER, False),
        (NOW - 10, SITE, False),
    ):
        path.write_bytes(encode(Order(round(number * 1000), 0)))
        os.chown(path, owner, owner)
        found = rivals.refusal(theirs)
        assert (found is not None) == yields
        assert found is None or found.code == "owner_acts"
    path.write_text("nonsense")
    assert rivals.refusal(theirs) is None
