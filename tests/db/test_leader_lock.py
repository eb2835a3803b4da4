"""Who leads: one at a time, whatever becomes of it, and nobody else writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ones_db import ActionRecord, LeaderRecord, NotLeader, Store, StoreError, StoreLost
from ones_db.engine import backend_of
from ones_db.leader import LeaderLock
from slurm_ones.service.leadership import Leadership
from tests.db import candidate
from tests.db.make import ask, change, job
from tests.db.server import Server
from tests.waiting import until

pytestmark = pytest.mark.slow

FORKS = multiprocessing.get_context("fork")
"""A candidate need not import what is here: that takes longer than most of what it does."""


def me() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def file_of(url: str) -> Path:
    """The lock file of cluster gres."""
    return Path(f"{backend_of(url).place}.gres.lead")


def test_one_leads_and_terms_count(url: str) -> None:
    """Protects from two that lead: the second gets nothing until the first gives the lead back."""
    with LeaderLock(url, "gres") as one, LeaderLock(url, "gres") as other, Store.open(url, "gres") as store:
        assert store.leader() is None
        assert (one.take(10.0), other.take(11.0)) == (1, None)
        assert store.leader() == LeaderRecord(1, me(), 10.0, 10.0)
        one.beat(12.0)
        one.check()
        assert store.leader() == one.leader() == LeaderRecord(1, me(), 10.0, 12.0)
        with pytest.raises(NotLeader):
            other.check()
        with pytest.raises(NotLeader):
            other.beat(13.0)
        one.leave(14.0)
        assert store.leader() == LeaderRecord(1, "", 10.0, 14.0)
        assert other.take(15.0) == 2
        with pytest.raises(NotLeader):
            one.check()
        assert store.leader() == LeaderRecord(2, me(), 15.0, 15.0)


def test_each_cluster_has_a_leader(url: str) -> None:
    """Protects a site's second cluster from standing by for its first; odd names too."""
    with ExitStack() as stack:
        locks = [stack.enter_context(LeaderLock(url, name)) for name in ("gres", "other", "../a b/ü")]
        assert [lock.take(1.0) for lock in locks] == [1, 1, 1]
        for lock in locks:
            lock.check()


def test_many_that_race(url: str) -> None:
    """Protects from two that lead for a moment: of many threads that take, hold and leave, one is in at a time, and no
    term is given twice."""
    within, terms, most = [0], list[int](), [0]
    counting = threading.Lock()
    end = time.monotonic() + 30.0

    def compete() -> None:
        with LeaderLock(url, "gres") as lock:
            while len(terms) < 20 and time.monotonic() < end:
                term = lock.take(time.time())
                if term is None:
                    time.sleep(0.001)
                    continue
                with counting:
                    within[0] += 1
                    most[0] = max(most[0], within[0])
                    terms.append(term)
                lock.check()
                with counting:
                    within[0] -= 1
                lock.leave(time.time())

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    assert len(terms) >= 20 and terms == list(range(1, len(terms) + 1))


