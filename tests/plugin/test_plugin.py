"""The plugin compiled, loaded and used in both real Slurms, and everything that may be missing or wrong of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from subprocess import CompletedProcess

import pytest

from tests.cluster import SITES, Cluster
from tests.cluster.root import slurm_version
from tests.marks import NIGHTLY, nightly
from tests.plugin.installed import ETC, PLAIN, clear, comment, installed, reconfigure, submit

pytestmark = pytest.mark.cluster
SUBMISSIONS = int(os.environ.get("ONES_SUBMISSIONS", "60"))
"""How many plain jobs are submitted; 10000 once, by hand."""
CHUNK, MANY = 300, 1000
SHAPE = ("-H", "--wrap", "ones-run train.py")

NEAR_MISSES = (
    (("--elastic-gpus=1-4", "--no-requeue"), "leave out --no-requeue"),
    (("--elastic-gpus=1-4", "--ntasks=4"), "leave out --ntasks"),
    (("--comment=ones: gpus=1-4", "--ntasks-per-node=4"), "leave out --ntasks"),
    (("--elastic-gpus=1-4", "--gpus=4"), "--gres=gpu:N"),
    (("--elastic-gpus=4-1",), "expected 1 <= first <= last"),
    (("--elastic-batch=32",), "neither gpus= nor nodes="),
    (("--elastic-gpus=1-4", "--comment=mine"), "leave out --comment"),
    (("--comment=one: gpus=1-4",), "does not begin with ones:"),
    (("--comment=ones: gpu=1-4",), "'gpu=1-4': expected gpus="),
    (("--elastic-gpus=1-4", "--comment=ones: array=blocks"), "needs a job array"),
    (("--comment=ones: gpus=1-4 array=blocks", "--array=0-3"), "end --array with %1"),
)
"""What is refused, and a part of the sentence that says why."""


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


both = pytest.mark.parametrize("cluster", ["gres", "old"], indirect=True)
newer = pytest.mark.parametrize("cluster", ["gres", nightly("old")], indirect=True)
"""The older Slurm by night: by day it compiles and loads the plugin, and shows what it makes of options."""


@pytest.fixture
def plugged(cluster: Cluster) -> Iterator[Cluster]:
    with installed(cluster) as said:
        assert "scontrol reconfigure" in said
        yield cluster


@both
def test_options_become_a_comment(plugged: Cluster) -> None:
    """And what an elastic job lacks is completed; other jobs are as they were."""
    checked = plugged.run(["slurm-ones", "plugin", "check"], check=False)
    assert checked.returncode == 0, checked
    (plugged.home("alice") / "elastic.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --gres=gpu:1 -H\n#SBATCH --elastic-gpus=1-4 --elastic-batch=32\nones-run x\n"
    )
    done = submit(plugged, "-v", "elastic.sh")
    assert comment(plugged, done) == "ones: gpus=1-4 batch=32"
    assert "the job's comment is ones: gpus=1-4 batch=32" in done.stderr and "error" not in done.stderr
    options = dict(line.split(" : ", 1) for line in done.stderr.splitlines() if " : " in line)
    options = {key.removeprefix("sbatch: ").strip(): value.strip() for key, value in options.items()}
    assert options["signal"] == "B:USR2@120" and options["open-mode"] == "a"
    job = done.stdout.split()[-1]
    assert "Requeue=1" in plugged.run(["scontrol", "show", "job", job]).stdout
    # The command line's option takes the place of the script's; both stand in one comment.
    assert comment(plugged, submit(plugged, "--elastic-gpus=1-16", "elastic.sh")) == "ones: gpus=1-16 batch=32"
    assert comment(plugged, submit(plugged, "--comment=ones: nodes=1-2 resize=off", *SHAPE)) == (
        "ones: nodes=1-2 resize=off"
    )
    blocks = ("-H", "--array=0-3%1", "--nodes=1", "--gres=gpu:1", "--wrap", "ones-run --blocks train.py")
    assert comment(plugged, submit(plugged, "--elastic-gpus=1-4", *blocks)) == "ones: gpus=1-4 array=blocks"
    assert comment(plugged, submit(plugged, "--comment=mine: 5 %s", *PLAIN)) == "mine: 5 %s"
    plain = submit(plugged, "--no-requeue", "--ntasks=3", *PLAIN)
    assert comment(plugged, plain) == "" and plain.stderr == ""
    assert plugged.run(["srun", "-n1", "echo", "ran"]).stdout == "ran\n"


@newer
def test_what_an_elastic_job_submits_is_not_elastic(plugged: Cluster) -> None:
    """Slurm leaves our options in a job's environment, and would take them from there for each sbatch within it."""
    within = "env | grep -c SLURM_SPANK_; sbatch -H --wrap true; sbatch -H --elastic-gpus=2-3 --wrap true"
    done = submit(plugged, "--elastic-gpus=1-4", "--elastic-batch=32", "-W", "-o", "within", "--wrap", within)
    said = (plugged.home("alice") / "within").read_text().splitlines()
    assert done.returncode == 0 and int(said[0]) > 0, (done, said)
    given = [line for line in said if line.startswith("Submitted")]
    found = [comment(plugged, CompletedProcess((), 0, line, "")) for line in given]
    assert found == ["", "ones: gpus=2-3"], said


