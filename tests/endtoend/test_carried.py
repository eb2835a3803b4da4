"""What scripts carry beside a model, all at once, through a resize on a real Slurm."""

from __future__ import annotations

import csv
import json
from collections import defaultdict

import pytest
import torch

from ones_wrapper.data.feed import permutation
from ones_wrapper.protocol import Hello, decode_spec
from tests.cluster import paths
from tests.endtoend.carried import EPOCHS, PART
from tests.endtoend.harness import Harness
from tests.wrapper import gan
from tests.wrapper.runs import lines_that_count, samples_used


@pytest.mark.nightly
@pytest.mark.cluster
def test_all_that_a_script_carries_is_there_after_a_resize(harness: Harness) -> None:
    """A GAN started by `-m`, 1 → 2 GPUs: both models end as in one process that takes the same batches, so that both
    optimizers and the plain values went on; the log has each step once, under one name; batches are multiples of 8,
    each epoch has its whole batches alone, and the evaluation over two ranks is the exact mean."""
    folder = harness.folder("carried")
    inside = f"/scratch/{folder.name}"
    job_id = harness.submit(
        "-m",
        "tests.endtoend.carried",
        inside,
        options=("--comment=ones: gpus=1-4 batch=8-64", "--time=10", "--cpus-per-gpu=1", f"--chdir={inside}"),
        ONES_TRACE=f"{inside}/trace-{{restart}}-{{rank}}.jsonl",
        ONES_JOB_DIR=f"{inside}/job",
        PYTHONPATH=str(paths.REPOSITORY),
    )
    harness.trains(job_id)
    # 45 is no multiple of 8.
    harness.carry_out(harness.settings(scope='"own"'), {job_id: [[1, 2, 45]]})
    (folder / "hurry").touch()
    job = harness.wait(job_id, lambda job: job.ended and not job.completing, "ended")
    words = "".join(path.read_text() for path in folder.glob("*.out"))
    assert (job.state.value, job.restart) == ("COMPLETED", 1), words
    hellos = [next(r for r in harness.reports(job_id, n) if isinstance(r, Hello)) for n in range(2)]
    assert [(hello.world, hello.batch) for hello in hellos] == [(1, gan.BATCH), (2, 40)]
    assert decode_spec((folder / "job/spec.json").read_bytes()).multiple_of == PART

    whole = gan.SAMPLES - gan.SAMPLES % gan.BATCH
    used = samples_used(folder)
    assert {epoch: sorted(counter.elements()) for epoch, counter in used.items()} == {
        epoch: sorted(permutation(gan.SAMPLES, gan.SEED, epoch, True)[:whole].tolist()) for epoch in range(EPOCHS)
    }
    batches: dict[int, list[int]] = defaultdict(list)
    lines = [json.loads(line) for path in folder.glob("trace-*.jsonl") for line in path.read_text().splitlines()]
    for line in lines_that_count(lines):
        batches[line["step"]] += line["samples"]

    with (folder / "log.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head[0] == "step" and [(int(row[0]), int(row[1])) for row in rows] == [(n, n) for n in sorted(batches)]
    sizes = [(int(row[2]), int(row[3])) for row in rows]
    assert sizes == sorted(sizes) and {*sizes} == {(1, gan.BATCH), (2, 40)}
    assert len({row[4] for row in rows}) == 1 and f"-{job_id}-" in rows[0][4]

    found, counters = torch.load(folder / "found.pt")
    wanted = gan.train(batches[step] for step in sorted(batches))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert counters["steps"] == len(batches) and len({*counters["means"]}) == EPOCHS
    assert len(counters["errors"]) == EPOCHS and max(counters["errors"]) < 1e-12
