"""Settings that are refused, and a program that is too old."""

from __future__ import annotations

from tests.guide.breaks import row
from tests.guide.install import SETTINGS, edit
from tests.guide.service import ObservedService

PSQL = "psql -d ones -qAt"


@row("bad settings at a reload")
def _(service: ObservedService) -> None:
    host = service.leader
    path = host.root / SETTINGS.lstrip("/")
    before = path.read_text()
    service.mark_broken("tick_s = -7, systemctl reload")
    edit(path, r"^tick_s = .*$", "tick_s = -7")
    host.sh("systemctl reload slurm-ones")
    service.see_journal(host, "settings refused.*tick_s")
    if host.sh("systemctl is-active slurm-ones").strip() != "active":
        raise AssertionError("the service does not go on")
    service.mark_repaired("the file mended, reload")
    path.write_text(before)
    host.sh("systemctl reload slurm-ones")


@row("bad settings at a start")
def _(service: ObservedService) -> None:
    host = service.leader
    path = host.root / SETTINGS.lstrip("/")
    before = path.read_text()
    service.mark_broken("tick_s = -7, systemctl restart")
    edit(path, r"^tick_s = .*$", "tick_s = -7")
    host.sh("systemctl restart slurm-ones", check=False)
    service.see(lambda: host.sh("systemctl status slurm-ones", check=False), "status=78")
    if host.sh("systemctl is-active slurm-ones", check=False).strip() != "failed":
        raise AssertionError("it is started again")
    service.mark_repaired("the file mended, start")
    path.write_text(before)
    host.sh("systemctl start slurm-ones")


@row("program older than the database")
def _(service: ObservedService) -> None:
    host, db = service.leader, service.place.db
    revision = db.sh(f"{PSQL} -c 'SELECT version_num FROM alembic_version'", user="postgres", cwd="/").strip()
    service.mark_broken(f"schema {revision} becomes 9999, systemctl restart")
    db.sh(f"{PSQL} -c \"UPDATE alembic_version SET version_num = '9999'\"", user="postgres", cwd="/")
    try:
        host.sh("systemctl restart slurm-ones", check=False)
        service.see_journal(host, "schema 9999 is newer")
        service.see_status(host, "schema 9999 is newer")
    finally:
        db.sh(f"{PSQL} -c \"UPDATE alembic_version SET version_num = '{revision}'\"", user="postgres", cwd="/")
    service.mark_repaired(f"schema {revision}, start")
    host.sh("systemctl start slurm-ones")