@newer
def test_near_misses_are_refused(plugged: Cluster) -> None:
    """With one sentence: by sbatch, and by the controller where sbatch does not filter."""
    for filters in (True, False):
        if not filters:
            conf = plugged.root / ETC / "slurm.conf"
            conf.write_text(conf.read_text().replace("CliFilterPlugins=lua\n", ""))
            reconfigure(plugged)
        for options, sentence in NEAR_MISSES:
            done = submit(plugged, *options, *SHAPE)
            said = [line for line in done.stderr.splitlines() if "ones:" in line]
            assert done.returncode != 0 and len(said) == 1 and sentence in said[0], (options, done)
        # What only the controller makes of it is the same.
        assert comment(plugged, submit(plugged, "--elastic-gpus=1-4", *SHAPE)) == "ones: gpus=1-4"
    done = plugged.run(["salloc", "--elastic-gpus=1-4", "true"], check=False)
    assert done.returncode != 0 and "submit it with sbatch" in done.stderr


HOSTILE = ("1-4\nx", "$(touch /tmp/owned)", "%s%n%s", "9" * 5000, '"]] os.execute("x")', "", "\x1b[2J")
"""Each for another layer: lines, shell, printf, buffers, Lua, nothing, terminals."""
ALIKE = ("1-4 size=8", "1-4,batch=1", "`id`", "1" * 63, "1" * 64, "\u202e1-4", "'; os.exit() --", "-1", "../../etc")
"""More of the same, by night."""


@newer
def test_hostile_values_are_text(plugged: Cluster) -> None:
    """Each is refused, and as the value of a comment it is refused or stays the text that it is."""
    for value in HOSTILE + ((*ALIKE, "0", "nil", "1-4:") if NIGHTLY else ()):
        done = submit(plugged, f"--elastic-gpus={value}", *SHAPE)
        assert done.returncode != 0 and "ones:" in done.stderr, (value, done)
        assert "\x1b" not in done.stderr.replace(f"argument: {value}", "")
        for text in (value, f"ones: gpus=1-4 {value}", f"ones: fuse={value} gpus=1-4"):
            done = submit(plugged, f"--comment={text}", *SHAPE)
            if done.returncode == 0 and text.isascii() and text.isprintable():
                assert comment(plugged, done) == text.rstrip()
            else:
                assert done.returncode == 0 or "error: " in done.stderr, (text, done)
    raw = "sbatch --elastic-gpus=$(printf '1\\377') -H --wrap true 2>&1 | tr -d '\\377'"
    assert "expected one word" in plugged.run(["bash", "-c", raw]).stdout
    assert submit(plugged, *PLAIN).returncode == 0
    assert "slurm-ones:" not in (plugged.logs / "slurmctld.log").read_text()


