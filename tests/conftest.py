"""What all tests share: an empty database, a PostgreSQL, and the two real clusters, started once a worker and built
first where they are not yet."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ones_db import migrate
from tests import workers
from tests.cluster import Cluster, ClusterError, Site, unavailable
from tests.cluster.cli import Progress
from tests.cluster.sites import GRES_TYPED
from tests.db.server import NoServer, Server

# How long examples take to draw says something of the machine, and nothing of what is tested.
settings.register_profile("ones", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ones")
# Who starts pytest in the background has its processes ignore Ctrl-C, and those that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = "ONES_SEED"
"""In the environment: what faults and hostile inputs follow from, another one each time unless it is given."""


SLOW = (
    "tests/act/test_crash.py::test_many_random_resizes_without_faults_end_well",
    "tests/act/test_crash.py::test_whatever_happens",
    "tests/db/test_leader_lock.py",
    "tests/db/test_sharing.py",
    "tests/decide/test_contract.py::TestPollux",
    "tests/decide/test_drl.py::TestWeights",
    "tests/faults/test_faults.py",
    "tests/fuzz/test_fuzz.py::test_new_inputs",
    "tests/packaging/test_wheels.py",
    "tests/rules/test_caps.py::test_caps_hold_whatever",
    "tests/rules/test_reclaim.py::test_every_policy_decides_within_what_is_left",
    "tests/simulate/test_engine.py::test_equal_seeds_give_equal_outcomes",
    "tests/simulate/test_engine.py::test_every_job_resized_at_every_tick_does_its_exact_work",
    "tests/simulate/test_engine.py::test_faults_lose_no_job",
    "tests/simulate/test_study.py::test_processes_change_nothing",
    "tests/wrapper/checkpoint/test_ranks.py",
    "tests/wrapper/checkpoint/test_safetensors.py",
    "tests/wrapper/gradients/test_decentlam.py::test_a_resize",
    "tests/wrapper/gradients/test_fsdp.py",
    "tests/wrapper/gradients/test_mpi_exchange.py",
    "tests/wrapper/gradients/test_noise.py",
    "tests/wrapper/launch/test_launchers.py",
    "tests/wrapper/launch/test_restart_policy.py",
    "tests/wrapper/launch/test_supervise.py",
    "tests/wrapper/layouts/test_hot_ring.py",
    "tests/wrapper/layouts/test_lm_ring.py",
    "tests/wrapper/layouts/test_ring_job.py",
    "tests/wrapper/strategies/test_contract.py",
    "tests/wrapper/test_elastic.py::test_batch_order_takes_effect_without_a_restart",
    "tests/wrapper/test_elastic.py::test_full_disk_does_not_stop_training",
    "tests/wrapper/test_elastic.py::test_newer_order_calls_a_drain_off",
    "tests/wrapper/test_elastic.py::test_plain_python_runs_the_same_script",
    "tests/wrapper/test_elastic.py::test_sigterm_checkpoints_and_says_so",
    "tests/wrapper/test_examples.py",
    "tests/wrapper/test_group.py::test_contract_over_mpi",
    "tests/wrapper/test_group.py::test_contract_over_torch",
    "tests/wrapper/test_optimizers.py",
    "tests/wrapper/test_requests.py",
    "tests/wrapper/test_same_result.py",
)
"""What takes long without a Slurm, by the beginnings of its name: left out by `make check`, as all that needs a
PostgreSQL is."""


LONG = (
    "tests/endtoend/test_blocks.py",
    "tests/endtoend/test_long.py",
    "tests/endtoend/test_guide.py",
    "tests/wrapper/frameworks/test_resized.py",
    "tests/wrapper/frameworks/test_blocks.py",
    "tests/endtoend/test_strategies.py",
    "tests/templates/test_sites.py::test_one_of_each_kind_trains",
    "tests/endtoend/test_frameworks.py",
    "tests/endtoend/test_real_scripts.py",
    "tests/wrapper/membership/test_endurance.py",
    # Of each of these, which have three variants or more, every run has one at least.
    "tests/endtoend/test_blocks_light.py::test_a_job_grows_and_shrinks_while_it_trains",
    "tests/endtoend/test_blocks_light.py::test_a_block_that_its_owner_cancels_stays_cancelled",
    "tests/wrapper/gradients/test_mpi_exchange.py::test_exchange",
    "tests/wrapper/launch/test_launchers.py::test_stop_reaches_ranks_through_any_launcher",
    "tests/wrapper/membership/test_hot.py::test_everything_is_carried",
    "tests/demo/test_demo.py::test_a_training_really_grows_and_shrinks",
    "tests/packaging/test_wheels.py::TestCompanion::test_a_demo_without_torch",
    "tests/demo/test_demo.py::test_nothing_outlives_a_demo_that_is_ended",
    "tests/endtoend/test_carried.py",
    "tests/endtoend/test_check.py",
    "tests/endtoend/test_container.py",
    "tests/endtoend/test_cron.py",
    "tests/endtoend/test_deadlines.py",
    "tests/endtoend/test_exactly_once.py",
    "tests/endtoend/test_faults.py",
    "tests/endtoend/test_fused_sweep.py",
    "tests/endtoend/test_job_log.py",
    "tests/endtoend/test_kill.py",
    "tests/endtoend/test_kinds.py",
    "tests/endtoend/test_leaves.py",
    "tests/endtoend/test_limits.py::test_blocks_leave_for_a_rigid_job",
    "tests/endtoend/test_metrics.py",
    "tests/endtoend/test_move.py",
    "tests/endtoend/test_park.py",
    "tests/endtoend/test_places.py",
    "tests/endtoend/test_service.py",
    "tests/endtoend/test_slow_node.py",
    "tests/endtoend/test_studies.py",
    "tests/endtoend/test_study.py",
    "tests/endtoend/test_sweep.py",
    "tests/endtoend/test_views.py",
    "tests/endtoend/test_wrong.py",
    "tests/plugin/test_plugin.py",
    "tests/slurm/test_types.py",
    "tests/wrapper/layouts/test_hot_ring.py",
    "tests/wrapper/layouts/test_lm_ring.py",
    "tests/wrapper/membership/test_hot_apart.py",
    "tests/wrapper/membership/test_hot_coreset.py",
    "tests/wrapper/membership/test_hot_onebit.py",
    "tests/wrapper/membership/test_hot_uneven.py",
    "tests/wrapper/membership/test_launched.py",
    "tests/wrapper/membership/test_terms.py",
    "tests/wrapper/strategies/test_contract.py::test_resizes",
    "tests/wrapper/test_onebit_lamb.py",
    "tests/wrapper/test_same_result.py",
)
"""What takes longest, the longest of it first. A third of it runs each time; all of it with ONES_LONG=all."""
LONGEST = ("tests/endtoend/test_slurm_away.py", "tests/endtoend/test_shares.py")
"""What takes minutes of waiting: it runs with ONES_LONG=all alone."""
LONG_TESTS = "ONES_LONG"
MANY = 1000
"""More tests than this are all tests."""


def drawn(tests: Iterable[str]) -> set[str]:
    """The long tests that run this time, by the run's seed. All are dealt into three hands, the longest first, so that
    each run takes about as long as any other."""
    if os.environ.get(LONG_TESTS) == "all":
        return {*tests}
    left = [test for test in tests if not test.startswith(LONGEST)]
    place = {test: next(i for i, begin in enumerate(LONG) if test.startswith(begin)) for test in left}
    return {*sorted(place, key=lambda test: (place[test], test))[int(os.environ[SEED]) % 3 :: 3]}


def pytest_configure() -> None:
    # Before the workers are started, so that all have the same.
    os.environ.setdefault(SEED, str(secrets.randbelow(10**9)))
    # As `ones-run` has both: some tests start ranks themselves. And numerical libraries wait in a loop for their other
    # threads, which other tests keep from running: a reference of 0.1 s took 3 s of the processor.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = {item.nodeid for item in items if item.nodeid.startswith((*LONG, *LONGEST))}
    # One that was asked for by its name runs.
    left_out = long - drawn(long) if len(items) > MANY else set()
    for item in items:
        on_server = "server" in getattr(item, "fixturenames", ()) or "postgresql" in item.name
        if on_server or item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.skip(reason=f"not drawn by this run's seed: {LONG_TESTS}=all runs all"))
    items[:] = workers.in_order(items, LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.scheduler(config, log)


def pytest_report_header() -> str:
    return f"seed of faults and hostile inputs: {SEED}={os.environ[SEED]}"


@pytest.fixture(scope="session")
def seed() -> int:
    """The run's seed, which its first lines say."""
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
