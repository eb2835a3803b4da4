"""What `slurm-ones check` says of a batch script, and what the real Slurm and a companion do with the very same one."""

from __future__ import annotations

import json

import pytest

from ones_wrapper.protocol import Hello
from tests.endtoend.harness import FOR_EVER, TRAIN, Harness

SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=checked
#SBATCH --nodes=1 --gres=gpu:2 --cpus-per-gpu=1 --time=10
#SBATCH --requeue --open-mode=append --output=%x-%j.out
#SBATCH --signal=B:USR2@120
#SBATCH --comment="ones: gpus=2-4:2 batch=16-64"
export ONES_JOB_ROOT=PLACE
exec ones-run {TRAIN} {" ".join(FOR_EVER)}
"""
NEAR = SCRIPT.replace("ones: gpus", "ones gpus")
COUNTED = SCRIPT.replace("--nodes=1", "--nodes=1 --ntasks-per-node=1")


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_script_is_treated_as_it_was_told(harness: Harness) -> None:
    """The one found elastic starts with the shape that was said, reports where that was said, is understood as that was
    said and grows; of two others the companion has the same against them as `check`, and changes nothing."""
    folder = harness.folder("check")
    inside = f"/scratch/{folder.name}"
    said, jobs = {}, {}
    for name, text in (("good", SCRIPT), ("near", NEAR), ("counted", COUNTED)):
        (folder / name).write_text(text.replace("PLACE", inside))
        done = harness.cluster.run(["slurm-ones", "check", f"{inside}/{name}", "--json"], check=False)
        said[name] = json.loads(done.stdout)
        assert (done.returncode, said[name]["elastic"]) == ((0, True) if name == "good" else (1, False)), done.stdout
        jobs[name] = int(harness.cluster.run(["sbatch", "--parsable", f"{inside}/{name}"]).stdout)
    hello = harness.report(jobs["good"], 0, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello)
    assert [hello.nodes, hello.gpus_per_node] == said["good"]["shape"]
    assert hello.directory == said["good"]["directory"].replace("JOB-ID", str(jobs["good"]))
    harness.trains(*jobs.values())
    settings = harness.settings()
    with harness.running(settings, "--act", "--own"):
        harness.wait(jobs["good"], lambda job: job.running and job.restart == 1, "resized")
        harness.ticks(settings)
        why = {name: harness.why(settings, job_id) for name, job_id in jobs.items()}
    assert why["good"]["job"]["refusal"] == ""
    optin = said["good"]["optin"]
    assert [*optin["gpus"], optin["step"], *optin["batch"]] == [2, 4, 2, 16, 64]
    wrong = harness.cluster.run(["slurm-ones", "pin", str(jobs["good"]), "6"], check=False)
    assert wrong.returncode == 2 and "not within gpus=2-4" in wrong.stderr, wrong
    grown = harness.job(jobs["good"])
    assert (grown.nodes * grown.gpus_per_node, grown.restart) == (4, 1)
    for name, word in (("near", "ones: gpus=2-4:2"), ("counted", "task counts")):
        assert any(word in finding["text"] for finding in said[name]["findings"]), said[name]
        assert word in json.dumps(why[name]), why[name]
        assert (harness.job(jobs[name]).restart, harness.job(jobs[name]).gpus_per_node) == (0, 2)
