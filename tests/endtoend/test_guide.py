"""docs/admin.md followed to the letter, on a real systemd and a real Slurm; all of it: `python -m tests.guide`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import ClusterError, root
from tests.cluster.cli import Progress
from tests.guide.breaks import ROWS
from tests.guide.daily import TASKS
from tests.guide.follow import carry_out, carry_out_task
from tests.guide.host import why_no_systemd
from tests.guide.place import Place
from tests.guide.reader import Reader, unknown
from tests.guide.site import HOST


def test_every_row_of_the_guide_is_broken_by_somebody() -> None:
    """A way to break it that the guide gains, loses or renames, without anybody who tries it."""
    assert unknown() == []


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Who follows the guide, at a site of their own."""
    why = why_no_systemd()
    if why:
        pytest.skip(why)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        root.build(HOST, Progress())
    place = Place("guidetest", {})
    try:
        yield Reader(place)
    finally:
        place.stop()


@pytest.mark.nightly
@pytest.mark.cluster
def test_installed_by_the_guide_and_killed(reader: Reader) -> None:
    """Every command of the installation works as written, the service runs unprivileged and confined, and one that is
    killed in the middle of a resize is started by systemd and loses nothing."""
    try:
        reader.prepare()
    except ClusterError as error:
        pytest.skip(f"no host with systemd can be started here: {error}")
    host = reader.place.one
    reader.install(host)
    reader.act()
    reader.service.populate()
    (pid,) = host.sh("systemctl show -P MainPID slurm-ones").split()
    limits = dict(line.split(":\t", 1) for line in (host.root / f"proc/{pid}/status").read_text().splitlines())
    assert limits["Uid"].split()[0] == "2100" and int(limits["CapEff"], 16) == 0 and limits["NoNewPrivs"] == "1"
    assert limits["Seccomp"] == "2"
    # What users see is written under these limits too.
    seen = carry_out_task(reader.service, "a user sees no jobs", TASKS["a user sees no jobs"])
    assert seen.fine, seen
    (killed,) = (one for one in ROWS if one.row.startswith("companion killed") and not one.standby)
    outcome = carry_out(reader.service, killed)
    assert outcome.fine, outcome
