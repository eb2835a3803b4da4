"""Jobs whose files are elsewhere, orders by the spool, and a job that goes on from an earlier one."""

from __future__ import annotations

import json

import pytest

from ones_wrapper.protocol import ORDERS, Checkpoint, Hello
from tests.endtoend.harness import Harness
from tests.endtoend.test_people import resized

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]


def test_files_elsewhere_by_the_spool_and_on_from_an_earlier_job(harness: Harness) -> None:
    """The operator's companion finds a directory that is not where the job was submitted, gives orders by the spool,
    and says at once of a job that does not read it. A later job goes on from the first, and is as elastic."""
    operator = harness.operator
    folder, spool = harness.folder("files"), harness.spool(operator)
    place = {"ONES_JOB_ROOT": f"/scratch/{folder.name}/ones"}
    first = harness.submit(ONES_SPOOL=f"/scratch/{spool.name}", **place)
    deaf = harness.submit()
    lost = harness.rigid("--gres=gpu:1", "--requeue", "--comment=ones: gpus=1-4", user="alice")
    harness.trains(first, deaf)
    settings = harness.settings(operator, spool=f'"/scratch/{spool.name}"')
    with harness.running(settings, "--act", user=operator):
        harness.wait(first, resized(), "resized")
        harness.ticks(settings)
        told = {id_: harness.why(settings, id_, user=operator)["job"]["refusal"] for id_ in (deaf, lost)}
    assert harness.directory(first) == folder / "ones" / f"ones-{first}"
    assert not (harness.directory(first) / ORDERS).exists()
    assert f"does not read the spool /scratch/{spool.name}: export ONES_SPOOL=" in told[deaf]
    assert f"/home/alice/ones-{lost}: no such directory" in told[lost]
    assert harness.job(deaf).restart == 0
    assert not [x for x in harness.reports(deaf, 0) if isinstance(x, Checkpoint) and x.order is not None]
    with harness.store(settings) as store:
        assert not store.resizes(deaf)

    harness.cluster.run(["scancel", str(first), str(deaf), str(lost)])
    harness.wait(first, lambda job: job.ended and not job.completing, "ended")
    saved = sorted(path.name for path in (harness.directory(first) / "checkpoints").iterdir())
    later = harness.submit(ONES_RESUME_FROM=str(first), **place)
    hello = harness.report(later, 0, lambda report: isinstance(report, Hello), "hello")
    assert isinstance(hello, Hello) and hello.checkpoint == saved[-1] and hello.step > 0
    assert hello.note == f"going on from checkpoint {saved[-1]} of job {first}"
    assert hello.directory == f"/scratch/{folder.name}/ones/ones-{later}" and not hello.spool
    assert sorted(path.name for path in (harness.directory(first) / "checkpoints").iterdir()) == saved
    own = harness.settings()
    with harness.running(own, "--act", "--own"):
        harness.wait(later, resized(), "resized")
    assert f"of job {first}" in json.dumps(harness.why(own, later)["runs"])
