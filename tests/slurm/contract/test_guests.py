"""Guests: a held task moves to a queue that Slurm preempts, and the four ways in which its preemption ends.

By day in the simulated Slurm; every night on real ones, by partition on 22.05 and by QOS on 26.05.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ones_db.shape import Shape
from ones_wrapper.protocol.slurm_commands import NO_LICENSES
from slurm_ones.act.arrays import comes_back
from slurm_ones.simulate.slurm.nodes import PreemptMode, Qos, SlurmConf
from slurm_ones.slurm.client import NotPermitted, NotResizable, Refused, SlurmClient
from slurm_ones.slurm.model import JobState, Queue, Quota, Reservation, Task
from tests.cluster.sites import GRES_GUESTS, OLD_GUESTS
from tests.conftest import start
from tests.slurm.simulated import SimulatedSite
from tests.slurm.sites import OPERATOR, OWNER, STRANGER, Site

GUESTS = ("--hold", "--array=0-1", "--nodes=1", "--gres=gpu:1", "--cpus-per-gpu=1", "--time=60")
NODES = ("n1", "n2", "n3", "n4")
BY_NIGHT = [pytest.mark.cluster, pytest.mark.nightly]
EVERYTHING = ("--nodes=4", "--gres=gpu:4", "--cpus-per-gpu=1", "--time=10")
CONF = SlurmConf(
    licenses={"matlab": 2},
    requeue_exit="99",
    accounts={OWNER: frozenset({"lab", "guests"})},
    own_qos={OWNER: frozenset({"normal"})},
    qos=(Qos("normal", 10, ("guest",), gpus=64), Qos("guest", mode="cancel", user_gpus=16, usage_factor=0.0)),
)


class GuestSite:
    """A cluster with a queue for guests."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.by_qos = not site.is_old
        self.queue = Queue(qos="guest") if self.by_qos else Queue("scavenge")
        self.mover: SlurmClient = site.as_(OPERATOR) if self.by_qos else site.owner

    def ends(self, mode: PreemptMode) -> None:
        """What becomes of preempted guests from now on."""
        if isinstance(self.site, SimulatedSite):
            normal, guest = CONF.qos
            self.site.configure(replace(CONF, qos=(normal, guest._replace(mode=mode))))
            return
        run = self.site.cluster.run
        if self.by_qos:
            run(["sacctmgr", "-i", "modify", "qos", "guest", "set", f"preemptmode={mode}"], user="root")
            shown = ("scontrol", "-o", "show", "assoc_mgr", "qos=guest", "flags=qos")
            self.site.until(lambda: f"PreemptMode={mode.upper()}" in self.site.tell(*shown), f"mode {mode}")
        else:
            run(["scontrol", "update", "PartitionName=scavenge", f"PreemptMode={mode}"], user="root")

    @contextmanager
    def reserved(self, begins: float) -> Iterator[None]:
        """All nodes are reserved from then on, for ten minutes."""
        maintenance = Reservation("maintenance", NODES, begins, begins + 600, frozenset({"MAINT", "IGNORE_JOBS"}))
        if isinstance(self.site, SimulatedSite):
            self.site.configure(replace(CONF, reservations=(maintenance,)))
            yield
            self.site.configure(CONF)
            return
        when = time.strftime("StartTime=%Y-%m-%dT%H:%M:%S", time.localtime(begins))
        create = ("scontrol", "create", "reservation", "ReservationName=maintenance", when, "Duration=10")
        self.site.cluster.run([*create, "Users=root", "Nodes=n[1-4]", "Flags=maint,ignore_jobs"], user="root")
        try:
            yield
        finally:
            self.site.cluster.run(["scontrol", "delete", "ReservationName=maintenance"], user="root")

    def guest(self, *options: str) -> Task:
        task = Task(self.site.submit(*GUESTS, *options), 1)
        self.mover.reshape(task, Shape(1, 2), queue=self.queue)
        job = self.site.owner.job(task)
        assert (job.has_shape(Shape(1, 2)), self.queue.other_than(job), job.time_limit_s) == (True, Queue(), 3600.0)
        self.mover.release(task)
        self.site.wait(task, lambda job: job.running, "RUNNING as a guest")
        return task

    def rigid(self) -> int:
        """A job of another user that runs on all GPUs, and so in place of the guest."""
        job_id = self.site.submit(*EVERYTHING, client=self.site.as_(STRANGER))
        self.site.wait(job_id, lambda job: job.running, "RUNNING in place of the guest")
        return job_id


