"""The companion as an unprivileged service on a real Slurm, as docs/admin.md has it installed."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from slurm_ones.slurm.client import Unreachable
from tests.cluster.sites import OPERATOR
from tests.conftest import served
from tests.db.make import actions
from tests.db.server import Server
from tests.endtoend.harness import LOOK_S, TICK_S, WAIT_S, Harness
from tests.endtoend.test_move import shown
from tests.endtoend.test_people import resized
from tests.endtoend.unit import WATCHDOG_S, Unit
from tests.waiting import until

pytestmark = pytest.mark.cluster
TICKED = "elastic jobs run"
"""What the companion says at each tick."""


@pytest.fixture
def spool(harness: Harness) -> str:
    """The operator's, by its name inside."""
    if not harness.cluster.accounting:
        pytest.skip(f"there is no operator: {harness.cluster.accounting_why}")
    return f"/scratch/{harness.spool(OPERATOR).name}"


def prepared(harness: Harness, spool: str, mode: str = '"act"', **top: str) -> tuple[int, str]:
    """A job that trains and reads the spool, and settings that are the operator's own."""
    job_id = harness.light(ONES_SPOOL=spool)
    harness.trains(job_id)
    settings = harness.settings(OPERATOR, spool=f'"{spool}"', mode=mode, **top)
    harness.cluster.run(["chown", "-R", OPERATOR, str(Path(settings).parent)], user="root")
    return job_id, settings


def status(harness: Harness, settings: str, **env: str) -> tuple[int, dict[str, object]]:
    """`slurm-ones status --json`: its exit code and what it says."""
    command = ["slurm-ones", "status", "--json", "--config", settings]
    done = harness.cluster.run(command, user=OPERATOR, check=False, env=env)
    return done.returncode, json.loads(done.stdout)


def well(harness: Harness, settings: str, unit: Unit) -> dict[str, object]:
    """What it says, once it says that all is well: with ticks as quick as a test's, one that is slow counts as
    missing."""
    return until(
        lambda: said[1] if (said := status(harness, settings))[0] == 0 else None,
        lambda: (status(harness, settings), unit.log()),
        WAIT_S,
        LOOK_S,
    )


def pid(harness: Harness, settings: str) -> str:
    """Of the companion that leads, inside the cluster: the process that was started from here only entered it."""
    with harness.store(settings) as store:
        leader = store.leader()
    assert leader is not None and leader.holder
    return leader.holder.rpartition(":")[2]


def test_the_service_from_its_start_to_its_end(harness: Harness, spool: str) -> None:
    """Unprivileged, it resizes another user's job; it is fed to the watchdog; settings are read again, or refused and
    the old ones stay in force; and what it holds it lets go when it is told to stop."""
    job_id, settings = prepared(harness, spool)
    file = harness.cluster.scratch / Path(settings).relative_to("/scratch")
    code, before = status(harness, settings)
    assert code == 1 and not before["healthy"]

    unit = Unit(harness, settings, OPERATOR)
    process = unit.start()
    job = harness.wait(job_id, resized(), "resized")
    harness.trains(job_id, restart=job.restart)
    unit.until(lambda: unit.count("WATCHDOG=1") >= 4, "four words to the watchdog")
    unit.until(lambda: unit.count(TICKED) > 0, "the tick as a status")
    # Fed at least twice as often as systemd asks, by the companion's own time: its ticks, which take TICK_S or more.
    words = [word for _, word in unit.heard()]
    fed = [place for place, word in enumerate(words) if word == "WATCHDOG=1"]
    ticks = [sum(TICKED in word for word in words[a:b]) for a, b in itertools.pairwise(fed)]
    assert max(ticks) <= WATCHDOG_S / 2 / TICK_S, words
    # The last tick that has ended may have begun before the job ran again.
    unit.until(lambda: well(harness, settings, unit)["last"]["running"] == 1, "a tick that saw it run")  # type: ignore[index]
    now = well(harness, settings, unit)
    assert now["problems"] == []
    assert now["leader"]["holder"]  # type: ignore[index]
    assert (file.parent / "ones.sqlite").stat().st_mode & 0o077 == 0

    def again(text: str, line: str) -> None:
        file.write_text(text)
        ready = unit.count("READY=1")
        process.send_signal(signal.SIGHUP)
        unit.until(lambda: line in unit.log(), line)
        unit.until(lambda: unit.count("READY=1") > ready, "ready again")

    good = file.read_text()
    # No resize is to begin any more: those jobs are left alone that started less than so many seconds ago.
    again(good.replace("dwell_s = 1", "dwell_s = 9999"), "settings read again; changed: resize.dwell_s")
    changed = file.read_text()
    again(changed.replace(f"tick_s = {TICK_S}", "tick_s = -7"), "tick_s: Input should be greater than 0, not -7")
    again(changed.replace("ones.sqlite", "other.sqlite"), "database: cannot change while the companion runs")
    file.write_text(good)
    assert unit.count("RELOADING=1\nMONOTONIC_USEC=") == 3
    with harness.store(settings) as store:
        told = [action.action for action in actions(store)]
        assert told[:3] == ["reload refused", "reload refused", "reload"]
        resizes = len(store.resizes())
        tick = store.health().tick_time  # type: ignore[union-attr]
    ticked = unit.count(TICKED)
    unit.until(lambda: unit.count(TICKED) >= ticked + 4, "some ticks")
    with harness.store(settings) as store:
        assert store.health().tick_time > tick  # type: ignore[union-attr,operator]
        assert len(store.resizes()) - resizes <= 1

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, unit.log()
    # A tick that was under way may say how it went afterwards.
    (leaving,) = [word for _, word in unit.heard() if "STOPPING=1" in word]
    assert "EXTEND_TIMEOUT_USEC=" in leaving
    job = harness.job(job_id)
    assert not job.held and not job.ended
    code, after = status(harness, settings)
    assert code == 1 and "the last one stopped" in str(after["problems"])
    unit.close()


