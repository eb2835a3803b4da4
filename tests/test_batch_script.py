"""A batch script is understood before it is submitted; tests/golden has what stands against each, with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.cli.check import Weight, comment_findings, examine, read_script
from slurm_ones.cli.template import templates
from tests.commands import call

GOOD = """#!/bin/bash
#SBATCH --nodes=1 --gres=gpu:1
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --comment="ones: gpus=1-16 batch=32-1024"
exec ones-run "$@"
"""
BLOCKS = (
    GOOD.replace("1024", "1024 array=blocks")
    .replace("--nodes=1", "--array=0-7%1 --nodes=1")
    .replace("ones-run", "ones-run --blocks")
)


def faults(text: str) -> list[tuple[int, str]]:
    return [(one.line, one.text) for one in examine(text).findings if one.weight is Weight.ERROR]


TYPED = GOOD.replace("gpu:1", "gpu:2080ti:1").replace("1024", "1024 kinds=2080ti,a100")


@pytest.mark.parametrize("text", [GOOD, BLOCKS, TYPED])
def test_a_good_script_has_no_finding(text: str) -> None:
    verdict = examine(text)
    assert verdict.elastic
    assert verdict.findings == ()
    assert verdict.shape == (1, 1)


def test_our_own_templates_have_no_fault() -> None:
    """What we ship is what we ask for."""
    scripts = {name: text for name, text in templates().items() if "#SBATCH" in text and "gres" in text}
    assert scripts
    for text in scripts.values():
        assert faults(text) == []


def test_json_names_line_and_weight(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(GOOD.replace("--nodes=1", "--nodes=1 --ntasks=4"))
    done = call("check", str(tmp_path / "job.sbatch"), "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["elastic"], found["findings"][0]["line"]) == (1, False, 2)


@given(st.text(max_size=300))
def test_no_text_stops_it(text: str) -> None:
    """A script is whatever somebody points at."""
    examine("#SBATCH " + text)
    read_script(text)
    comment_findings(text)
