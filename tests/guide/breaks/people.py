"""What a job's owner does while it is resized, and what they put into its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurm_ones.slurm.model import JobState
from tests.guide.breaks.known import row
from tests.guide.scene import Scene

HOSTILE = "hostile files in a job's directory"
NONSENSE = '{"n": 1, "kind": "throughput"}\n' + "[" * 5000 + "\n\x1b[31m\n"
OWNER = "owner cancels, holds, releases, changes the job meanwhile"


@row("a job does not come back at its new size")
def _(scene: Scene) -> None:
    nodes = "n[1-4]"
    resize = scene.stir(("reshaping", "releasing"))
    scene.broken(f"all nodes drained while job {resize.job_id} was {resize.state}")
    scene.scontrol("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=broken", user="root")
    try:
        scene.see(lambda: scene.why(resize.job_id), "waited longer than")
    finally:
        scene.scontrol("scontrol", "update", f"NodeName={nodes}", "State=RESUME", user="root")
    scene.mended("the nodes resumed")
    ended = scene.ended(resize)
    if ended.state not in ("rolled_back", "done"):
        raise AssertionError(f"the resize ended {ended.state}: {ended.outcome.text}")
    scene.record.seen.append(f"{ended.state}: {ended.outcome.text}")


@row(OWNER, "cancels")
def _(scene: Scene) -> None:
    job_id = _meanwhile(scene, "cancelled", "scancel {job}", ("reshaping", "releasing"))
    story = scene.stories[job_id]
    story.ends |= {JobState.CANCELLED}
    scene.desk.wait(job_id, lambda job: job.ended, "cancelled")
    scene.see(lambda: scene.why(job_id), "ended|CANCELLED|cancelled")
    scene.populate()


@row(OWNER, "holds")
def _(scene: Scene) -> None:
    job_id = _meanwhile(scene, "held", "scontrol uhold {job}", ("draining",))
    story = scene.stories[job_id]
    story.hold = "owner"
    scene.see(lambda: scene.why(job_id), "held")
    scene.mended("its owner releases it")
    scene.scontrol("scontrol", "release", str(job_id))
    story.hold = ""


@row(OWNER, "releases")
def _(scene: Scene) -> None:
    job_id = _meanwhile(scene, "released", "scontrol release {job}", ("reshaping", "releasing"))
    scene.desk.wait(job_id, lambda job: job.running, "running")


@row(OWNER, "changes")
def _(scene: Scene) -> None:
    job_id = _meanwhile(scene, "changed (NumNodes=1-1)", "scontrol update JobId={job} NumNodes=1-1", ("releasing",))
    scene.desk.wait(job_id, lambda job: job.running, "running")


@row(OWNER, "opts out")
def _(scene: Scene) -> None:
    job_id = _meanwhile(scene, "opted out", "scontrol update JobId={job} Comment=", ("draining",))
    scene.see(lambda: scene.why(job_id), "switched off|opted|comment")
    story = scene.stories[job_id]
    # From here on it is one of those that are nobody's to touch.
    scene.desk.wait(job_id, lambda job: job.running and not job.held, "running")
    story.opted_out = True
    scene.populate()


def _meanwhile(scene: Scene, what: str, command: str, states: tuple[str, ...]) -> int:
    resize = scene.stir(states)
    scene.broken(f"job {resize.job_id} {what} by its owner while it was {resize.state}")
    scene.scontrol(*[word.format(job=resize.job_id) for word in command.split()])
    ended = scene.ended(resize)
    scene.record.seen.append(f"{ended.state}: {ended.outcome.text}" if ended.outcome.text else ended.state)
    return resize.job_id


def _fifo(spec: Path) -> None:
    os.mkfifo(spec)


def _link(spec: Path) -> None:
    spec.symlink_to("/etc/shadow")


@row(HOSTILE, "nonsense in its reports")
def _(scene: Scene) -> None:
    job_id = min(scene.elastic())
    scene.desk.wait(job_id, lambda job: job.running, "running")
    reports = max(scene.directory(job_id).glob("reports-*.jsonl"), key=lambda path: path.stat().st_mtime)
    scene.broken(f"nonsense and escapes among the reports of job {job_id}")
    with reports.open("a") as file:
        file.write(NONSENSE)
    scene.see(lambda: scene.why(job_id), "not believed")


@row(HOSTILE, "what is no file")
def _(scene: Scene) -> None:
    job_id = min(scene.elastic())
    directory = scene.directory(job_id)
    ways: dict[str, Callable[[Path], None]] = {"a FIFO": _fifo, "a link to /etc/shadow": _link}
    scene.broken(f"job {job_id}'s spec.json replaced by {' and then '.join(ways)}")
    spec, kept = directory / "spec.json", directory / "spec.kept"
    spec.rename(kept)
    try:
        for make in ways.values():
            make(spec)
            scene.see(lambda: scene.why(job_id), "spec.json")
            spec.unlink()
    finally:
        spec.unlink(missing_ok=True)
        kept.rename(spec)
    scene.mended("the spec put back")
