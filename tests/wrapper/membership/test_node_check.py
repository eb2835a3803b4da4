"""A node that is emulated bad: its block leaves with a sentence, and those who train are not touched."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.group import Group, TorchGroup
from ones_wrapper.membership import node_check
from ones_wrapper.membership.node_check import NodeCheck, NodeFigures, why_unfit
from ones_wrapper.protocol import First, Note
from tests.marks import nightly
from tests.wrapper.forked import Team
from tests.wrapper.membership.blocks import ARRAY, Job

GOOD = NodeFigures("n9", "cpu", 2, 0, 0.001, 0.001)


@pytest.mark.parametrize(
    ("mine", "others", "why"),
    [
        ({"product_s": 3.0}, [{"product_s": 0.7}] * 2, "a matrix product takes 3 s, and 0.7 s on"),
        ({"product_s": 2.7}, [{"product_s": 0.7}] * 2, ""),
        ({"product_s": 0.4}, [{}], ""),  # a host's noise
        ({"product_s": 0.4, "device": "H100"}, [{"device": "H100"}], "a matrix product takes 0.4 s"),
        ({"product_s": 3.0}, [{"device": "H100"}, {"name": "n1"}], ""),  # unlike ones, and this one's own
        ({"product_s": 3.0}, [{"product_s": 0.7}, {"product_s": 9.0}, {"product_s": 9.0}], ""),  # the median counts
        ({"sum_s": 3.0}, [{}], "a sum over its ranks takes 3 s"),
        ({"sum_s": 3.0}, [{"ranks": 8}], ""),
        ({"free": 70 << 30}, [{"free": 80 << 30}], ""),
        ({"free": 60 << 30}, [{"free": 80 << 30}], "64.4 GB of its memory are free, and 85.9 GB on"),
        ({"free": 0}, [], ""),
    ],
)
def test_what_counts_as_unfit(mine: dict[str, Any], others: list[dict[str, Any]], why: str) -> None:
    found = why_unfit(replace(GOOD, name="n1", **mine), [replace(GOOD, **other) for other in others])
    assert found.startswith(why) and bool(found) == bool(why)


def checked(group: Group, folder: str, fault: str) -> str:
    """What a rank finds if the second one's node has this fault."""
    assert isinstance(group, TorchGroup)
    bad = group.rank == 1

    def multiply() -> None:
        if bad and fault == "raises":
            raise RuntimeError("no kernel image\nand more")
        if bad and fault in ("slow", "hangs"):
            time.sleep(0.6 if fault == "slow" else 4.0)

    def sums(group: TorchGroup) -> None:
        group.maximum([0])
        time.sleep(0.6 if bad and fault == "slow sum" else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_check, "CHECK_S", 3.0 if fault == "hangs" else 60.0)
        patch.setattr(node_check, "_multiplier", lambda device: multiply)
        patch.setattr(node_check, "_sum", sums)
        return NodeCheck(group, Path(folder), 7, {"SLURMD_NODENAME": f"n{group.rank}"}).why_unfit()


def told(folder: Path, *nodes: NodeFigures) -> None:
    for node in nodes:
        (folder / f"node-{node.name}.json").write_text(json.dumps(asdict(node) | {"array": 7}))


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("", ""),
        nightly("slow", "node n1: a matrix product takes 0."),
        ("slow sum", "node n1: a sum over its ranks takes 0."),
        ("raises", "a matrix product failed (RuntimeError: no kernel image"),
    ],
)
def test_all_ranks_of_a_bad_node_find_the_same(teams: dict[int, Team], tmp_path: Path, fault: str, why: str) -> None:
    told(tmp_path, GOOD)
    (tmp_path / "node-odd.json").write_text('{"array": 7, "name": "odd", "product_s": NaN}')
    one, other = teams[2].run(checked, str(tmp_path), fault)
    assert one.replace("node n0", "node n1") == other.replace("node n0", "node n1")
    assert why in other and bool(other) == bool(why)
    assert (tmp_path / "node-n1.json").exists() == (not why)


def test_a_directory_that_cannot_be_written(teams: dict[int, Team], tmp_path: Path) -> None:
    found = teams[2].run(checked, str(tmp_path / "gone"), "")
    assert found == [f"node n0: cannot write into {tmp_path / 'gone'} (No such file or directory)"] * 2


def test_a_node_that_hangs_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    with closing(Team(2)) as team:
        assert all("took more than 3 s" in found for found in team.run(checked, str(tmp_path), "hangs"))


def test_an_unfit_block_leaves_and_is_named_while_others_train(job: Job) -> None:
    """The other nodes' figures are emulated: they claim memory that this one lacks."""
    job.start(0)
    job.wait(First)
    other = replace(GOOD, free=1 << 40)
    (job.directory / "hot" / "node-n9.json").write_text(json.dumps(asdict(other) | {"array": ARRAY}))
    job.start(1)
    job.order(0, 1)
    note = job.wait(Note).note
    assert note.startswith("block 1: node ") and "0.0 GB of its memory are free" in note
    assert job.blocks[1].end() == 0 and note.partition(": ")[2] in job.blocks[1].errors
    job.finish(0)
    job.assert_as_undisturbed()
