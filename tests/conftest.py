"""What all tests share: an empty database, a PostgreSQL, and the two real clusters, started once a worker and built
first where they are not yet."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, which conftest.py of a room may do. As `ones-run` has both: some tests start ranks
# themselves. And numerical libraries wait in a loop for their other threads, which other tests keep from running: a
# step of a tiny model took 15 ms of the processor rather than 0.5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Plugins of hypothesis, such as trio's, are imported with it: half of what it takes, and nobody's here.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")
from hypothesis import HealthCheck, settings

from ones_db import Store, migrate
from tests import workers
from tests.cluster import Cluster, ClusterError, Site, unavailable
from tests.cluster.cli import Progress
from tests.cluster.sites import GRES_TYPED
from tests.db.server import NoServer, Server
from tests.db.statements import shared_statements
from tests.endtoend.warm import WarmBox
from tests.marks import NIGHTLY

SEED = "ONES_SEED"
"""In the environment: the seed of faults and hostile inputs."""
# How long examples take to draw says something of the machine, and nothing of what is tested.
settings.register_profile(
    "ones", max_examples=20, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("ones"), max_examples=200, derandomize=False, print_blob=True)
settings.load_profile("nightly" if NIGHTLY else "ones")
MEMORY = Path("/dev/shm")
ROOM = 4 << 30
"""Bytes that must be free in memory for what tests write."""
# Who starts pytest in the background has its processes ignore Ctrl-C, and those that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    # Before the workers are started, so that all have the same.
    os.environ.setdefault(SEED, str(secrets.randbelow(10**9) if NIGHTLY else 1))
    # Databases sync each write, which on a disk takes more time than all else that many tests do.
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end. The garbage collector looks for nothing there, neither now,
    which would take 6 of 14 s of the processor, nor in the tests and in what they fork."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()) or "postgresql" in item.name:
            item.add_marker(pytest.mark.slow)
    items[:] = workers.in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Any) -> None:
    workers.fork(config, specs)


def pytest_report_header() -> str:
    return f"seed of faults and hostile inputs: {SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of faults and hostile inputs: the same in each run but a night's, whose first lines say it."""
    return int(os.environ[SEED])


def quick(cluster: Cluster) -> None:
    """Have Slurm start jobs at once: it gathers them for up to 3 s, which tests need not wait for."""
    conf = cluster.root / "etc/slurm/slurm.conf"
    # The first of two values counts.
    options = "SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,"
    conf.write_text(conf.read_text().replace("SchedulerParameters=", options))
    cluster.run(["scontrol", "reconfigure"], user="root")
    # All daemons start anew; a node is not responding until it has registered again.
    cluster.await_nodes()


def start(request: pytest.FixtureRequest, site: str | Site) -> Cluster:
    """A running cluster of that site. A build takes minutes, so its progress is shown, captured output or not."""
    why = unavailable()
    if why is not None:
        pytest.skip(why)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        try:
            cluster = Cluster(site, report=Progress()).start()
        except ClusterError as error:
            pytest.fail(f"no cluster {site!r}: {error}", pytrace=False)
    quick(cluster)
    cluster.box = WarmBox(cluster)
    return cluster


@pytest.fixture(scope="session")
def gres(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Slurm 26.05 with PySlurm: 4 nodes × 4 GPUs as GRES, and whole nodes."""
    cluster = start(request, "gres")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def old(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Slurm 22.05, by its commands alone: the same layout."""
    cluster = start(request, "old")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Slurm 26.05: node t1 with 4 GPUs of type 2080ti, t2 and t3 with 4 each of type a100."""
    cluster = start(request, GRES_TYPED)
    yield cluster
    cluster.stop()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder for what other users reach: pytest's are closed to them, and closed again by each run that begins."""
    with tempfile.TemporaryDirectory(prefix="ones-public-") as place:
        Path(place).chmod(0o755)
        yield Path(place)


@pytest.fixture(scope="session", autouse=True)
def statements() -> Iterator[None]:
    """Of all databases that tests open."""
    with shared_statements():
        yield


@pytest.fixture(scope="session")
def empty_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without rows, migrated once for all tests."""
    path = tmp_path_factory.mktemp("empty") / "ones.sqlite"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def empty_url(tmp_path: Path, empty_sqlite: Path) -> str:
    """A database without rows, of this test alone: to copy one takes a hundredth of what its migrations take."""
    return f"sqlite:///{shutil.copy(empty_sqlite, tmp_path / 'ones.sqlite')}"


@pytest.fixture
def store(empty_url: str) -> Iterator[Store]:
    with Store.open(empty_url, "here") as opened:
        yield opened


def served(in_memory: bool = False) -> Iterator[Server]:
    """A PostgreSQL for as long as a fixture lives."""
    try:
        server = Server(in_memory)
    except NoServer as error:
        pytest.skip(str(error))
    try:
        server.create()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL that runs as long as the tests."""
    yield from served()
