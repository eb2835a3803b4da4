"""`slurm-ones check`, as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ones_wrapper.limits import Limits, SizeLimits
from ones_wrapper.protocol import Spec, encode
from tests.test_batch_script import BLOCKS, GOOD
from tests.test_cli import HOSTILE, call


def test_a_good_script(tmp_path: Path) -> None:
    """What it allows, how it is resized, where it reports; exit code 0."""
    (tmp_path / "job.sbatch").write_text(BLOCKS)
    done = call("check", str(tmp_path / "job.sbatch"))
    assert done.exit_code == 0, done.output
    words = ("elastic", "1 to 16 GPUs, batch 32 to 1024", "blocks that join", "ones-ARRAY-ID")
    assert [word for word in words if word not in done.stdout] == []


@pytest.mark.parametrize(
    ("comment", "code", "word"),
    [
        ("ones: gpus=1-16", 0, "1 to 16 GPUs"),
        ("ones: gpus=1 kinds=a100,v100", 0, "GPUs of type a100 or v100"),
        ("ones gpus=1-16", 1, "must begin with ones:"),
        ("ones: gpus=16-1", 1, "16-1"),
        ("ones: gpus=1-4 resize=off", 1, "never resized"),
        ("no-such-file", 2, "there is no such file"),
    ],
)
def test_a_comment(comment: str, code: int, word: str) -> None:
    done = call("check", comment)
    assert (done.exit_code, word in done.output) == (code, True), done.output


def test_json_names_line_and_weight(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(GOOD.replace("--nodes=1", "--nodes=1 --ntasks=4"))
    done = call("check", str(tmp_path / "job.sbatch"), "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["elastic"], found["findings"][0]["line"]) == (1, False, 2)


def test_a_hostile_script_is_text(tmp_path: Path) -> None:
    """Nothing of a script reaches the terminal as an escape."""
    (tmp_path / "job.sbatch").write_text(GOOD.replace("ones: gpus", HOSTILE.replace("\n", "") + " gpus"))
    assert "\x1b" not in call("check", str(tmp_path / "job.sbatch")).output


def test_the_limits_of_an_earlier_run(tmp_path: Path) -> None:
    """What its strategy cannot use is said before the job is submitted; a spec that is not believed too."""
    rows = tuple(SizeLimits(n, n // 4, together=4) for n in (4, 8, 16))
    file = tmp_path / "spec.json"
    file.write_bytes(encode(Spec(32, 512, 64, 1000, 5, limits=Limits("ring", rows, batch_fixed=True))))
    said = call("check", "ones: gpus=4-16", "--spec", str(file))
    assert said.exit_code == 0, said.output
    assert "strategy: ring runs on 4, 8 or 16 GPUs" in said.output and "ring keeps its batch now" in said.output
    assert "allow it steps of 4 alone, gpus=4-16:4" in " ".join(said.output.split())
    said = call("check", "ones: gpus=4-16:4", "--spec", str(file))
    assert "4 to 16 GPUs in steps of 4" in said.output and "allow it" not in said.output
    said = call("check", "ones: gpus=1-16", "--spec", str(file))
    assert "let it begin at 4" in said.output
    said = call("check", "ones: gpus=1-3", "--spec", str(file))
    assert said.exit_code == 1 and "allows 1 to 3: none of them" in said.output
    file.write_text(file.read_text().replace('"gpus": 8', '"gpus": -8'))
    said = call("check", "ones: gpus=4-16", "--spec", str(file))
    assert said.exit_code == 2 and "gpus: -8 is negative" in said.output
