"""How ranks come into their run before the script: what they decide, and what the script is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ones_wrapper.group import Group
from ones_wrapper.launch import serve
from ones_wrapper.membership import entered
from ones_wrapper.membership.entered import Entered, enter_before_script
from ones_wrapper.network.job_network import STORE
from tests.wrapper.forked import Team

IN_BLOCK = {"ONES_BLOCKS": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def meets(group: Group, store: str, directory: str, shown: tuple[bool | None, ...]) -> int:
    """How many ranks this one met before the script; 0 for none. `shown` is what each finds of the job's last run:
    whether its state moved from memory to memory, or nothing."""
    mine = shown[group.rank]
    its: Any = None if mine is None else SimpleNamespace(hot=mine, limits=None)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**IN_BLOCK, STORE: store, "ONES_JOB_DIR": directory}.items():
            patch.setenv(name, value)
        patch.setattr(entered, "_MEET_S", 20.0)
        patch.setattr(entered, "read_spec", lambda directory: its)
        patch.setattr(entered, "enter_block", lambda group, block: Entered(group))
        found = enter_before_script()
    return 0 if found is None else found.group.maximum([group.rank])[0] + 1


@pytest.mark.parametrize(
    ("shown", "met"), [((False, None), 2), ((None, False), 0), ((True, True), 0), ((False, False), 2)]
)
def test_ranks_of_a_block_decide_alike(
    teams: dict[int, Team], tmp_path: Any, shown: tuple[bool | None, ...], met: int
) -> None:
    """Protects a block's start: a shared file system shows one node a spec that another does not see yet, and those who
    meet before the script would wait for those who do so in it."""
    assert teams[2].run(meets, serve(tmp_path, {}), str(tmp_path), shown) == [met, met]
