"""A batch script is understood before it is submitted, and what stands against it is named with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ones.cli.batch_script import Weight, comment_findings, examine, read_script
from slurm_ones.cli.template import templates

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


@pytest.mark.parametrize(
    ("change", "line", "word"),
    [
        (("--nodes=1", "--nodes=1 --ntasks=4"), 2, "--ntasks"),
        (("--nodes=1", "-N1 -n 4"), 2, "--ntasks"),
        (("--nodes=1", "--nodes=1 --ntasks-per-node=2"), 2, "--ntasks-per-node"),
        (("--requeue", "--no-requeue"), 3, "--no-requeue"),
        (("--gres=gpu:1", "--gpus=4"), 2, "--gpus"),
        (("--gres=gpu:1", "-G 4"), 2, "--gpus"),
        (("ones: gpus", "ones gpus"), 5, "must begin with ones:"),
        (("ones: gpus", "my run; ones: gpus"), 5, "must begin with ones:"),
        (("gpus=1-16", "gpu=1-16"), 5, "gpu=1-16"),
        (("batch=32-1024", "batch=32-1024 array=blocks"), 0, "--array"),
        (("exec ones-run", "srun ones-run"), 6, "launcher"),
        (("exec ones-run", "exec torchrun"), 0, "ones-run"),
        (("exec ones-run", "exec ones-run --blocks"), 6, "array=blocks"),
    ],
)
def test_what_prevents_resizing_is_named_with_its_line(change: tuple[str, str], line: int, word: str) -> None:
    """The owner finds the word in the line that is named."""
    found = faults(GOOD.replace(*change))
    assert [place for place, text in found if word in text] == [line]
    assert not examine(GOOD.replace(*change)).elastic


@pytest.mark.parametrize(
    ("change", "line", "word"),
    [(("0-7%1", "0-7"), 2, "%1"), (("0-7%1", "0-7%8"), 2, "%1"), (("ones-run --blocks", "ones-run"), 6, "--blocks")],
)
def test_blocks_that_would_not_be_blocks(change: tuple[str, str], line: int, word: str) -> None:
    assert [place for place, text in faults(BLOCKS.replace(*change)) if word in text] == [line]


def test_tasks_of_an_ordinary_array_are_elastic() -> None:
    """A sweep's script is no mistake, and its owner hears which tasks keep their sizes."""
    for array, words in (("0-9", ["the last of them keeps"]), ("0-9%4", ["the last of them keeps", "%4: while tasks"])):
        verdict = examine(GOOD.replace("--nodes=1", f"--nodes=1 --array={array}"))
        assert verdict.elastic and len(verdict.findings) == len(words)
        assert all(word in one.text and one.line == 2 for word, one in zip(words, verdict.findings, strict=True))
    assert [text for _, text in faults(GOOD.replace("--nodes=1", "--nodes=1 --array=0-9%1"))] == []
    for array in ("5", "0-0%1", "0-3:4"):
        ((line, text),) = faults(GOOD.replace("--nodes=1", f"--nodes=1 --array={array}"))
        assert line == 2 and "the one task" in text


def test_directives_after_the_first_command_and_nearly_directives() -> None:
    text = GOOD.replace("exec ones-run", "# SBATCH --time=1\nmodule load x\n#SBATCH --time=9\nexec ones-run")
    assert [(one.line, one.weight.value) for one in examine(text).findings] == [(6, "warning"), (8, "error")]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [("2080ti:1", "v100:1", "asks for v100 GPUs"), ("--gres=gpu:2080ti:1", "--exclusive", "does nothing")],
)
def test_types_of_gpu_that_do_not_fit(before: str, after: str, word: str) -> None:
    """What the comment allows against what the script asks for."""
    (found,) = examine(TYPED.replace(before, after)).findings
    assert (found.weight, found.line) == (Weight.WARNING, 5) and word in found.text


def test_where_the_reports_will_lie() -> None:
    assert examine(GOOD).directory == "where you call sbatch/ones-JOB-ID"
    assert examine(GOOD.replace("exec", 'export ONES_JOB_DIR="$SCRATCH/a"\nexec')).directory == "$SCRATCH/a"
    assert (
        examine(GOOD.replace("exec", 'export ONES_JOB_ROOT="$SCRATCH/a"\nexec')).directory == "$SCRATCH/a/ones-JOB-ID"
    )
    assert examine(GOOD.replace("exec", "# ONES_JOB_ROOT=/a\nexec")).directory == "where you call sbatch/ones-JOB-ID"
    assert examine(GOOD.replace("--requeue", "--requeue --chdir=/x")).directory == "/x/ones-JOB-ID"


def test_a_first_size_outside_the_range_is_said() -> None:
    warnings = examine(GOOD.replace("gpus=1-16", "gpus=2-16")).findings
    assert ["starts with 1 gpus" in one.text for one in warnings] == [True]


@given(st.text(max_size=300))
def test_no_text_stops_it(text: str) -> None:
    """A script is whatever somebody points at."""
    examine("#SBATCH " + text)
    read_script(text)
    comment_findings(text)
