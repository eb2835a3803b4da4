"""Checks of `slurm-ones doctor --guests`: what Slurm's configuration lacks for guests, and the lines to add."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ones_db import StoreError
from slurm_ones.cli.common import store_of_reader
from slurm_ones.config import ConfigError, GuestSettings, Settings
from slurm_ones.show.live import NotSeenYet
from slurm_ones.slurm.client import Refused, SlurmClient
from slurm_ones.slurm.fields import seconds
from slurm_ones.slurm.model import Partition, Quotas

GRACE_S = 60
"""GraceTime that the checks recommend, in seconds: enough for a training step."""
LONG_EXEMPT_S = 60.0
"""PreemptExemptTime, in seconds, from which the check warns: other jobs may wait this long for a new guest's GPUs."""
WANTED = ("youngest_first", "send_user_signal", "reclaim_licenses")
"""Options that PreemptParameters should have: preempt the youngest guest first, signal its script, reclaim licences."""
OLD_WANTED = ("preempt_youngest_first", "preempt_send_user_signal")
"""Options like `WANTED` for SchedulerParameters, in releases of Slurm without PreemptParameters."""


LATELY_S = 30 * 86400.0
"""Age, in seconds, up to which a checkpoint is considered."""


@dataclass(frozen=True)
class SiteFinding:
    """Result of one check of a site."""

    verdict: str
    """Verdict: "ok", "note" (it works, with a remark) or "bad"."""
    what: str
    found: str
    advice: str = ""
    """Advice to the admin; empty if there is nothing to do."""
    lines: tuple[str, ...] = ()
    """Lines to add to slurm.conf, or commands of sacctmgr to run."""


ok, note, bad = (partial(SiteFinding, verdict) for verdict in ("ok", "note", "bad"))


class PreemptedQos(NamedTuple):
    """QOS with its preemption settings, as sacctmgr shows them."""

    name: str
    priority: int = 0
    preempts: tuple[str, ...] = ()
    mode: str = "cluster"
    grace_s: float = 0.0
    exempt_s: float = 0.0


class GuestSite(NamedTuple):
    """Preemption settings of a site's Slurm, and what the checks need besides."""

    config: Mapping[str, str]
    partitions: Mapping[str, Partition]
    qos: Mapping[str, PreemptedQos]
    """Each QOS by name; empty without accounting."""
    quotas: Quotas = Quotas()
    associations: frozenset[tuple[str, str]] = frozenset()
    """Associations of users: (account, user)."""
    checkpoint: tuple[int, float] | None = None
    """(job id, seconds) of the slowest checkpoint for a resize in the last `LATELY_S` seconds; None without one."""

    def value(self, name: str) -> str:
        """Return a setting of slurm.conf; "" if it is not set."""
        text = self.config.get(name, "")
        return "" if text in ("(null)", "N/A") else text


def read_site(client: SlurmClient, settings: Settings) -> GuestSite:
    """Read the configuration from Slurm, and from accounting and the job database if they exist."""
    fields = "name,priority,preempt,preemptmode,gracetime,preemptexempttime"
    qos = {row[0]: _qos(*row) for row in sacctmgr("qos", fields=fields)}
    associations = frozenset((row[0], row[1]) for row in sacctmgr("associations", fields="account,user") if row[1])
    partitions, quotas = client.snapshot().partitions, client.quotas(())
    return GuestSite(client.config(), partitions, qos, quotas, associations, _slowest_checkpoint(settings))


def _slowest_checkpoint(settings: Settings) -> tuple[int, float] | None:
    try:
        store = store_of_reader(settings)
    except (ConfigError, StoreError, NotSeenYet):
        return None
    with store:
        return store.slowest_checkpoint(time.time() - LATELY_S)


def _qos(name: str, priority: str, preempts: str, mode: str, grace: str, exempt: str) -> PreemptedQos:
    names = tuple(preempts.split(",")) if preempts else ()
    return PreemptedQos(name, int(priority or 0), names, mode.lower(), seconds(grace), seconds(exempt))


