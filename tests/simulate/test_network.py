"""Leaf switches in the idealized engine: jobs across them slow each other down, and what `ones` does about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ones_db.shape import Shape
from slurm_ones.cli.simulate import parse_network, parse_slow_nodes
from slurm_ones.ones import Ones, OnesOptions
from slurm_ones.ones.search import Search
from slurm_ones.ones.sizes import Leaves, exchange_shares
from slurm_ones.simulate import BadInput
from slurm_ones.simulate.oracle import place
from slurm_ones.simulate.run import run
from slurm_ones.simulate.spec import ClusterSpec, Network, Slowdown, slowdowns
from slurm_ones.simulate.training.application import Submission
from slurm_ones.simulate.workloads.profiles import Workload, read_profile
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import job
from tests.simulate.profiles import write_profile


def test_jobs_across_leaf_switches_slow_each_other_down() -> None:
    """Times the taper, and times the jobs that meet on the most used link; a job below one is left in peace."""
    cluster = ClusterSpec(6, 4, network=Network(3, 2, 3.0), slow_nodes=(0.5,)).view
    alone, inside = {"n2": 4, "n3": 4}, {"n5": 4, "n6": 4}
    assert slowdowns(cluster, [alone, inside]) == [Slowdown(1.0, 3.0), Slowdown()]
    both = slowdowns(cluster, [alone, {"n4": 4, "n6": 4}, {"n5": 4}, {"n1": 1}])
    assert both == [Slowdown(1.0, 6.0), Slowdown(1.0, 6.0), Slowdown(), Slowdown(2.0, 1.0)]


@pytest.mark.parametrize("uniform", [False, True])
def test_slow_nodes_are_taken_if_others_have_no_room(uniform: bool) -> None:
    cluster = ClusterSpec(4, 4, slow_nodes=(0.7,), any_shape=not uniform).view
    free = {"n1": 4, "n2": 4, "n3": 4, "n4": 4}
    assert set(place(Shape(1, 2), free, cluster)) == {"n2"}
    assert set(place(Shape(2, 4), free | {"n2": 2}, cluster)) == {"n3", "n4"}
    assert place(Shape(1, 4), {"n1": 4, "n2": 2}, cluster) == {"n1": 4}
    assert place(Shape(2, 4), {"n1": 4, "n2": 2}, cluster) == {}


@pytest.fixture
def made(tmp_path: Path) -> Workload:
    app = read_profile(write_profile(tmp_path / "net", placements={"1": 1.0, "2": 1.0, "4": 1.0, "22": 1.5, "44": 1.5}))
    jobs = tuple(Submission(f"net-{i}", 0.0, "net", gpus, 64) for i, gpus in enumerate((6, 6, 4)))
    return Workload("made", jobs, {"net": app})


def test_a_job_across_leaf_switches_trains_as_slowly_as_the_network_says(made: Workload) -> None:
    """The third finds two GPUs below each; without a taper it trains as fast as its placement does."""
    app = made.applications["net"]
    for taper in (3.0, 1.0):
        found = run("fifo", {}, made, ClusterSpec(4, 4, network=Network(2, 2, taper)), oracle="pack")
        speed = app.placed_speed((2, 2), 64.0, Slowdown(1.0, taper))
        assert found.jobs[2].running_s == pytest.approx(30.0 + app.total / speed, rel=1e-3)


def test_what_the_search_is_told_of_leaf_switches() -> None:
    """Sizes that need several are slower by their exchange; jobs that meet there cost each other more."""
    cluster = ClusterSpec(8, 4, network=Network(2, 4, 3.0)).view
    views = [job(i, gpus=(4, 8, 16, 32), requested=32) for i in (1, 2)]
    search, rng = Search(OnesOptions()), seeded()
    leaves = next(term for term in search.terms if isinstance(term, Leaves))
    search.remember(views, 0.0)
    at, may = search.situation(cluster, views, [], 0.0)
    tables = at.tables
    shares = exchange_shares(tables)
    size = {int(n): u for u, n in enumerate(tables.sizes)}
    assert shares[0, size[4]] == 0 and 0 < shares[0, size[8]] < shares[0, size[32]] < 0.7
    model, gpus, batch = views[0].model, np.array([16, 32]), tables.batch[0, [size[16], size[32]]]
    below, plain = tables.speed[0, [size[16], size[32]]], model.throughput(gpus // 4, gpus, batch)
    assert below[0] == pytest.approx(plain[0]), "below one"
    one = np.ones(1, dtype=np.int64)
    exchange = 32 * (batch[1] // 32) / plain[1] - (batch[1] // 32) / model.throughput(one, one, batch[1:] // 32)[0]
    assert batch[1] % 32 == 0 and batch[1] / below[1] == pytest.approx(batch[1] / plain[1] + 2 * exchange)
    share = shares[0, size[32]]
    assert share == pytest.approx(3 * exchange / (batch[1] / below[1]))
    choices = search.choices(search.priced(at, rng), may)
    lost = leaves.penalty(search.priced(at, rng), choices, 0.0)
    assert lost is not None
    one, two = np.array([size[32], size[16]]), np.array([size[32], size[32]])
    assert lost(np.array([one]))[0] == 0
    # Each takes longer for the other: exactly what the model says of two.
    assert lost(np.array([two]))[0] == pytest.approx(choices.value(two[None]).sum() * (1 - 1 / (1 + share)))
    assert leaves.penalty(search.priced(at, rng), choices, 0.0) is not None


def test_jobs_are_placed_below_few_leaf_switches_as_slurm_does() -> None:
    """The leaf switch with the least room that has enough, then the roomiest and what has enough for the rest."""
    cluster = ClusterSpec(8, 4, network=Network(4, 2, 3.0)).view
    free = {node.name: node.gpus for node in cluster.nodes} | {"n1": 0, "n5": 0}
    assert set(place(Shape(1, 4), free, cluster)) <= {"n2", "n6"}
    assert set(place(Shape(1, 8), free, cluster)) in ({"n3", "n4"}, {"n7", "n8"})
    three = place(Shape(1, 12), free, cluster)
    assert len({node.leaf for node in cluster.nodes if node.name in three}) == 2


def test_why_a_job_stays_below_a_leaf_switch_is_said() -> None:
    """GPUs are free below the other one, and it would be slower with them than without; where nothing is tapered it
    takes them."""
    wide = ClusterSpec(8, 4, network=Network(2, 4, 40.0)).view
    alone = job(1, gpus=(4, 8, 16, 32), requested=32)
    found = Ones().decide(wide, [alone], 9e4, seeded())
    assert found.allocations[1].shape.gpus == 16
    assert found.reasons[1].code == "within_switches"
    assert "32 GPUs would need more switches" in str(found.reasons[1])
    flat = Ones().decide(ClusterSpec(8, 4, network=Network(2, 4, 1.0)).view, [alone], 9e4, seeded())
    assert flat.allocations[1].shape.gpus == 32 and flat.reasons[1].code != "within_switches"


def test_what_is_wrong_with_a_network_is_said() -> None:
    for text in ("4x4:0.5", "4", "4x4:inf", "0x4:3", "4x4:true"):
        with pytest.raises(BadInput, match="is not LEAVESxNODES:TAPER"):
            parse_network(text)
    for text in ("2", "2:1.5", "-1:0.5", "2:true"):
        with pytest.raises(BadInput, match="is not COUNT:SPEED"):
            parse_slow_nodes(text)
    assert (parse_network("4x4:3"), parse_slow_nodes("2:0.7")) == (Network(4, 4, 3.0), (0.7, 0.7))
    with pytest.raises(BadInput, match="12 nodes, and the cluster has 4"):
        ClusterSpec(4, 4, network=Network(3, 4))
