"""The batch scripts that users start from: correct shell, and understood by the real Slurms as they are meant."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ones_wrapper.protocol.optin import parse_comment
from slurm_ones.jobs.elastic import Elastic, WholeJob, arrays, elastic_job, whole_job
from tests.marks import nightly
from tests.slurm.sites import Site

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((REPOSITORY / "sbatch_templates").glob("*.sbatch"))
GOLDEN = Path(__file__).parent / "golden"
PLAIN = {
    "ddp": REPOSITORY / "tests/endtoend/plain.sbatch",
    "ddp-whole-node": REPOSITORY / "tests/endtoend/plain-whole-node.sbatch",
}
PARTITION = {"ddp": "gpu", "ddp-whole-node": "whole", "mpi": "whole"}
WHOLE = {"whole": 4}
each = pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)


def test_there_are_templates() -> None:
    """One for sites with GRES, one for sites without, one for MPI; a new one needs a partition to try it on."""
    assert {path.stem for path in TEMPLATES} == set(PARTITION)


@each
def test_shellcheck(template: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--severity=style", template], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@each
def test_directives(template: Path) -> None:
    """What facts of Slurm call for: requeue, append, no task counts, no variables, a comment that is understood."""
    text = template.read_text()
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--open-mode=append", "--signal=B:USR2@120"} <= set(directives)
    assert not [d for d in directives if "--ntasks" in d or "$" in d]
    (comment,) = [d.removeprefix("--comment=").strip('"') for d in directives if d.startswith("--comment=")]
    optin = parse_comment(comment)
    assert optin is not None and optin.blocks is blocks(template)
    # A throttle, or Slurm starts all of them at once; a log each, lest they write over each other's.
    assert ("--array=0-7%1" in directives) is blocks(template)
    assert ("--output=%x-%A_%a.out" in directives) is blocks(template)
    assert text.rstrip().endswith('exec ones-run --blocks "$@"' if blocks(template) else 'exec ones-run "$@"')


@pytest.mark.parametrize("template", [one for one in TEMPLATES if one.stem != "mpi"], ids=lambda path: path.stem)
def test_without_job_arrays(template: Path) -> None:
    """What it says to change at a site that has none makes a plain job of it: the one that other tests requeue."""
    text = template.read_text()
    plain = PLAIN[template.stem].read_text()
    for old, new in (("#SBATCH --array=0-7%1\n", ""), (" array=blocks", ""), (" --blocks", ""), ("%A_%a", "%j")):
        assert f"{old.split('=')[0].strip('# ').removeprefix('SBATCH ')}" in text
        text = text.replace(old, new)
    assert commands(text) == commands(plain)


def commands(text: str) -> list[str]:
    """What Slurm and the shell read of a batch script."""
    return [line for line in text.splitlines() if line and (line.startswith("#SBATCH") or not line.startswith("#"))]


def blocks(template: Path) -> bool:
    return template.stem != "mpi"


@each
def test_the_job_directory(template: Path, tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text(template.read_text().rpartition("exec ")[0] + "env")
    for env in ({}, {"ONES_JOB_DIR": "/scratch/mine"}, {"ONES_JOB_ROOT": "/scratch/ones"}):
        done = subprocess.run(
            ["bash", script], env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "9", **env}, cwd=tmp_path,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = dict(line.partition("=")[::2] for line in done.stdout.splitlines() if line.startswith("ONES_JOB_"))
        assert found == env


@pytest.fixture(scope="module", params=["gres-command", nightly("old-command")])
def door(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Each Slurm, by its commands."""
    cluster_name, client = request.param.split("-")
    site = Site(request.getfixturevalue(cluster_name), client)
    yield site
    site.close()


@pytest.fixture
def site(door: Site) -> Iterator[Site]:
    """Its jobs end with the test."""
    yield door
    door.clear()


def submit(site: Site, template: Path, *options: str) -> int:
    """The template as a user submits it, held."""
    shutil.copy(template, site.cluster.scratch / template.name)
    arguments = ["--hold", f"--partition={PARTITION[template.stem]}", *options]
    return site.adopt(site.owner.submit(Path("/scratch", template.name), arguments, directory=Path("/scratch")))


def understood(site: Site, job_id: int) -> dict[str, object]:
    """What Slurm made of it: the client's view, and of what that leaves out, Slurm's own."""
    job, shown = site.owner.job(job_id), site.show(job_id)
    return {
        "array": [bool(job.array_id), list(job.array_tasks), job.throttle],
        "name": job.name,
        "nodes": [job.nodes, job.max_nodes],
        "gpus_per_node": job.gpus_per_node,
        "gpus_per_job": job.gpus_total,
        "tasks": job.tasks,
        "task_counts": job.task_counts,
        "tasks_per_node": shown["NtasksPerN:B:S:C"].split(":")[0],
        "cpus_per_gpu": shown.get("CpusPerTres", ""),
        "requeue": job.requeue,
        "comment": job.comment,
        "time_limit_s": job.time_limit_s,
        # Of an array's record that stands for several tasks each release shows the task in its own way.
        "output": re.sub(r"JOB_.*\.", "JOB_TASK.", Path(shown["StdOut"]).name.replace(str(job_id), "JOB")),
    }


@each
@pytest.mark.cluster
def test_what_slurm_understands(site: Site, template: Path) -> None:
    """Pinned: a changed template or release shows here first. ONES_GOLDEN=write writes the files anew. And it may be
    resized as it is, to where its comment says."""
    job_id = submit(site, template)
    elastic = judged(site, job_id)
    assert elastic.refusal is None
    assert elastic.gpu_range == ((1, 16) if template.stem == "ddp" else (4, 16))
    found = understood(site, job_id)
    path = GOLDEN / f"{template.stem}-{site.cluster.site.name}.json"
    if os.environ.get("ONES_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(path.read_text())


def judged(site: Site, job_id: int) -> Elastic:
    snapshot = site.owner.snapshot()
    found = arrays(snapshot.jobs.values()).get(job_id)
    one = whole_job(job_id, found) if found else WholeJob.of(snapshot.jobs[job_id])
    elastic = elastic_job(one, snapshot, WHOLE, None)
    assert elastic is not None
    return elastic


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--no-requeue", "--requeue"),
        ("--ntasks=4", "task counts"),
        ("--ntasks-per-node=1", "task counts"),
        # Held tasks hide a missing throttle: it then is as if a companion held them.
        ("--array=1-2", "None"),
        ("--comment=ones: gpus=lots", "'gpus=lots'"),
        ("--comment=ones: gpus=1-4 nodes=1-2", "contradict"),
    ],
)
@pytest.mark.nightly
@pytest.mark.cluster
def test_what_a_user_adds_is_refused_with_words(site: Site, option: str, words: str) -> None:
    """The template's own directives are overridden on the command line; `why` says what that costs."""
    (template,) = (one for one in TEMPLATES if one.stem == "ddp")
    assert words in str(judged(site, submit(site, template, option)).refusal)