def test_an_older_term_writes_nothing(url: str) -> None:
    """Protects the journal from a leader that does not know yet that it is none: each writing method asks within its
    transaction. Commands, which have no term, write all the same."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(LeaderLock(url, "gres")) for _ in range(2))
        old = stack.enter_context(Store.open(url, "gres", term=one.take(1.0)))
        old.record_jobs([job(1)])
        one.leave(2.0)
        new = stack.enter_context(Store.open(url, "gres", term=other.take(3.0)))
        with pytest.raises(NotLeader, match=rf"term 1 is lost: {me()} leads now, in term 2"):
            old.record_jobs([job(2)])
        with pytest.raises(NotLeader):
            old.set_deferral(1, 5.0)
        assert list(old.jobs()) == [1] and old.deferrals() == {}
        new.record_jobs([job(3)])
        command = stack.enter_context(Store.open(url, "gres"))
        command.add_action(ActionRecord(1.0, "ops", "db maintain"))
        assert list(new.jobs()) == [1, 3]


class Candidate:
    """`tests.db.candidate` in a process of its own; what it says is read by a thread."""

    def __init__(self, url: str, takeover_s: float) -> None:
        self._heard, says = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=candidate.main, args=(url, takeover_s, says.send), daemon=True)
        self._process.start()
        says.close()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.pid = self._process.pid or 0
        self.holder = f"{socket.gethostname()}:{self.pid}"

    def _read(self) -> None:
        with suppress(EOFError):
            while True:
                self.said.append(self._heard.recv())

    @property
    def leads(self) -> bool:
        return next((line.startswith("wrote") for line in reversed(self.said)), False)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._reader.join()
        self._heard.close()


@contextmanager
def candidates(url: str, takeover_s: float, number: int = 2) -> Iterator[list[Candidate]]:
    """Several, the first of which leads and writes."""
    made: list[Candidate] = []
    try:
        for i in range(number):
            made.append(Candidate(url, takeover_s))
            if i == 0:
                until(lambda: made[0].leads)
        until(lambda: all(one.said for one in made))
        yield made
    finally:
        for one in made:
            one.end()


def written(url: str) -> list[tuple[float, int]]:
    """When each term wrote, in the order of the rows."""
    return [(time, int(term)) for time, term in ask(url, "SELECT time, detail FROM actions ORDER BY id")]


def assert_one_at_a_time(url: str) -> None:
    """No term wrote after a newer one had."""
    terms = [term for _, term in written(url)]
    assert terms == sorted(terms)


def test_a_killed_leader_is_followed_at_once(url: str) -> None:
    """Protects the jobs that it held: the lock is free with its process, whatever it was doing."""
    takeover_s, times = 40.0, 2
    with candidates(url, takeover_s, times + 1) as (first, *others):
        leader, left = first, [*others]
        for _ in range(times):
            leader.send(signal.SIGKILL)
            until(lambda: any(one.leads for one in left), within_s=takeover_s / 2)
            (leader,) = [one for one in left if one.leads]
            left.remove(leader)
    assert_one_at_a_time(url)


def test_a_stopped_leader_is_followed_and_changes_nothing_more(postgresql_url: str) -> None:
    """Protects from a process that was paused and wakes up: it finds a newer term before it writes, stands by, and
    leads again when the other is gone."""
    url, takeover_s = postgresql_url, 5.0
    with candidates(url, takeover_s) as (one, other):
        one.said.clear()
        one.send(signal.SIGSTOP)
        until(lambda: other.leads)
        one.send(signal.SIGCONT)
        until(lambda: one.said.count("lost"))
        silent = one.said.index("lost") + 1
        time.sleep(1.5 * takeover_s)
        assert other.leads
        assert one.said[silent:] == [f"stands by: {other.holder} leads"]
        other.send(signal.SIGKILL)
        until(lambda: one.leads)
    assert_one_at_a_time(url)


def test_a_leader_stopped_in_the_middle_of_a_write(postgresql_url: str) -> None:
    """Protects from a paused process that keeps all writers waiting: its other sessions end with that of its lead."""
    url = postgresql_url
    change(
        url, "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(2); RETURN NEW; END$$"
    )
    with candidates(url, 1.0) as (one, other):
        change(url, "CREATE TRIGGER slow BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION slow()")
        time.sleep(0.5)
        one.send(signal.SIGSTOP)
        # The statement ends; its transaction, and the writers' lock, would not.
        time.sleep(2.0)
        change(url, "ALTER TABLE actions DISABLE TRIGGER slow")
        until(lambda: other.leads)
        one.send(signal.SIGCONT)
        until(lambda: "lost" in one.said)
    assert_one_at_a_time(url)


def test_a_leader_that_hangs_keeps_its_file(sqlite_url: str) -> None:
    """Protects from two that act: a lock cannot be taken from a process that lives. Whoever stands by says whom to
    kill, once."""
    said, now = list[str](), [0.0]
    with candidates(sqlite_url, 0.5, 1) as (one,), LeaderLock(sqlite_url, "gres") as lock:
        lead = Leadership(lock, 0.5, say=said.append, monotonic=lambda: now[0])
        assert not lead.take() and said == [f"stands by: {one.holder} leads"]
        one.send(signal.SIGSTOP)
        os.waitpid(one.pid, os.WUNTRACED)
        for _ in range(30):
            now[0] += 0.05
            assert not lead.take()
        host, pid = one.holder.split(":")
        assert len(said) == 2 and said[1].endswith(f"To let this companion lead, run on {host}: kill -9 {pid}")
        one.send(signal.SIGKILL)
        until(lead.take)
        assert said[2] == "leads, in term 2: it decides about the jobs here"
        lead.leave()


def test_whoever_waits_says_so_before_a_leader_is_written_down(url: str) -> None:
    """Protects cron's second run of two on a new database from leaving without a word: the first has the lock, and its
    record comes a moment later."""
    said: list[str] = []
    with LeaderLock(url, "gres") as one, LeaderLock(url, "gres") as other:
        assert one._lock.take()
        lead = Leadership(other, 60.0, say=said.append)
        assert not lead.take() and not lead.take()
        assert said == ["stands by: another companion leads"]


def test_one_that_was_stopped_itself_listens_first(postgresql_url: str) -> None:
    """Protects a leader from one that stood by, was paused longer than the take-over time, and heard nothing."""
    now = [0.0]
    with LeaderLock(postgresql_url, "gres") as one, LeaderLock(postgresql_url, "gres") as other:
        assert one.take(1.0) == 1
        lead = Leadership(other, 60.0, say=lambda line: None, monotonic=lambda: now[0])
        for second in (1.0, 6.0, 11.0, 111.0, 116.0, 121.0):
            now[0] = second
            assert not lead.take()
            one.check()
        # Heard of, it stays; it is silent for as long as it may be, and goes.
        one.beat(2.0)
        for second in range(125, 185, 5):
            now[0] = float(second)
            assert not lead.take()
        now[0] = 185.0
        assert lead.take() and lead.term == 2
        with pytest.raises(NotLeader, match="lead is lost"):
            one.check()
        lead.leave()


def test_a_leader_that_was_heard_of_meanwhile_is_left_alone(postgresql_url: str) -> None:
    """Protects one that woke up in the last moment, and one that took the lead after somebody else had been silent."""
    with LeaderLock(postgresql_url, "gres") as one, LeaderLock(postgresql_url, "gres") as other:
        one.take(1.0)
        heard = other.leader()
        assert heard is not None
        one.beat(2.0)
        assert other.take(3.0, heard) is None
        one.check()


def test_a_server_that_is_restarted(postgresql_url: str, server: Server) -> None:
    """Protects from two that lead after a night's maintenance: the lock went with its session, and one takes it
    anew."""
    with LeaderLock(postgresql_url, "gres") as lock, LeaderLock(postgresql_url, "gres") as waiting:
        one, other = (Leadership(lock, 5.0, say=lambda line: None) for lock in (lock, waiting))
        try:
            assert one.take() and not other.take()
            server.stop(signal.SIGQUIT)
            # Once: what it remembers may no longer be so.
            assert not one.take()
            for lead in (one, other):
                with pytest.raises(StoreLost):
                    lead.take()
            with pytest.raises(NotLeader):
                one.check()
            server.start()
            assert [other.take(), one.take()] == [True, False]
            assert other.term == 2
        finally:
            one.leave()
            other.leave()


def test_a_session_that_is_ended_by_hand(postgresql_url: str) -> None:
    with LeaderLock(postgresql_url, "gres") as lock:
        lead = Leadership(lock, 60.0, say=lambda line: None)
        assert lead.take()
        change(
            postgresql_url,
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()",
        )
        with pytest.raises(NotLeader):
            lead.check()
        assert not lead.take()
        until(lead.take)
        assert lead.term == 2
        lead.leave()


@pytest.mark.parametrize("how", ["removed", "replaced", "a link"])
def test_a_lock_file_that_is_gone(sqlite_url: str, how: str, tmp_path: Path) -> None:
    """Protects from two that each lock a file of that name: whoever has the older one does not lead any more."""
    path = file_of(sqlite_url)
    with LeaderLock(sqlite_url, "gres") as one, LeaderLock(sqlite_url, "gres") as other:
        assert one.take(1.0) == 1
        one.check()
        path.unlink()
        if how == "replaced":
            path.touch()
        elif how == "a link":
            path.symlink_to(tmp_path / "elsewhere")
            with pytest.raises(StoreError, match="must be a file"):
                other.take(2.0)
            assert not (tmp_path / "elsewhere").exists()
            path.unlink()
        with pytest.raises(NotLeader, match="lead is lost"):
            one.check()
        assert other.take(3.0) == 2
        assert one.take(4.0) is None
        other.check()


def test_the_lock_file_is_the_companions_own(sqlite_url: str, tmp_path: Path) -> None:
    """Protects from other users, who could keep the lock; from a FIFO, at which an open would wait; and from a link to
    the database, under whose name another companion would find another file."""
    path = file_of(sqlite_url)
    with LeaderLock(sqlite_url, "gres") as lock:
        assert lock.take(1.0) == 1
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        link = tmp_path / "link.sqlite"
        link.symlink_to(backend_of(sqlite_url).place)
        with LeaderLock(f"sqlite:///{link}", "gres") as other:
            assert other.take(2.0) is None
    assert path.exists()
    path.unlink()
    os.mkfifo(path)
    with LeaderLock(sqlite_url, "gres") as lock, pytest.raises(StoreError, match="plain file"):
        lock.take(3.0)


def test_a_leader_is_heard_of(url: str) -> None:
    """Protects one whose tick takes long: a thread of its own speaks for it."""
    with LeaderLock(url, "gres") as lock:
        lead = Leadership(lock, 0.5, say=lambda line: None)
        assert lead.take()
        beats, end = set[float](), time.monotonic() + 60
        while len(beats) < 5 and time.monotonic() < end:
            leader = lock.leader()
            assert leader is not None
            beats.add(leader.beat)
            time.sleep(0.02)
        assert len(beats) == 5
        lead.leave()
        assert lock.leader() == leader._replace(holder="", beat=lock.leader().beat)  # type: ignore[union-attr]