@pytest.mark.nightly
def test_a_service_that_hangs_is_killed_and_started_again(harness: Harness, spool: str) -> None:
    """A loop that stands still feeds nobody; what systemd then does ends in a companion that goes on."""
    job_id, settings = prepared(harness, spool)
    unit = Unit(harness, settings, OPERATOR)
    process = unit.start()
    unit.until(lambda: unit.count("WATCHDOG=1") > 1, "the watchdog fed")
    harness.cluster.run(["kill", "-STOP", pid(harness, settings)], user="root")
    time.sleep(1)  # a thread ends its system call first
    unit.heard()
    stopped = time.monotonic()
    time.sleep(WATCHDOG_S)
    assert not [word for when, word in unit.heard() if when > stopped], "a process that is stopped says nothing"
    # What systemd does when the watchdog was not fed: SIGABRT, then SIGKILL.
    harness.cluster.run(["kill", "-ABRT", pid(harness, settings)], user="root")
    harness.cluster.run(["kill", "-KILL", pid(harness, settings)], user="root")
    process.wait(60)
    # One that hangs without being stopped takes the first, and says where it is.
    process = unit.start()
    ticks = unit.count(TICKED)
    # By then the thread that publishes views has imported what it needs: Python cannot safely write down the stack of a
    # thread that is busy.
    unit.until(lambda: unit.count(TICKED) > ticks + 4, "five ticks")
    harness.cluster.run(["kill", "-ABRT", pid(harness, settings)], user="root")
    process.wait(60)
    assert "Fatal Python error: Aborted" in unit.log() and "/slurm_ones/service/daemon.py" in unit.log()
    ticks = unit.count(TICKED)
    process = unit.start()
    unit.until(lambda: unit.count(TICKED) > ticks, "a tick")
    well(harness, settings, unit)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not harness.job(job_id).held
    unit.close()


def test_a_service_whose_settings_are_refused_is_not_started_again(harness: Harness, spool: str) -> None:
    """The exit code that the unit names in RestartPreventExitStatus."""
    settings = harness.settings(OPERATOR, spool=f'"{spool}"', mode='"go"')
    env = {"NOTIFY_SOCKET": "/scratch/nobody-listens"}
    done = harness.cluster.run(["slurm-ones", "run", "--config", settings], user=OPERATOR, check=False, env=env)
    assert done.returncode == 78 and "mode: Input should be 'advise' or 'act'" in done.stderr


@pytest.fixture
def server() -> Iterator[Server]:
    """One of its own, whose roles are changed and which is stopped."""
    yield from served()


SECRET = "Qy7-not-to-be-seen"