@pytest.fixture(
    scope="module",
    params=[
        "simulated",
        pytest.param((OLD_GUESTS, "command"), marks=BY_NIGHT, id="old-command"),
        pytest.param((GRES_GUESTS, "command"), marks=BY_NIGHT, id="gres-command"),
        pytest.param((GRES_GUESTS, "pyslurm"), marks=BY_NIGHT, id="gres-pyslurm"),
    ],
)
def whole(request: pytest.FixtureRequest) -> Iterator[GuestSite]:
    """One cluster and one kind of client, for the module."""
    if request.param == "simulated":
        site: Site = SimulatedSite(CONF)
    else:
        site = Site(start(request, request.param[0]), request.param[1])
    yield GuestSite(site)
    site.close()
    if not isinstance(site, SimulatedSite):
        site.cluster.stop()


@pytest.fixture
def guests(whole: GuestSite) -> Iterator[GuestSite]:
    """Its jobs end with the test."""
    yield whole
    whole.site.clear()


def test_a_guest_that_is_cancelled_is_used_again(guests: GuestSite) -> None:
    """It has ended, holds nothing, and waits again as soon as somebody says so."""
    guests.ends("cancel")
    task = guests.guest()
    rigid = guests.rigid()
    job = guests.site.wait(task, lambda job: job.ended and not job.completing, "PREEMPTED")
    assert (job.state, job.preempt_time > 0) == (JobState.PREEMPTED, True)
    seen = guests.site.owner.snapshot()
    assert all(seen.nodes[name].gpus_used == 4 for name in seen.jobs[rigid].node_list)
    guests.site.owner.reuse(task)
    job = guests.site.wait(task, lambda job: job.pending and not job.completing, "PENDING")
    assert (job.held, job.admin_held, guests.queue.other_than(job)) == (True, False, Queue())
    guests.site.cancel(rigid)
    guests.mover.release(task)
    guests.site.wait(task, lambda job: job.running, "RUNNING again")


@pytest.mark.parametrize("held", [True, False])
def test_a_guest_that_is_requeued(guests: GuestSite, held: bool) -> None:
    """Held while it runs it comes back held; else Slurm starts it again as soon as there is room."""
    guests.ends("requeue")
    task = guests.guest()
    if held:
        guests.mover.hold(task)
    rigid = guests.rigid()
    job = guests.site.wait(task, lambda job: job.pending and not job.completing, "PENDING")
    assert (job.held, job.admin_held, job.ended, job.restart) == (held, False, False, 1)
    guests.site.cancel(rigid)
    guests.site.pass_time(120 if isinstance(guests.site, SimulatedSite) and not held else 2)
    if held:
        assert guests.site.owner.job(task).held
        guests.mover.release(task)
    guests.site.wait(task, lambda job: job.running, "RUNNING again")


def test_slurm_holds_no_guest_however_often_it_preempts_it(guests: GuestSite) -> None:
    """Nor does it count as a failed start: of those Slurm holds a job after `max_batch_requeue`, 5 by default."""
    guests.ends("requeue")
    task = guests.guest()
    for count in range(1, 8):
        guests.site.cancel(guests.rigid())
        guests.site.pass_time(120 if isinstance(guests.site, SimulatedSite) else 2)
        guests.site.wait(task, lambda job, count=count: job.running and job.restart == count, "RUNNING again")


