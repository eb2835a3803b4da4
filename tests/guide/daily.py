"""What the guide's table "Day to day" says one can do, done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.guide import guide
from tests.guide.install import SETTINGS, edit
from tests.guide.operators import STOP_FILE, NotSeen
from tests.guide.service import PROGRAM, ObservedService

ACTIONS = "who did what"
Work = Callable[[ObservedService], str]
TASKS: dict[str, Work] = {}
"""By the first cell of the guide's row."""


def task(name: str) -> Callable[[Work], Work]:
    def known(work: Work) -> Work:
        TASKS[name] = work
        return work

    return known


@task("is it well?")
def _(service: ObservedService) -> str:
    host = service.leader
    code, text = service.status(host, "--no-slurm", "--json")
    if code != 0 or not json.loads(text)["healthy"]:
        raise NotSeen(f"status: {code}, {text}")
    # Where the database cannot be opened at all, it could not look.
    broken = host.ask(f"{PROGRAM} status --config /nowhere")
    if broken.returncode != 2:
        raise NotSeen(f"status without settings: {broken.returncode}, {broken.stderr}")
    return "exit codes 0, and 2 where it could not look"


@task("a user sees no jobs")
def _(service: ObservedService) -> str:
    host, job_id = service.leader, min(service.elastic())
    found = json.loads(host.sh(f"cd /var/lib/slurm-ones && {PROGRAM} doctor --json", check=False))
    verdicts = {one["what"]: one["verdict"] for one in found}
    if (verdicts.get("views"), verdicts.get("settings")) != ("ok", "ok"):
        raise NotSeen(f"doctor: {found}")
    # A view is written after a tick: by the service as it is confined.
    user = service.harness.job(job_id).user
    own = f"sudo -u {user} HOME=/tmp {PROGRAM.split()[-1]} why {job_id}"
    return service.see(lambda: host.sh(own, check=False), f"job {job_id}.*shape")


@task("why was this job (not) resized?")
def _(service: ObservedService) -> str:
    job_id = min(service.elastic())
    return service.see(lambda: service.why(job_id), f"job {job_id}.*shape")


@task("what did a user's jobs use, and was resizing worth it?")
def _(service: ObservedService) -> str:
    host, job_id = service.leader, min(service.elastic())
    user = service.harness.job(job_id).user
    own = f"cd /var/lib/slurm-ones && {PROGRAM} report -u {user} --since 2026-01-01"
    line = service.see(lambda: host.sh(own, check=False), "GPU hours")
    page = host.ask(f"{own} --html /tmp/report.html")  # without '.[report]', as the guide installed it
    if page.returncode != 2 or "slurm-ones[report]" not in page.stderr:
        raise NotSeen(f"--html: {page.returncode}, {page.stderr}")
    return line


@task("a report in each mail at a job's end")
def _(service: ObservedService) -> str:
    host, job_id = service.leader, min(service.elastic())
    host.sh(f"cd /var/lib/slurm-ones && {PROGRAM} template slurm-ones-mail > /tmp/slurm-ones-mail")
    host.sh("printf '#!/bin/sh\\ncat\\n' > /tmp/mailer && chmod 755 /tmp/mailer /tmp/slurm-ones-mail")
    as_account, program = PROGRAM.rsplit(" ", 1)
    sent = f"{as_account} SLURM_ONES={program} SLURM_ONES_MAILER=/tmp/mailer /tmp/slurm-ones-mail"
    mail = f"cd /var/lib/slurm-ones && {sent} -s 'Slurm Job_id={job_id} Name=x Ended' somebody"
    return service.see(lambda: host.sh(mail, check=False), f"Job {job_id} .*")


@task("stop everything at once, without ending it")
def _(service: ObservedService) -> str:
    service.cause_resize()
    service.set_quiet(True)
    deadline = time.monotonic() + 60
    with service.store() as store:
        while store.open_resizes():
            if time.monotonic() > deadline:
                raise NotSeen("resizes go on in spite of the stop file")
            time.sleep(0.2)
        count = len(store.resizes())
        time.sleep(8)
        if len(store.resizes()) != count:
            raise NotSeen("resizes are begun in spite of the stop file")
    service.set_quiet(False)
    service.ended(service.cause_resize())
    return f"{STOP_FILE}: what was under way ended, nothing was begun; without it resizes went on"


@task("leave one job alone")
def _(service: ObservedService) -> str:
    job_id = max(service.elastic())
    service.harness.wait(job_id, lambda job: job.running, "running")
    service.scontrol("scontrol", "update", f"JobId={job_id}", "Comment=ones: gpus=1-8 batch=16-64 resize=off")
    line = service.see(lambda: service.why(job_id), "left alone|resize=off|switched off")
    service.scontrol("scontrol", "update", f"JobId={job_id}", "Comment=ones: gpus=1-8 batch=16-64")
    return line


@task("change settings")
def _(service: ObservedService) -> str:
    host = service.leader
    path = host.root / SETTINGS.lstrip("/")
    before = path.read_text()
    service.since = time.time()
    edit(path, r"^tick_s = .*$", "tick_s = 3")
    host.sh("systemctl reload slurm-ones")
    line = service.see_journal(host, "changed: tick_s", 15)
    path.write_text(before)
    host.sh("systemctl reload slurm-ones")
    service.see_journal(host, "changed: tick_s", 15)
    return line


@task("stop it")
def _(service: ObservedService) -> str:
    host = service.leader
    service.cause_resize(("requeuing", "reshaping", "releasing"))
    began = time.monotonic()
    host.sh("systemctl stop slurm-ones")
    took = time.monotonic() - began
    held = [job_id for job_id in service.elastic() if service.harness.job(job_id).held]
    result = host.sh("systemctl show -P Result slurm-ones").strip()
    host.sh("systemctl start slurm-ones")
    if held or result != "success":
        raise NotSeen(f"jobs {held} are held after a stop that ended with {result}")
    return f"in the middle of a resize: {took:.1f} s, nobody held"


@task("upgrade")
def _(service: ObservedService) -> str:
    hosts, lines = list(service.installed), []
    for host in hosts:
        host.sh("systemctl stop slurm-ones")
    for host in hosts:
        host.sh(guide.row("Day to day", "upgrade").command("pip install"), cwd="/root/slurm-ones", timeout=300)
    lines.append(hosts[0].sh(f"cd /var/lib/slurm-ones && {PROGRAM} db upgrade").strip())
    for host in hosts:
        host.sh("systemctl start slurm-ones")
    return "; ".join(lines)


@task("back up")
def _(service: ObservedService) -> str:
    service.place.db.sh("pg_dump ones >/tmp/ones.sql", user="postgres", cwd="/")
    lines = service.place.db.sh("grep -c ^COPY /tmp/ones.sql").strip()
    return f"pg_dump while it runs: {lines} tables"


@task(ACTIONS)
def _(service: ObservedService) -> str:
    host = service.leader
    query = guide.row("Day to day", ACTIONS).command("db query").removeprefix("slurm-ones")
    told = host.sh(f"{PROGRAM} {query}")
    for word in ("run --advise", "reload"):
        if word not in told:
            raise NotSeen(f"{word!r} is not among the actions: {told[-2000:]}")
    errors = host.sh("journalctl -u slurm-ones -p err -o cat --no-pager")
    if "elastic jobs run" in errors:
        raise NotSeen(f"among the errors there is what is none: {errors[-2000:]}")
    return "starts and reloads are there, and only errors in journalctl -p err"