@newer
def test_what_is_missing_or_broken_stops_nobody(plugged: Cluster) -> None:
    """Files that are gone, broken, or of another Slurm: every job is submitted that does not need them."""
    etc = plugged.root / ETC
    rules = (etc / "slurm_ones.lua").read_text()

    def loaded_again() -> None:
        for name in ("job_submit.lua", "cli_filter.lua"):
            # The controller reads a script again whose time of change is another one.
            os.utime(etc / name, (0, (etc / name).stat().st_mtime + 2))

    for text in (
        None,
        "this is no Lua (",
        "return nil",
        "error('x')",
        rules.replace("function ones.check(job)", "function ones.check(job) error(job)"),
    ):
        (etc / "slurm_ones.lua").unlink(missing_ok=True)
        if text is not None:
            (etc / "slurm_ones.lua").write_text(text)
        loaded_again()
        for options in ((), ("--comment=ones: gpus=1-4",), ("--comment=mine",), ("--elastic-gpus=1-4",)):
            done = submit(plugged, *options, *SHAPE)
            assert done.returncode == 0, (text, options, done)
    (etc / "slurm_ones.lua").write_text(rules)
    loaded_again()
    assert comment(plugged, submit(plugged, "--elastic-gpus=1-4", *SHAPE)) == "ones: gpus=1-4"
    # The controller's script gone, then the compiled plugin, then one that is none, then one for another Slurm.
    (etc / "job_submit.lua").unlink()
    assert submit(plugged, *PLAIN).returncode == 0
    spank = etc / "slurm_ones_spank.so"
    compiled = spank.read_bytes()
    major, minor, micro = (int(part) for part in slurm_version(plugged.site).split("."))
    number = (major << 16 | minor << 8 | micro).to_bytes(4, "little")
    assert compiled.count(number) == 1
    for content in (None, b"no plugin", compiled.replace(number, b"\1\1\x14\0")):
        spank.unlink(missing_ok=True)
        if content is not None:
            spank.write_bytes(content)
        done = submit(plugged, *PLAIN)
        assert done.returncode == 0, (content and content[:20], done)
        assert plugged.run(["srun", "-n1", "echo", "ran"]).stdout == "ran\n"
    spank.write_bytes(compiled)
    # Not ours to change, so `install` says it: Slurm itself needs the filter's file where it is configured.
    (etc / "cli_filter.lua").unlink()
    assert "cannot create cli_filter context" in submit(plugged, *PLAIN).stderr


@pytest.mark.nightly
@pytest.mark.parametrize("site", ["gres", "old"])
def test_many_submissions(request: pytest.FixtureRequest, site: str) -> None:
    """None fails, and none is changed."""
    with contextlib.ExitStack() as stack:
        if SUBMISSIONS > MANY:
            # Slurm counts jobs that have ended for some minutes.
            cluster = stack.enter_context(Cluster(replace(SITES[site], max_jobs=2 * SUBMISSIONS)))
        else:
            cluster = request.getfixturevalue(site)
        stack.enter_context(installed(cluster))
        submit_many(cluster)


def submit_many(cluster: Cluster) -> None:
    """Submit jobs that say nothing of ours, and look at each."""
    loop = "for i in $(seq {}); do sbatch -Q -H -J n$i --comment=mine-$i --wrap true || exit 3; done"
    for first in range(0, SUBMISSIONS, CHUNK):
        many = min(CHUNK, SUBMISSIONS - first)
        done = cluster.run(["bash", "-c", loop.format(many)], timeout=600, check=False)
        assert done.returncode == 0 and done.stderr == "", done
        shown = cluster.run(["squeue", "-h", "-u", "alice", "-o", "%j %k"]).stdout.split("\n")
        assert sorted(filter(None, shown)) == sorted(f"n{i} mine-{i}" for i in range(1, many + 1))
        clear(cluster)


@newer
def test_a_user_alone(cluster: Cluster) -> None:
    """Without any privilege, for their own commands; nobody else's know of it."""
    site = submit(cluster, "--elastic-gpus=1-4", *SHAPE)
    assert site.returncode != 0 and "elastic-gpus" in site.stderr
    try:
        said = cluster.run(["slurm-ones", "plugin", "install", "/home/alice/own", "--own"]).stdout
        assert "export SLURM_CONF=/home/alice/own/slurm.conf" in said
        own = {"SLURM_CONF": "/home/alice/own/slurm.conf"}
        assert comment(cluster, submit(cluster, "--elastic-gpus=1-4", *SHAPE, env=own)) == "ones: gpus=1-4"
        assert comment(cluster, submit(cluster, *PLAIN, env=own)) == ""
        refused = submit(cluster, "--elastic-gpus=1-4", "--no-requeue", *SHAPE, env=own)
        assert refused.returncode != 0 and "leave out --no-requeue" in refused.stderr
        checked = cluster.run(["slurm-ones", "plugin", "check"], env=own, check=False)
        assert checked.returncode == 0, checked
        unseen = cluster.run(["slurm-ones", "plugin", "check"], check=False)
        assert unseen.returncode == 1 and "sbatch does not know --elastic-gpus" in unseen.stdout
    finally:
        clear(cluster)
        cluster.run(["rm", "-rf", "own"])