def sacctmgr(*asked: str, fields: str) -> list[list[str]]:
    """Return the rows that `sacctmgr show` prints; empty if the site has no accounting."""
    command = ["sacctmgr", "-nP", "show", *asked, f"format={fields}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split("|") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    if any(len(row) != fields.count(",") + 1 for row in rows):
        raise Refused(f"sacctmgr show {' '.join(asked)}: the answer is not understood")
    return rows


def examine_guests(site: GuestSite, settings: Settings) -> Iterator[SiteFinding]:
    """Yield all findings about guests. If the settings name no guests, check what the site would need for them."""
    default = next((one.name for one in site.partitions.values() if one.default), min(site.partitions, default=""))
    wanted = dict(settings.guests)
    if not wanted:
        meant = GuestSettings(qos="guest") if site.qos else GuestSettings(partition="scavenge")
        wanted = {default: meant}
        word = f'qos = "{meant.qos}"' if meant.qos else f'partition = "{meant.partition}"'
        advice = f"add to the companion's settings: [guests.{default}] {word}"
        yield note("settings", "no guests: the checks below are for the recipe on the page Guests", advice)
    yield from _general(site, settings, by_qos=any(guest.qos for guest in wanted.values()))
    lent = {name for guest in wanted.values() for name in (guest.qos, guest.partition)}
    for name, guest in wanted.items():
        if guest.qos:
            yield from _by_qos(site, guest.qos, lent)
        if guest.partition:
            yield from _by_partition(site, name, guest.partition, lent)
        yield from _account(site, guest)


def _general(site: GuestSite, settings: Settings, *, by_qos: bool) -> Iterator[SiteFinding]:
    kind, now = "preempt/qos" if by_qos else "preempt/partition_prio", site.value("PreemptType") or "preempt/none"
    if now == kind:
        yield ok("PreemptType", now)
    else:
        yield bad("PreemptType", now, f"guests here need {kind}", (f"PreemptType={kind}",))
    mode = site.value("PreemptMode").upper()
    if "SUSPEND" in mode or "GANG" in mode:
        yield bad("PreemptMode", mode, "suspended jobs keep their GPUs", ("PreemptMode=CANCEL",))
    elif mode in ("", "OFF"):
        yield bad("PreemptMode", "OFF", "nothing is preempted", ("PreemptMode=CANCEL",))
    else:
        yield ok("PreemptMode", mode)
    if exits := site.value("RequeueExit") or site.value("RequeueExitHold"):
        advice = "with it, guests that Slurm requeues are not held, and start again by themselves"
        yield note("RequeueExit", exits, advice)
    yield _parameters(site)
    if (exempt_s := seconds(site.value("PreemptExemptTime"))) > LONG_EXEMPT_S:
        yield note("PreemptExemptTime", f"{exempt_s:.0f} s", "jobs wait up to this long for a young guest")
    age, ticks = re.match(r"\d+", site.value("MinJobAge")), 2 * settings.interval_s
    if age is not None and int(age[0]) < ticks:
        advice = "the companion can use a preempted guest again only while Slurm remembers it: at least two ticks"
        line = f"MinJobAge={max(300, int(ticks))}"
        yield bad("MinJobAge", f"{age[0]} s", advice, (line,))
    else:
        yield ok("MinJobAge", f"{age[0]} s" if age else "not shown")


def _parameters(site: GuestSite) -> SiteFinding:
    """Check the options of preemption (`WANTED`). A Slurm that does not show PreemptParameters does not have it."""
    new = "PreemptParameters" in site.config
    name, wanted = ("PreemptParameters", WANTED) if new else ("SchedulerParameters", OLD_WANTED)
    now = [word for word in site.value(name).split(",") if word]
    lacking = [word for word in wanted if word not in now]
    if not lacking:
        return ok(name, ",".join(wanted))
    return note(name, f"without {', '.join(lacking)}", "", (f"{name}={','.join([*now, *lacking])}",))


def _by_qos(site: GuestSite, name: str, lent: Collection[str]) -> Iterator[SiteFinding]:
    """Check the guests' QOS, and that each other QOS preempts it, except other guests' QOS (`lent`)."""
    set_it = f"sacctmgr -i modify qos {name} set"
    if not site.qos:
        yield bad(f"QOS {name}", "there is no accounting", 'use a partition: partition = "scavenge"')
        return
    if (guest := site.qos.get(name)) is None:
        made = f"{set_it} priority=0 preemptmode=cancel gracetime={GRACE_S} usagefactor=0"
        yield bad(f"QOS {name}", "does not exist", "", (f"sacctmgr -i add qos {name}", made))
    else:
        yield from _qos_of_guests(site, guest, set_it)
    for qos in site.qos.values():
        if qos.name not in lent and name not in qos.preempts:
            line = f"sacctmgr -i modify qos {qos.name} set preempt+={name}"
            yield bad(f"QOS {qos.name}", f"does not preempt {name}: its jobs wait for guests", "", (line,))


def _qos_of_guests(site: GuestSite, guest: PreemptedQos, set_it: str) -> Iterator[SiteFinding]:
    what, mode = f"QOS {guest.name}", guest.mode if guest.mode != "cluster" else site.value("PreemptMode").lower()
    if "suspend" in mode or "gang" in mode:
        yield bad(what, f"PreemptMode={mode}", "suspended jobs keep their GPUs", (f"{set_it} preemptmode=cancel",))
    elif "requeue" in mode:
        advice = "the companion holds guests, so that they do not start again by themselves"
        yield note(what, f"PreemptMode={mode}", advice)
    else:
        yield ok(what, f"PreemptMode={mode}")
    if lacks := _grace(site, guest.grace_s):
        yield note(what, *lacks[:2], (f"{set_it} gracetime={lacks[2]}",))
    if guest.exempt_s > LONG_EXEMPT_S:
        yield note(what, f"exempt for {guest.exempt_s:.0f} s", "jobs wait up to this long for a young guest")
    others = [qos.priority for qos in site.qos.values() if qos.name != guest.name]
    if others and guest.priority >= max(others) > 0:
        yield note(what, "its priority is not the lowest", "", (f"{set_it} priority=0",))


def _grace(site: GuestSite, grace_s: float) -> tuple[str, str, int] | None:
    """Return None if the grace time suffices. Otherwise return the setting, why it is too short, and the recommended
    seconds: 1.5 times the slowest checkpoint."""
    job_id, checkpoint_s = site.checkpoint or (0, 0.0)
    if grace_s and grace_s >= checkpoint_s:
        return None
    wanted = max(GRACE_S, math.ceil(1.5 * checkpoint_s / 60) * 60)
    if checkpoint_s > grace_s:
        advice = f"job {job_id} needs {checkpoint_s:.0f} s to write the checkpoint for a change of its blocks"
        return f"GraceTime={grace_s:.0f}", advice, wanted
    return "GraceTime=0", "a job whose blocks change by a checkpoint needs the time to write it", wanted


def _by_partition(site: GuestSite, home: str, name: str, lent: Collection[str]) -> Iterator[SiteFinding]:
    base, guest, what = site.partitions.get(home), site.partitions.get(name), f"partition {name}"
    tier = base.tier if base is not None else 0
    if base is None:
        yield bad(f"partition {home}", "does not exist", "name a partition of Slurm in [guests.PARTITION]")
    elif guest is None:
        nodes = ",".join(base.node_names)
        line = f"PartitionName={name} Nodes={nodes} PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_S}"
        raised = (f"PartitionName={home} … PriorityTier={(tier := 10)}",) if base.tier <= 1 else ()
        yield bad(what, "does not exist", "", (line, *raised))
    else:
        if not {*guest.node_names} <= {*base.node_names}:
            yield bad(what, f"has nodes that {home} lacks", "guests train with base blocks on {home}'s nodes")
        if guest.tier >= base.tier:
            line = f"PartitionName={home} … PriorityTier={(tier := guest.tier + 9)}"
            yield bad(what, f"its PriorityTier is not below that of {home}", "", (line,))
        mode = guest.preempt_mode or site.value("PreemptMode")
        verdict = "bad" if any(word in mode for word in ("SUSPEND", "GANG", "OFF")) else "ok"
        lines = (f"PartitionName={name} … PreemptMode=CANCEL",) if verdict == "bad" else ()
        yield SiteFinding(verdict, what, f"PreemptMode={mode}, GraceTime={guest.grace_s:.0f}", "", lines)
        if site.checkpoint and (lacks := _grace(site, guest.grace_s)):
            yield note(what, *lacks[:2], (f"PartitionName={name} … GraceTime={lacks[2]}",))
    if base is not None:
        yield from _preempted_too(site, base, tier, lent)


def _preempted_too(site: GuestSite, base: Partition, tier: int, lent: Collection[str]) -> Iterator[SiteFinding]:
    """Check that only guests are preempted once partition `base` has this PriorityTier.

    Slurm preempts jobs of any partition with a lower tier on the same nodes, unless its PreemptMode is OFF. A partition
    without a PreemptMode has that of slurm.conf.
    """
    over = [one for one in site.partitions.values() if one.name not in lent and one.node_set & base.node_set]
    tiers = {one.name: tier if one.name == base.name else one.tier for one in over}
    none_yet = site.value("PreemptMode").upper() in ("", "OFF")
    for one in over:
        if tiers[one.name] < max(tiers.values()) and (none_yet or "OFF" not in one.preempt_mode.upper()):
            found = "other partitions on its nodes have a higher PriorityTier and preempt its jobs, which are no guests"
            line = f"PartitionName={one.name} … PreemptMode=OFF"
            yield SiteFinding("note" if none_yet else "bad", f"partition {one.name}", found, "", (line,))


def _account(site: GuestSite, guest: GuestSettings) -> Iterator[SiteFinding]:
    if guest.account:
        users = {user for account, user in site.associations if account == guest.account}
        lacking = sorted({user for _, user in site.associations} - users)
        if not site.associations or not lacking:
            yield ok(f"account {guest.account}", f"{len(users)} users")
            return
        lines = () if users else (f"sacctmgr -i add account {guest.account}",)
        add = f"sacctmgr -i add user {','.join(lacking)} account={guest.account}"
        found = f"without {', '.join(lacking[:5])}{' …' if len(lacking) > 5 else ''}: these users' jobs get no guests"
        yield note(f"account {guest.account}", found, "", (*lines, add))
    else:
        held = {q.account for q in site.quotas.all if q.account and not (q.qos or q.user or q.per_job)}
        for account in sorted(held):
            advice = 'guests count towards it: give them an account of their own, account = "guests"'
            yield note(f"account {account}", "has a GrpTRES", advice)
