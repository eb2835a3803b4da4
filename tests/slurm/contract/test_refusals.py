"""Typed errors of every client: strangers, unknown jobs, no Slurm at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, SlurmMissing, UnknownJob
from slurm_ones.slurm.model import Shape
from tests.slurm.remote import Remote
from tests.slurm.sites import STRANGER, Site

Call = Callable[[Remote, int], None]
CHANGING: dict[str, Call] = {
    "requeue_hold": lambda client, job: client.requeue_hold(job),
    "hold": lambda client, job: client.hold(job),
    "reshape": lambda client, job: client.reshape(job, Shape(2, 2)),
    "release": lambda client, job: client.release(job),
    "release later": lambda client, job: client.release(job, start_now=False),
    "signal": lambda client, job: client.signal(job, "KILL"),
    "signal all": lambda client, job: client.signal(job, "KILL", batch=True),
}


def test_a_stranger_changes_nothing_of_a_waiting_job(site: Site) -> None:
    """bob's companion cannot touch alice's job."""
    job_id = site.held("--nodes=1", "--gres=gpu:1")
    before = site.owner.job(job_id)
    for name, call in CHANGING.items():
        with pytest.raises(NotPermitted):
            call(site.as_(STRANGER), job_id)
        assert site.owner.job(job_id) == before, name


def test_a_stranger_changes_nothing_of_a_running_job(site: Site) -> None:
    """Nor one that runs, which Slurm would not let anybody reshape."""
    job_id = site.running("--nodes=1", "--gres=gpu:1")
    before = site.owner.job(job_id)
    for name, call in CHANGING.items():
        with pytest.raises(NotResizable if name == "reshape" else NotPermitted):
            call(site.as_(STRANGER), job_id)
    assert site.owner.job(job_id) == before


def test_a_job_that_never_was(site: Site) -> None:
    """Every call says so in the same way."""
    for call in CHANGING.values():
        with pytest.raises(UnknownJob):
            call(site.owner, 999_999)
    with pytest.raises(UnknownJob):
        site.owner.job(999_999)


def test_a_wrong_signal_is_a_plain_error(site: Site) -> None:
    """What has no type of its own still says what Slurm answered."""
    with pytest.raises(Refused, match="FOO") as wrong:
        site.owner.signal(site.held("--nodes=1"), "FOO")
    assert type(wrong.value) is Refused


@pytest.mark.parametrize("call", ["version", "config", "snapshot"])
def test_without_slurm_on_the_path(site: Site, call: str) -> None:
    """A login shell without the site's module: said at once, in a type of its own."""
    client = site.owner
    client.environment = {"PATH": "/nowhere"}
    try:
        with pytest.raises(SlurmMissing, match="on the PATH"):
            getattr(client, call)()
    finally:
        client.environment = {}
