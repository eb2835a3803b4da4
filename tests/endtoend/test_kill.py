"""SIGKILL to the companion between any two steps of a resize: the next one finds its way."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from slurm_ones.act.transitions import State
from tests.cluster import paths
from tests.endtoend.block_site import Site, sites
from tests.endtoend.harness import Harness
from tests.marks import NIGHTLY

pytestmark = pytest.mark.cluster
JOBS = 4
"""Side by side, each with a companion and a database of its own."""
WRITES = ("begin_resize", "step_resize", "end_resize")


def kill_everywhere(
    site: Site, job_ids: list[int], shape: str, steps: tuple[str, ...], both: bool = False
) -> list[dict[str, Any]]:
    """Resize the jobs between 1x1 and this shape with a death at every event; what was found after each.

    The deaths are shared out among the jobs; with `both`, among half of them for each direction. `steps` are some that
    must have been among them: resizes have more events or fewer, so those that no number met are then met by name. By
    day there are no numbers: one event of each name is met.
    """
    stride = len(job_ids) // (2 if both else 1)
    firsts = [number if number < stride else stride - 1 - number for number in range(len(job_ids))]
    # Each job has a companion of its own, which knows in all rounds which of its blocks wait in a hold of ours.
    settings = {id_: site.settings("dwell_s = 0\nadvance_s = 0.1", tick_s="0.3") for id_ in job_ids}
    deaths = {id_: (str(first), str(stride), shape) for id_, first in zip(job_ids, firsts, strict=True)}
    numbered = _rounds(site, settings, deaths) if NIGHTLY else []
    wanted = {f"{when} {step}" for step in (*WRITES, *steps) for when in ("before", "after")}
    missed = sorted(wanted - {told["event"] for told in numbered if told["killed"]})
    shares = {id_: missed[number :: len(job_ids)] for number, id_ in enumerate(job_ids)}
    named = _rounds(site, settings, {id_: (",".join(share), shape) for id_, share in shares.items() if share})
    rounds = numbered + named
    for told in rounds:
        assert not told["held"] and told["open"] == 0, told
        assert told["statuses"][1] == 0 and not told["wrong"], told
    killed = [told for told in rounds if told["killed"]]
    # Every number was tried up to one that a resize did not reach, and every kind of step was among them.
    if numbered:
        unreached = min(told["fatal"] for told in numbered if not told["killed"])
        assert set(range(unreached)) <= {told["fatal"] for told in killed}
    assert wanted <= {told["event"] for told in killed}, rounds
    return rounds


def _rounds(site: Site, settings: dict[int, str], deaths: dict[int, tuple[str, ...]]) -> list[dict[str, Any]]:
    """What was found after each death, with these arguments of `tests.endtoend.killed` for each job."""
    processes, rounds = [], []
    for job_id, arguments in deaths.items():
        command = [
            site.harness.cluster.python,
            "-m",
            "tests.endtoend.killed",
            settings[job_id],
            str(job_id),
            *arguments,
        ]
        pipe = subprocess.PIPE
        processes.append(
            site.harness.cluster.popen(command, user=site.user, cwd=paths.REPOSITORY, stdout=pipe, stderr=pipe)
        )
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-4000:]
        rounds += [json.loads(line) for line in output.splitlines()]
    return rounds


def test_a_companion_killed_anywhere_is_succeeded(harness: Harness) -> None:
    """After every death the job runs at its old or its new shape, held by nobody, and the resize is closed."""
    job_ids = [harness.light() for _ in range(JOBS)]
    harness.trains(*job_ids)
    steps = ("order", "requeuehold", "NumNodes", "StartTime", "release")
    for told in kill_everywhere(Site(harness, owner=True), job_ids, "1x2", steps):
        assert told["state"] == "RUNNING" and told["shape"] in ("1x1", "1x2"), told
        changed = told["shape"] != told["from"]
        # Before it was begun the newest one is that of the round before.
        done = told["resize"] == State.DONE and told["event"] != "before begin_resize"
        assert changed == done == (told["restarts"] == 1), told
        assert changed or told["killed"], told


@pytest.mark.nightly
@pytest.mark.parametrize("words", sites())
def test_killed_anywhere_while_blocks_join_and_leave(words: str, request: pytest.FixtureRequest) -> None:
    """The job trains on with one block or with two, and no other one runs or waits unheld."""
    site = Site.of(request, words, gpus=1)
    try:
        # Each may have two nodes of the four that are handed out whole.
        job_ids = [site.submit() for _ in range(2 if site.whole else 6)]
        steps = ("order", "release", "requeuehold")
        for told in kill_everywhere(site, job_ids, "0x2", steps, both=True):
            # Its first block may be one that was used again: another takes its place where that saves a node.
            assert told["state"] == "RUNNING" and told["shape"] in ("1", "2"), told
            changed = told["shape"] != told["from"]
            # Before it was begun the newest one is that of the round before.
            assert changed == (told["resize"] == State.DONE and told["event"] != "before begin_resize"), told
            assert changed or told["killed"], told
    finally:
        site.harness.clear()


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["2x4", "99x1"])
def test_killed_anywhere_in_the_resize_of_a_waiting_job(harness: Harness, shape: str) -> None:
    """It waits on for room, held by nobody. A shape that Slurm refuses, though it takes it at first, leaves it as it
    was."""
    all_nodes = harness.rigid("--nodes=4", "--gres=gpu:4")
    harness.wait(all_nodes, lambda job: job.running, "running")
    job_ids = [harness.light() for _ in range(2)]
    for told in kill_everywhere(Site(harness, owner=True), job_ids, shape, ("uhold", "NumNodes", "release")):
        assert told["state"] == "PENDING" and told["restarts"] == 0, told
        if shape == "99x1":
            assert told["shape"] == "1x1" and told["resize"] in (None, State.ROLLED_BACK), told
        else:
            changed = told["shape"] != told["from"]
            assert changed == (told["resize"] == State.DONE), told
            assert changed or told["killed"], told


@pytest.mark.nightly
def test_killed_anywhere_in_the_resize_of_a_job_that_is_to_start_later(harness: Harness) -> None:
    """Of which Slurm does not say whether it would ever start at the new shape: it keeps its own, held by nobody."""
    job_ids = [harness.light("--begin=now+1hour") for _ in range(2)]
    for told in kill_everywhere(Site(harness, owner=True), job_ids, "2x4", ("uhold", "NumNodes", "release")):
        assert (told["state"], told["shape"], told["restarts"]) == ("PENDING", "1x1", 0), told
        assert told["resize"] in (None, State.ROLLED_BACK), told