def command_lines() -> list[bytes]:
    """Of all processes, as every user of the machine can read them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Processes come and go.
        with suppress(OSError):
            found.append(path.read_bytes())
    return found


@pytest.mark.parametrize("way", ["PGPASSWORD", "pgpass", "config"])
@pytest.mark.nightly
def test_a_password_is_seen_nowhere(harness: Harness, spool: str, server: Server, way: str) -> None:
    """Whichever way it is given: not in a list of processes, the log, what the commands say, or the database."""
    name = server.fresh()
    server.psql(f"CREATE ROLE locked LOGIN PASSWORD '{SECRET}'")
    server.psql("GRANT ALL ON SCHEMA public TO locked; ALTER SCHEMA public OWNER TO locked", name)
    folder = harness.folder("secret")
    shown(server, folder)
    inside = f"/scratch/{folder.name}"
    env = {}
    password = f":{quote(SECRET)}" if way == "config" else ""
    url = f"postgresql://locked{password}@/{quote(name)}?host={inside}"
    if way == "PGPASSWORD":
        env = {"PGPASSWORD": SECRET}
    elif way == "pgpass":
        (folder / "pgpass").write_text(f"*:*:*:locked:{SECRET}\n")
        env = {"PGPASSFILE": f"{inside}/pgpass"}
    settings = harness.settings(OPERATOR, spool=f'"{spool}"', mode='"act"', database=f'"{url}"')
    own = [str(Path(settings).parent), *([f"{inside}/pgpass"] if way == "pgpass" else [])]
    harness.cluster.run(["chown", "-R", OPERATOR, *own], user="root")
    harness.cluster.run(["chmod", "600", settings, *own[1:]], user="root")
    unit = Unit(harness, settings, OPERATOR, **env)
    process = unit.start("--verbose")
    unit.until(lambda: "elastic jobs run" in unit.log(), "a tick")
    seen = command_lines()
    assert len(seen) > 10 and not any(SECRET.encode() in line for line in seen)
    said = [unit.log(), *(word for _, word in unit.heard())]
    for command in (["status"], ["status", "--json"], ["doctor"], ["doctor", "--json"]):
        done = harness.cluster.run(["slurm-ones", *command, "--config", settings], user=OPERATOR, check=False, env=env)
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        said += [done.stdout, done.stderr]
    server.stop(signal.SIGQUIT)
    unit.until(lambda: "trying again in" in unit.log() or "trying to take the lead again" in unit.log(), "an error")
    for command in (["status"], ["doctor"]):
        done = harness.cluster.run(["slurm-ones", *command, "--config", settings], user=OPERATOR, check=False, env=env)
        assert done.returncode == 1
        said += [done.stdout, done.stderr]
    server.start()
    # A password that is refused must not be told either.
    server.psql("ALTER ROLE locked PASSWORD 'another'")
    wrong = harness.cluster.run(["slurm-ones", "run", "--config", settings], user=OPERATOR, check=False, env=env)
    assert wrong.returncode == 2
    said += [wrong.stdout, wrong.stderr, unit.log(), server.dump(name)]
    assert not [text for text in said if SECRET in text]
    process.kill()
    unit.close()


@pytest.mark.nightly
def test_a_rate_limit_is_waited_for(harness: Harness, spool: str) -> None:
    """Slurm's commands wait where slurmctld limits them, so a tick is slow, or is given up at timeout_s and tried again
    later; it neither ends the companion nor passes for an empty queue."""
    job_id, settings = prepared(harness, spool, mode='"advise"', timeout_s="2", client='"command"')
    conf = harness.cluster.root / "etc/slurm/slurm.conf"
    before = conf.read_text()
    limit = "SlurmctldParameters=rl_enable,rl_bucket_size=2,rl_refill_rate=1,rl_refill_period=6\n"
    unit = Unit(harness, settings, OPERATOR)
    process = unit.start()
    unit.until(lambda: unit.count(TICKED) > 0, "a tick")
    try:
        conf.write_text(before + limit)
        harness.cluster.run(["scontrol", "reconfigure"], user="root")
        unit.until(lambda: "no answer within 2 s" in unit.log(), Unreachable.__name__)
    finally:
        conf.write_text(before)
        harness.cluster.run(["scontrol", "reconfigure"], user="root", timeout=120)
    ticks = unit.count(TICKED)
    unit.until(lambda: unit.count(TICKED) > ticks, "a tick once the limit is gone")
    with harness.store(settings) as store:
        assert store.jobs([job_id])[job_id].end_time is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, unit.log()
    unit.close()
