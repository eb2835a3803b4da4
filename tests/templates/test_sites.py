"""The batch scripts of `slurm-ones template SITE`: correct shell, elastic, and taken by the real Slurms."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ones_db.shape import Shape
from slurm_ones.cli.check import examine
from slurm_ones.cli.template import SITES, Wishes, batch_script
from slurm_ones.jobs.elastic import WholeJob, arrays, elastic_job, whole_job
from slurm_ones.simulate import BadInput
from tests.cluster import Cluster, paths, sites
from tests.commands import call
from tests.marks import nightly
from tests.slurm.sites import Site

each = pytest.mark.parametrize("name", SITES)
FILLED = Wishes(account=sites.ACCOUNT)


@each
def test_shellcheck(name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sbatch"
    script.write_text(batch_script(name, SITES[name]))
    assert max(map(len, script.read_text().splitlines())) <= 120
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--severity=style", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@each
def test_check_finds_nothing_but_what_is_to_be_filled_in(name: str) -> None:
    """`slurm-ones check` says that it would be elastic, by blocks where the site has job arrays."""
    verdict = examine(batch_script(name, SITES[name], FILLED))
    assert verdict.elastic and verdict.findings == ()
    assert verdict.optin is not None and verdict.optin.blocks is SITES[name].arrays
    left = [one.text for one in examine(batch_script(name, SITES[name])).findings]
    assert left == (["--account=EDIT: fill it in"] if SITES[name].account else [])


@pytest.mark.parametrize("name", [name for name in SITES if SITES[name].account])
def test_what_is_known_of_a_site_has_a_source(name: str) -> None:
    """A fact of the page without one says that it was not found, and whom to ask."""
    section = (paths.REPOSITORY / "docs/sites.md").read_text().split(f"### {SITES[name].title}\n")[1].split("\n#")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| ")][2:]
    assert f"slurm-ones template {name} --account" in section and len(rows) > 5
    assert all("not found; check with" in says for _, says, source in rows if source == "none |")


def directives(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


def test_options_fill_it_in() -> None:
    """Account, partition, sizes and time of the command line; GPUs become nodes where nodes are handed out whole."""
    done = call("template", "perlmutter", "--account", "m1234", "--gpus", "2-32", "--batch", "64", "--time", "6:00:00")
    assert done.exit_code == 0
    comment = '--comment="ones: nodes=1-8 batch=64 array=blocks"'
    assert {"--account=m1234", "--time=6:00:00", "--gpus-per-node=4", comment} <= directives(done.stdout)
    done = call("template", "delta", "--partition", "gpuA40x4", "--gpus", "1-8")
    assert {"--partition=gpuA40x4", '--comment="ones: gpus=1-8 batch=32-1024 array=blocks"'} <= directives(done.stdout)
    done = call("template", "delta", "--guests", "partition:gpuA100x4-preempt")
    comment = '--comment="ones: gpus=1-16 batch=32-1024 array=blocks guests=partition:gpuA100x4-preempt"'
    assert comment in directives(done.stdout)
    assert [
        call("template", *words).exit_code for words in (("frontera", "--guests", "qos:a"), ("gres", "--guests", "a"))
    ] == [2, 2]
    assert '--comment="ones: nodes=1-1 batch=32-1024"' in directives(call("template", "frontera", "--gpus", "1").stdout)
    # Its steps are kept, and the file's name is that of the site.
    done = call("template", "perlmutter.sbatch", "--gpus", "8-32:8", "--account", "m1234")
    assert '--comment="ones: gpus=8-32:8 batch=32-1024 array=blocks"' in directives(done.stdout)


def test_exported_places_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "job"
    text = batch_script("perlmutter", SITES["perlmutter"], FILLED).rpartition("exec ")[0]
    script.write_text(text + 'echo "$ONES_JOB_ROOT"')
    for env, place in (({"SCRATCH": "/s"}, "/s/ones"), ({}, f"{tmp_path}/ones"), ({"ONES_JOB_ROOT": "/r"}, "/r")):
        done = subprocess.run(["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == place


def test_words_that_a_shell_would_run() -> None:
    with pytest.raises(BadInput):
        batch_script("delta", SITES["delta"], replace(FILLED, partition="$(reboot)"))


# -- on the real Slurms ------------------------------------------------------------------------------------------------

SMALL = ("--cpus-per-gpu=2", "--mem-per-gpu=100M")
"""In place of what a site's large nodes have."""
TRAIN = paths.REPOSITORY / "tests/wrapper/train.py"