@pytest.mark.parametrize("mode", ["cancel", "requeue"])
def test_what_becomes_of_guests_is_known_before(guests: GuestSite, mode: PreemptMode) -> None:
    """Whether they come back, by QOS or partition; `RequeueExit` is seen, and without it they would be held."""
    guests.ends(mode)
    task, client = guests.guest(), guests.site.owner
    config, job, modes = client.config(), client.job(task), client.quotas(()).modes
    partition = client.snapshot().partitions[job.partition]
    assert comes_back(job, {**config, "RequeueExit": "(null)"}, partition, modes) is (mode == "requeue")
    assert not comes_back(job, config, partition, modes)


def test_the_hold_of_a_running_guest_is_its_owners(guests: GuestSite) -> None:
    """It is seen, and lifted while it runs, whoever put it on."""
    task = guests.guest()
    guests.mover.hold(task)
    guests.site.wait(task, lambda job: job.running and job.held and not job.admin_held, "RUNNING and held")
    guests.site.owner.release(task, start_now=False)
    guests.site.wait(task, lambda job: job.running and not job.held, "RUNNING, in no hold")


def test_a_guest_that_may_not_be_requeued_is_lost(guests: GuestSite) -> None:
    """Whatever the site's mode is, and it cannot be used again."""
    guests.ends("requeue")
    task = guests.guest("--no-requeue")
    guests.rigid()
    job = guests.site.wait(task, lambda job: job.ended and not job.completing, "PREEMPTED")
    assert job.state is JobState.PREEMPTED
    with pytest.raises(Refused):
        guests.site.owner.reuse(task)
    assert guests.site.owner.job(task).ended


@pytest.mark.parametrize("held", [True, False])
def test_a_job_that_is_requeued_for_its_exit_code(guests: GuestSite, held: bool) -> None:
    """`RequeueExit`: it is no end."""
    text = "#!/bin/bash\n[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] && exec sleep 300\nsleep 2\nexit 99\n"
    job_id = guests.site.running("--nodes=1", text=text)
    if held:
        guests.site.owner.hold(job_id)
        job = guests.site.wait(job_id, lambda job: job.pending and not job.completing, "PENDING")
        # Its reason is NonZeroExitCode, on 22.05 soon after JobHeldAdmin; an owner may release neither.
        assert (job.held, job.restart) == (True, 1)
        with pytest.raises(NotPermitted):
            guests.site.owner.release(job_id)
        guests.site.as_(OPERATOR).release(job_id)
    elif isinstance(guests.site, SimulatedSite):
        guests.site.pass_time(120)
    job = guests.site.wait(job_id, lambda job: job.running and job.restart == 1, "RUNNING again")
    assert not job.held


@pytest.mark.parametrize("by_owner", [True, False], ids=["owner", "mover"])
def test_a_guest_takes_no_licences(guests: GuestSite, by_owner: bool) -> None:
    """In the update that moves it, and they come back with its own queue; a task that waits may have any limit up to
    its partition's, whoever lowered it."""
    site = guests.site
    client = site.owner if by_owner and not guests.by_qos else guests.mover
    task = Task(site.submit(*GUESTS, "--licenses=matlab:2"), 1)
    before = site.owner.job(task)
    home = Queue.of(before)
    assert (before.licenses, home.licenses) == ((("matlab", 2),), "matlab:2")
    for _ in range(2):
        client.reshape(task, Shape(1, 2), queue=guests.queue._replace(time_limit_s=1200.0, licenses=NO_LICENSES))
        job = site.owner.job(task)
        assert (job.licenses, job.time_limit_s, guests.queue.other_than(job)) == ((), 1200.0, Queue())
        (site.owner if by_owner else client).reshape(task, Shape(1, 1), queue=home)
        assert Queue.of(site.owner.job(task)) == home
    with pytest.raises(Refused):
        site.owner.reshape(task, Shape(1, 1), queue=Queue(time_limit_s=30 * 86400.0))
    assert Queue.of(site.owner.job(task)) == home
    client.reshape(task, Shape(1, 2), queue=guests.queue._replace(licenses=NO_LICENSES))
    client.release(task)
    site.wait(task, lambda job: job.running and not job.licenses, "RUNNING without licenses")


