"""`slurm-ones check`, as scripts call it; what it says is in tests/golden."""

from __future__ import annotations

import json
from pathlib import Path

from tests.test_batch_script import GOOD
from tests.test_cli import HOSTILE, call


def test_json_names_line_and_weight(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(GOOD.replace("--nodes=1", "--nodes=1 --ntasks=4"))
    done = call("check", str(tmp_path / "job.sbatch"), "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["elastic"], found["findings"][0]["line"]) == (1, False, 2)


def test_a_hostile_script_is_text(tmp_path: Path) -> None:
    """Nothing of a script reaches the terminal as an escape."""
    (tmp_path / "job.sbatch").write_text(GOOD.replace("ones: gpus", HOSTILE.replace("\n", "") + " gpus"))
    assert "\x1b" not in call("check", str(tmp_path / "job.sbatch")).output
