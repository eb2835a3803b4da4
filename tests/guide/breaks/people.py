"""What a job's owner does while it is resized, and what they put into its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurm_ones.slurm.model import JobState
from tests.guide.breaks import row
from tests.guide.service import ObservedService

HOSTILE = "hostile files in a job's directory"
NONSENSE = '{"n": 1, "kind": "throughput"}\n' + "[" * 5000 + "\n\x1b[31m\n"
OWNER = "owner cancels, holds, releases, changes the job meanwhile"


@row("a job does not come back at its new size")
def _(service: ObservedService) -> None:
    nodes = "n[1-4]"
    resize = service.cause_resize(("reshaping", "releasing"))
    service.mark_broken(f"all nodes drained while job {resize.job_id} was {resize.state}")
    service.scontrol("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=broken", user="root")
    try:
        service.see(lambda: service.why(resize.job_id), "waited longer than")
    finally:
        service.scontrol("scontrol", "update", f"NodeName={nodes}", "State=RESUME", user="root")
    service.mark_repaired("the nodes resumed")
    ended = service.ended(resize)
    if ended.state not in ("rolled_back", "done"):
        raise AssertionError(f"the resize ended {ended.state}: {ended.outcome!s}")
    service.record.seen.append(f"{ended.state}: {ended.outcome!s}")


@row(OWNER, "cancels")
def _(service: ObservedService) -> None:
    job_id = _meanwhile(service, "cancelled", "scancel {job}", ("reshaping", "releasing"))
    expected = service.expected[job_id]
    expected.ends |= {JobState.CANCELLED}
    service.harness.wait(job_id, lambda job: job.ended, "cancelled")
    service.see(lambda: service.why(job_id), "ended|CANCELLED|cancelled")
    service.populate()


@row(OWNER, "holds")
def _(service: ObservedService) -> None:
    job_id = _meanwhile(service, "held", "scontrol uhold {job}", ("draining",))
    expected = service.expected[job_id]
    expected.hold = "owner"
    service.see(lambda: service.why(job_id), "held")
    service.mark_repaired("its owner releases it")
    service.scontrol("scontrol", "release", str(job_id))
    expected.hold = ""


@row(OWNER, "releases")
def _(service: ObservedService) -> None:
    job_id = _meanwhile(service, "released", "scontrol release {job}", ("reshaping", "releasing"))
    service.harness.wait(job_id, lambda job: job.running, "running")


@row(OWNER, "changes")
def _(service: ObservedService) -> None:
    job_id = _meanwhile(service, "changed (NumNodes=1-1)", "scontrol update JobId={job} NumNodes=1-1", ("releasing",))
    service.harness.wait(job_id, lambda job: job.running, "running")


@row(OWNER, "opts out")
def _(service: ObservedService) -> None:
    job_id = _meanwhile(service, "opted out", "scontrol update JobId={job} Comment=", ("draining",))
    service.see(lambda: service.why(job_id), "switched off|opted|comment")
    expected = service.expected[job_id]
    # From here on it is one of those that are nobody's to touch.
    service.harness.wait(job_id, lambda job: job.running and not job.held, "running")
    expected.opted_out = True
    service.populate()


def _meanwhile(service: ObservedService, what: str, command: str, states: tuple[str, ...]) -> int:
    resize = service.cause_resize(states)
    service.mark_broken(f"job {resize.job_id} {what} by its owner while it was {resize.state}")
    service.scontrol(*[word.format(job=resize.job_id) for word in command.split()])
    ended = service.ended(resize)
    service.record.seen.append(f"{ended.state}: {ended.outcome!s}" if str(ended.outcome) else ended.state)
    return resize.job_id


def _fifo(spec: Path) -> None:
    os.mkfifo(spec)


def _link(spec: Path) -> None:
    spec.symlink_to("/etc/shadow")


@row(HOSTILE, "nonsense in its reports")
def _(service: ObservedService) -> None:
    job_id = min(service.elastic())
    service.harness.wait(job_id, lambda job: job.running, "running")
    directory = service.directory(job_id)
    # A job that runs has loaded torch, and more, before it reports.
    service.leader.until(lambda: any(directory.glob("reports-*.jsonl")), f"a report of job {job_id}")
    reports = max(directory.glob("reports-*.jsonl"), key=lambda path: path.stat().st_mtime)
    service.mark_broken(f"nonsense and escapes among the reports of job {job_id}")
    with reports.open("a") as file:
        file.write(NONSENSE)
    service.see(lambda: service.why(job_id), "Not believed of its reports")


@row(HOSTILE, "what is no file")
def _(service: ObservedService) -> None:
    job_id = min(service.elastic())
    directory = service.directory(job_id)
    ways: dict[str, Callable[[Path], None]] = {"a FIFO": _fifo, "a link to /etc/shadow": _link}
    service.mark_broken(f"job {job_id}'s spec.json replaced by {' and then '.join(ways)}")
    spec, kept = directory / "spec.json", directory / "spec.kept"
    spec.rename(kept)
    try:
        for make in ways.values():
            make(spec)
            service.see(lambda: service.why(job_id), "spec.json")
            spec.unlink()
    finally:
        spec.unlink(missing_ok=True)
        kept.rename(spec)
    service.mark_repaired("the spec put back")