def test_who_may_move_a_task_where(guests: GuestSite) -> None:
    """A QOS that its owner does not have takes an operator, and an account an association of the owner's."""
    if guests.site.is_old:
        pytest.skip("there is no accounting")
    owner, operator = guests.site.owner, guests.mover
    task = Task(guests.site.submit(*GUESTS), 1)
    before = owner.job(task)
    for client, queue in (
        (owner, Queue(qos="guest")),
        (owner, Queue(account="nobody")),
        (operator, Queue(account="nobody")),
        (operator, Queue(qos="guest", account="nobody")),
    ):
        with pytest.raises(NotResizable, match=r"Invalid (qos|account)"):
            client.reshape(task, Shape(2, 1), queue=queue)
        after = owner.job(task)
        assert (Queue.of(after), after.nodes, after.held) == (Queue.of(before), 1, True)
    owner.reshape(task, Shape(1, 1), queue=Queue(account="guests"))
    operator.reshape(task, Shape(2, 1), queue=Queue(qos="guest", time_limit_s=600.0))
    job = owner.job(task)
    assert (job.qos, job.account, job.nodes, job.time_limit_s) == ("guest", "guests", 2, 600.0)
    owner.reshape(task, Shape(1, 1), queue=Queue(qos="normal", account="lab"))
    assert Queue.of(owner.job(task)) == Queue("gpu", "normal", "lab", 600.0, NO_LICENSES)


def test_a_guest_ends_before_a_reservation(guests: GuestSite) -> None:
    """One whose limit reaches into it waits until the limit is short enough."""
    guests.ends("cancel")
    begins = float(round(guests.site.now() + 1800))
    with guests.reserved(begins):
        ahead = guests.site.owner.snapshot().next_reservation(("n2", "n9"))
        assert ahead is not None
        assert (ahead.name, ahead.node_names, ahead.start_time, ahead.end_time) == (
            "maintenance",
            NODES,
            begins,
            begins + 600,
        )
        assert ahead.flags >= {"MAINT", "IGNORE_JOBS"}
        task = Task(guests.site.submit(*GUESTS), 1)
        guests.mover.reshape(task, Shape(1, 2), queue=guests.queue)
        guests.mover.release(task)
        job = guests.site.wait(task, lambda job: job.reason not in ("None", "BeginTime", ""), "what it waits for")
        assert (job.pending, job.reason.split(",")[0]) in ((True, "Resources"), (True, "ReqNodeNotAvail"))
        guests.mover.reshape(task, Shape(1, 2), queue=Queue(time_limit_s=1200.0))
        guests.site.wait(task, lambda job: job.running, "RUNNING")


def test_quotas_are_known_before(guests: GuestSite) -> None:
    """Of accounts and QOS, and of users who have jobs, with what they hold now."""
    if guests.site.is_old:
        assert guests.site.owner.quotas(["alice"]).all == ()
        return
    if not isinstance(guests.site, SimulatedSite):
        limit = ["sacctmgr", "-i", "modify", "qos"]
        guests.site.cluster.run([*limit, "normal", "set", "grptres=gres/gpu=64"], user="root")
        guests.site.cluster.run([*limit, "guest", "set", "maxtresperuser=gres/gpu=16", "usagefactor=0"], user="root")
    guests.ends("cancel")
    job = guests.site.owner.job(guests.guest())
    client = guests.site.owner
    per_user = Quota("gres/gpu", 16, 2, qos="guest", user="alice")
    guests.site.until(lambda: per_user in client.quotas(["alice"]).of(job), "what the guest holds")
    assert client.quotas(["alice"]).usage_factors == {"normal": 1.0, "guest": 0.0}
    assert client.quotas(["alice"]).of(replace(job, qos="normal")) == (Quota("gres/gpu", 64, 0, qos="normal"),)