def prepare(cluster: Cluster) -> None:
    """Nodes with the feature `gpu`, and a QOS `regular`, as Perlmutter has them."""
    feature = ["scontrol", "update", "NodeName=n[1-4]", "AvailableFeatures=gpu", "ActiveFeatures=gpu"]
    cluster.run(feature, user="root")
    if cluster.accounting:
        cluster.run(["sacctmgr", "-i", "add", "qos", "regular"], user="root", check=False)
        cluster.run(["sacctmgr", "-i", "modify", "account", sites.ACCOUNT, "set", "qos+=regular"], user="root")


@pytest.fixture(scope="module", params=["gres", nightly("old")])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Each Slurm, by its commands."""
    site = Site(request.getfixturevalue(request.param), "command")
    prepare(site.cluster)
    yield site
    site.clear()
    site.close()


def put(site: Site, name: str) -> tuple[str, list[str]]:
    """The script in the cluster, and options that fit it to the test site."""
    record = SITES[name]
    (site.cluster.scratch / f"{name}.sbatch").write_text(batch_script(name, record, FILLED))
    options = [f"--partition={'whole' if record.asks == 'whole nodes' else 'gpu'}"]
    options += [small for small in SMALL if any(one.startswith(small.split("=")[0]) for one in record.directives)]
    return f"/scratch/{name}.sbatch", options


@pytest.mark.cluster
def test_slurm_takes_them(site: Site) -> None:
    """`sbatch --test-only` of each; and one that is submitted may be resized, and takes a new shape."""
    for name in SITES:
        script, options = put(site, name)
        said = site.tell("sbatch", "--test-only", *options, script)
        assert re.search(r"Job \d+ to start at", said), (name, said)
        job_id = site.adopt(site.owner.submit(Path(script), ["--hold", *options], directory=Path("/scratch")))
        snapshot = site.owner.snapshot()
        found = arrays(snapshot.jobs.values()).get(job_id)
        one = whole_job(job_id, found) if found else WholeJob.of(snapshot.jobs[job_id])
        elastic = elastic_job(one, snapshot, {"whole": 4}, None)
        assert elastic is not None and elastic.refusal is None, (name, elastic)
        shape = Shape(2, 4)
        site.owner.reshape(elastic.job.key, shape)
        assert site.owner.job(elastic.job.key).nodes == 2, name
    site.clear()


@pytest.mark.nightly
@pytest.mark.cluster
def test_one_of_each_kind_trains(gres: Cluster) -> None:
    """GPUs by --gres and by --gpus-per-node, and whole nodes: the job's directory is on $SCRATCH and is found."""
    site = Site(gres, "command")
    prepare(gres)
    small = ("--epochs", "1", "--samples", "64", "--batch", "16")
    jobs = {}
    for name in ("gres", "perlmutter", "frontera"):
        script, options = put(site, name)
        once = ["--array=0%1"] if SITES[name].arrays else []
        command = ["sbatch", "--parsable", *options, *once, script, str(TRAIN), *small]
        jobs[name] = int(gres.run(command, user="alice", env={"SCRATCH": "/scratch"}).stdout)
    waits = f"afterany:{':'.join(map(str, jobs.values()))}"
    gres.run(["sbatch", "--wait", "--output=/dev/null", f"--dependency={waits}", "--wrap", "true"], timeout=300)
    home = gres.home("alice")
    for name, job_id in jobs.items():
        log = "".join(path.read_text() for path in home.glob(f"*-{job_id}*.out"))
        root = home if name == "gres" else gres.scratch / "ones"
        reports = [path.read_text() for path in (root / f"ones-{job_id}").glob("reports-*.jsonl")]
        assert reports and '"finished"' in reports[0], (name, log)
    site.close()
