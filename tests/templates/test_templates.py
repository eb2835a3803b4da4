"""The sbatch templates: pinned by what real Slurms make of them.

To renew the golden files after a deliberate change: ``GOLDEN=write pytest tests/templates``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_ones.config import Settings
from slurm_ones.observe.eligible import look
from slurm_ones.observe.optin import parse_comment
from slurm_ones.slurm.model import Partition, Snapshot
from slurm_ones.slurm.parse import parse_jobs
from tests.cluster import Cluster, paths

TEMPLATES = sorted((paths.REPOSITORY / "sbatch_templates").glob("*.sbatch"))
GOLDEN = Path(__file__).parent / "golden"
PARTITION = {"ddp.sbatch": "gpu", "ddp-whole-node.sbatch": "whole"}


def test_each_template_has_its_partition_here() -> None:
    """A template that is added is tested too."""
    assert {path.name for path in TEMPLATES} == PARTITION.keys()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(template: Path) -> None:
    """Users copy these lines: they are right in every shell that sbatch may use."""
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, template], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_flags_that_a_resize_needs(template: Path) -> None:
    """Requeue, an appended log, an opt-in that can be read, and no task counts (facts of the resize)."""
    options = [line.split()[1] for line in template.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "--requeue" in options
    assert "--open-mode=append" in options
    assert any(option.startswith("--signal=USR1@") for option in options)
    assert not any(option.startswith(("--ntasks", "-n", "--gpus", "-G", "--cpus-per-task")) for option in options)
    comment = next(line for line in template.read_text().splitlines() if "--comment=" in line).split('"')[1]
    optin = parse_comment(comment)
    assert optin is not None
    assert optin.resize


def _understood(cluster: Cluster, template: Path, *options: str) -> dict[str, Any]:
    """What Slurm holds of the template, submitted held."""
    command = ["sbatch", "--parsable", "--hold", f"--partition={PARTITION[template.name]}", *options, str(template)]
    job_id = int(cluster.run([*command, "train.py"], user="alice").stdout)
    data = json.loads(cluster.run(["squeue", "--json", f"--jobs={job_id}"], user="alice").stdout)
    text = cluster.run(["scontrol", "-o", "show", "job", str(job_id)], user="alice").stdout
    cluster.run(["scancel", str(job_id)], user="alice")
    job = parse_jobs(data)[job_id]
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    return {
        "job": job,
        "name": job.name,
        "nodes": [job.nodes, job.max_nodes],
        "gpus_per_node": job.gpus_per_node,
        "task_counts": job.task_counts,
        "requeue": job.requeue,
        "time_limit_s": job.time_limit_s,
        "comment": job.comment,
        "batch": job.batch,
        "output": words["StdOut"].replace(str(job_id), "%j"),
    }


@pytest.mark.cluster
@pytest.mark.parametrize("site", ["gres", "old"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_slurm_understands_the_template_as_pinned(site: str, template: Path, request: pytest.FixtureRequest) -> None:
    """Neither a change of the template nor a new Slurm changes unnoticed what is submitted."""
    found = _understood(request.getfixturevalue(site), template)
    del found["job"]
    path = GOLDEN / f"{template.stem}-{site}.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("option", "word"),
    [("--no-requeue", "--requeue"), ("--ntasks=2", "task counts"), ("--comment=ones: gpu=2", "gpu=2")],
)
@pytest.mark.parametrize("site", ["gres", "old"])
def test_a_template_spoiled_by_an_option_is_refused_in_words(
    site: str, option: str, word: str, request: pytest.FixtureRequest
) -> None:
    """Who overrides what a resize needs is told what to do, and the job is left alone."""
    job = _understood(request.getfixturevalue(site), paths.REPOSITORY / "sbatch_templates/ddp.sbatch", option)["job"]
    partition = Partition("gpu", True, (), 0, 0, False)
    elastic = look(job, Snapshot(0.0, {}, {}, {"gpu": partition}), Settings().whole_node_gpus | {"gpu": 4}, None)
    assert elastic is not None
    assert word in elastic.refusal
