"""Reports out, orders in."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from ones_wrapper.files.job_io import POLL_S, OrderReader, ReportWriter
from ones_wrapper.protocol import Bye, Order, decode_report, encode
from tests.wrapper.runs import write_order


def inbox(job: Path, restart: int = 0, spool: Path | None = None) -> OrderReader:
    """It looks at each call."""
    return OrderReader(job, restart, spool, 7, partial(next, count(0.0, POLL_S)))


def test_highest_number_is_in_force(tmp_path: Path) -> None:
    """Not an older order that comes late, nor one of another run."""
    box = inbox(tmp_path, restart=1)
    assert box.poll() is None
    for order, expected in ((Order(5, 1), 5), (Order(4, 1), 5), (Order(9, 2), 5), (Order(6, 0), 6)):
        write_order(tmp_path, order)
        now = box.poll()
        assert now is not None and now.number == expected


def test_polls_are_far_between(tmp_path: Path) -> None:
    """A shared file system is not read at every step."""
    now = 0.0
    box = OrderReader(tmp_path, 0, clock=lambda: now)
    box.poll()
    write_order(tmp_path, Order(1, 0))
    now = POLL_S / 2
    assert box.poll() is None
    now = POLL_S
    assert box.poll() == Order(1, 0)


def test_orders_from_the_spool(tmp_path: Path) -> None:
    """The companion may not write into users' directories everywhere."""
    job, spool = tmp_path / "job", tmp_path / "spool"
    job.mkdir()
    spool.mkdir()
    (spool / "orders-7.json").write_bytes(encode(Order(2, 0, batch=64)))
    (spool / "orders-8.json").write_bytes(encode(Order(3, 0, batch=32)))
    box = inbox(job, spool=spool)
    assert box.poll() == Order(2, 0, batch=64)
    write_order(job, Order(4, 0))
    assert box.poll() == Order(4, 0)


def test_orders_that_are_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links, pipes, floods and nonsense are ignored, said once, and the order in force stays."""
    box = inbox(tmp_path)
    write_order(tmp_path, Order(1, 0, batch=32))
    box.poll()
    path, good = tmp_path / "orders.json", tmp_path / "good"
    good.write_bytes(encode(Order(9, 0)))
    texts = (b"{", b'{"number": 9, "restart": 0, "batch": 0}', b'{"number": 9}', b" " * 20_000, b"\xff\xfe")
    puts = [partial(path.write_bytes, text) for text in texts]
    for put in (*puts, partial(path.symlink_to, good), partial(os.mkfifo, path)):
        path.unlink()
        put()
        capsys.readouterr()
        assert box.poll() == Order(1, 0, batch=32)
        assert "is ignored" in capsys.readouterr().err
        box.poll()
        assert capsys.readouterr().err == ""


def test_orders_of_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    stranger, operator = 4321, 4322
    spool = tmp_path / "spool"
    spool.mkdir()
    write_order(tmp_path, Order(3, 0, drain=True))
    os.chown(tmp_path / "orders.json", stranger, stranger)
    assert inbox(tmp_path).poll() is None
    assert f"belongs to user {stranger}" in capsys.readouterr().err
    os.chown(spool, operator, operator)
    (spool / "orders-7.json").write_bytes(encode(Order(4, 0)))
    os.chown(spool / "orders-7.json", operator, operator)
    assert inbox(tmp_path, spool=spool).poll() == Order(4, 0)


def test_reports_go_on_after_a_torn_line(tmp_path: Path) -> None:
    """A full disk cut it short; a second ones-run in a run numbers on."""
    path = tmp_path / "reports-3.jsonl"
    first = ReportWriter(tmp_path, 3)
    first.send(Bye("stopped", 1))
    with path.open("ab") as file:
        file.write(b'{"n":2,"t":')
    ReportWriter(tmp_path, 3).send(Bye("finished", 2))
    whole, torn, last = path.read_bytes().splitlines()
    assert [decode_report(line)[0] for line in (whole, last)] == [1, 2]
    assert torn == b'{"n":2,"t":'


def test_unwritable_reports_do_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said once."""
    box = ReportWriter(tmp_path / "gone", 0)
    box.send(Bye("finished", 1))
    box.send(Bye("finished", 1))
    assert capsys.readouterr().err.count("cannot be written") == 1
    (tmp_path / "reports-0.jsonl").symlink_to("/dev/full")  # links are not followed
    ReportWriter(tmp_path, 0).send(Bye("finished", 1))
    assert "cannot be written" in capsys.readouterr().err
