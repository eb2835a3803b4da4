"""Each of the three wheels, installed alone in an empty environment, does its job with what it says it requires."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ones_db import Store, migrate
from tests.db.make import resized_job
from tests.packaging.environment import OURS, TOP, Environment, applies, members, metadata, release, requirements

pytestmark = pytest.mark.slow

PACKAGES = {"slurm-ones": "slurm_ones", "ones-db": "ones_db", "ones-wrapper": "ones_wrapper"}
Wheels = dict[str, Path]

IMPORT_ALL = """
import importlib, pkgutil, sys
package, *may_lack = sys.argv[1:]
for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    if module.name.endswith(".__main__") or ".migrations." in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in may_lack:
            raise
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
"""Imports every module of a package, and prints what that brought in; `may_lack` are what extras bring."""

PAGES = ("starlette", "uvicorn", "markupsafe", "prometheus_client")
"""What whole modules of a service need that only serve pages or figures."""

TRAIN = """
import torch
import ones_wrapper as ones

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
job = ones.init(batch=8, max_batch=16, max_local_batch=4, epochs=2)
model = job.ddp(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = job.register(model=model, optimizer=optimizer)
loader = job.loader(data)
for epoch in job.epochs():
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    job.report(loss=loss.item())
if job.rank == 0:
    print(f"trained on {job.world}")
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return release(tmp_path_factory.mktemp("release"))


def environment(factory: pytest.TempPathFactory, wheels: Wheels, name: str, *extras: str) -> Environment:
    made = Environment(factory.mktemp(name))
    made.install(wheels, name, *extras)
    made.check()
    return made


@pytest.fixture(scope="module")
def bare(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """ones-wrapper where no torch is."""
    return environment(tmp_path_factory, wheels, "ones-wrapper")


@pytest.fixture(scope="module")
def training(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment(tmp_path_factory, wheels, "ones-wrapper", "torch")


@pytest.fixture(scope="module")
def notebook(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """ones-db where frames are wanted, and nothing is migrated."""
    made = environment(tmp_path_factory, wheels, "ones-db")
    made.link(Requirement("pandas"))
    return made


@pytest.fixture(scope="module")
def service(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """slurm-ones on a service node."""
    return environment(tmp_path_factory, wheels, "slurm-ones")


class TestContents:
    def test_one_package_each_with_its_licence(self, wheels: Wheels) -> None:
        """Nothing called `db`, `wrapper` or `tests` is installed into anybody's environment."""
        assert set(wheels) == OURS
        for name, wheel in wheels.items():
            found = members(wheel)
            info = wheel.name.rpartition("-py3-")[0] + ".dist-info"
            assert {path.partition("/")[0] for path in found} == {PACKAGES[name], info}
            assert {f"{PACKAGES[name]}/py.typed", f"{info}/licenses/LICENSE"} <= found

    def test_every_file_of_the_packages_is_there(self, wheels: Wheels) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=TOP, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if listed.returncode != 0:
            pytest.skip("not a git checkout")
        for name, folder in (("slurm-ones", ""), ("ones-db", "db/"), ("ones-wrapper", "wrapper/")):
            prefix = f"{folder}{PACKAGES[name]}/"
            wanted = {line.removeprefix(folder) for line in listed.stdout.splitlines() if line.startswith(prefix)}
            wanted = {path for path in wanted if (TOP / folder / path).is_file()}
            assert wanted - members(wheels[name]) == set()

    def test_templates_and_units(self, wheels: Wheels) -> None:
        """What `slurm-ones template` prints: the folder at the top of the repository is there by a link."""
        found = members(wheels["slurm-ones"])
        for path in (TOP / "sbatch_templates").iterdir():
            assert f"slurm_ones/sbatch_templates/{path.name}" in found
        assert "slurm_ones/service/units/slurm-ones.service" in found

    def test_no_fault_injector_and_no_trainer(self, wheels: Wheels) -> None:
        """They are the tests' and the benchmarks' own."""
        found = {Path(path).stem for path in members(wheels["slurm-ones"])}
        own = {"train_drl", "faulty_world", "mutants"}
        assert own <= {path.stem for folder in ("benchmarks", "tests/faults") for path in (TOP / folder).glob("*.py")}
        assert not found & own

    def test_an_index_can_show_them(self, wheels: Wheels) -> None:
        """Descriptions have no link that leads nowhere there, pictures are files and not pages about them, and each
        says where the project is."""
        for wheel in wheels.values():
            said = metadata(wheel)
            pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", said.get_payload())
            assert [link for link in pictures if "/raw/" not in link] == []
            links = re.findall(r"\]\(([^)]+)\)", said.get_payload())
            assert links and not [link for link in links if not link.startswith(("https://", "#"))]
            assert [line.split(", ")[0] for line in said.get_all("Project-URL", [])] == ["Source", "Changelog"]

    def test_a_checkout_brings_all_three(self, wheels: Wheels, tmp_path: Path) -> None:
        """pip asks no index for ours in `pip install .`; what is built requires them by version all the same."""
        code = "import sys, build_backend as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], cwd=TOP, env=os.environ | {"PYTHONPATH": str(TOP)},
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        asked = (tmp_path / done.stdout.split()[-1] / "METADATA").read_text()
        assert f"Requires-Dist: ones-db[migrate] @ {(TOP / 'db').as_uri()}\n" in asked
        assert f"Requires-Dist: ones-wrapper @ {(TOP / 'wrapper').as_uri()}\n" in asked
        assert not any(one.url for one in requirements(wheels["slurm-ones"]))


class TestVersions:
    """One version, kept in one place a distribution."""

    def test_all_three_are_the_same_and_require_each_other(self, wheels: Wheels) -> None:
        (number,) = {wheel.name.split("-")[1] for wheel in wheels.values()}
        for wheel in wheels.values():
            assert {str(one.specifier) for one in requirements(wheel) if one.name in OURS} <= {f"=={number}", ""}

    @pytest.mark.nightly
    @pytest.mark.parametrize(("where", "command"), [("service", "slurm-ones"), ("bare", "ones-run")])
    def test_commands_say_it(self, request: pytest.FixtureRequest, wheels: Wheels, where: str, command: str) -> None:
        done = request.getfixturevalue(where).run(command, "--version")
        assert done.stdout.strip() == f"{command} {wheels['slurm-ones'].name.split('-')[1]}"


class TestWrapper:
    """ones-wrapper in a training environment."""

    EXTRAS = ("mpi4py", "transformers", "accelerate", "lightning")
    FOREIGN = ("sqlalchemy", "alembic", "pydantic", "typer", "rich", "scipy", "slurm_ones", "ones_db")

    def test_it_requires_numpy_alone(self, wheels: Wheels) -> None:
        """Nothing is pulled into a training environment that could change what is there."""
        assert [one.name for one in requirements(wheels["ones-wrapper"]) if applies(one, ())] == ["numpy"]

    @pytest.mark.nightly
    def test_the_protocol_needs_no_torch(self, bare: Environment) -> None:
        assert bare.lacks("torch", *self.FOREIGN)
        code = "import ones_wrapper as w, ones_wrapper.protocol, importlib.metadata as m; "
        assert bare.python(f"{code}print(w.__version__ == m.version('ones-wrapper'))") == "True"

    @pytest.mark.nightly
    def test_ones_run_says_that_torch_is_missing(self, bare: Environment) -> None:
        """One sentence with the command, exit code 2, and nothing started."""
        script = bare.folder / "train.py"
        script.write_text(TRAIN)
        done = bare.run("ones-run", script, ONES_JOB_DIR=str(bare.folder / "job"))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "ones-run: torch is not installed in this environment: pip install 'ones-wrapper[torch]', "
            "or load your site's module\n"
        )

    @pytest.mark.nightly
    def test_every_module_works_with_torch_alone(self, training: Environment) -> None:
        """Nothing of the companion's is imported anywhere; mpi4py is an extra, and frameworks are their users' own."""
        assert training.lacks(*self.FOREIGN)
        loaded = training.python(IMPORT_ALL, "ones_wrapper", *self.EXTRAS).split()
        assert "torch" in loaded

    @pytest.mark.nightly
    def test_two_processes_train(self, training: Environment) -> None:
        script = training.folder / "train.py"
        script.write_text(TRAIN)
        done = training.run("ones-run", "--gpus-per-node=2", script, ONES_JOB_DIR=str(training.folder / "job"))
        assert done.returncode == 0, done.stderr
        assert "trained on 2" in done.stdout


class TestDatabase:
    """ones-db in a notebook's environment."""

    @pytest.mark.nightly
    def test_it_reads_a_database_into_a_frame(self, notebook: Environment, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'ones.sqlite'}"
        migrate.upgrade(url)
        with Store.open(url, "gres") as store:
            resized_job(store, 7)
        assert notebook.lacks("alembic", "torch", "pydantic", "typer", "slurm_ones")
        code = "import sys, ones_db, importlib.metadata as m; print(ones_db.__version__ == m.version('ones-db'), "
        code += "ones_db.connect(sys.argv[1]).job_summary()[['job_id', 'resizes']].values)"
        assert notebook.python(code, url) == "True [[7 1]]"


class TestCompanion:
    """slurm-ones on a service node."""

    def test_it_has_no_torch(self, service: Environment) -> None:
        assert service.lacks("torch", "pyslurm", "psycopg", "matplotlib", "pandas")

    def test_every_module_works_without_the_extras(self, service: Environment) -> None:
        service.python(IMPORT_ALL, "slurm_ones", "pyslurm", "pytest", "hypothesis", *PAGES)

    def test_commands_answer(self, service: Environment) -> None:
        done = service.run("slurm-ones", "--help")
        assert done.returncode == 0, done.stderr

    @pytest.mark.nightly
    def test_a_template_is_printed(self, service: Environment) -> None:
        done = service.run("slurm-ones", "template", "ddp")
        assert done.stdout == (TOP / "sbatch_templates/ddp.sbatch").read_text()

    @pytest.mark.nightly
    def test_a_sites_script_is_printed_and_found_elastic(self, service: Environment, tmp_path: Path) -> None:
        """What the guide for sites has people type, as far as Slurm is not asked."""
        printed = service.run("slurm-ones", "template", "delta", "--account", "mine", "--gpus", "1-8")
        (tmp_path / "job.sbatch").write_text(printed.stdout)
        done = service.run("slurm-ones", "check", tmp_path / "job.sbatch")
        assert (printed.returncode, done.returncode) == (0, 0), printed.stderr + done.stdout
        assert "1 to 8 GPUs" in done.stdout and "blocks that join and leave" in done.stdout

    def test_a_fresh_database(self, service: Environment, tmp_path: Path) -> None:
        done = service.run("slurm-ones", "db", "upgrade", "--database", f"sqlite:///{tmp_path}/ones.sqlite")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "ones.sqlite").is_file()

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_a_demo_without_torch(self, service: Environment) -> None:
        done = service.run("slurm-ones", "demo", "--small", "--directory", "demo")
        assert done.returncode == 0, done.stderr
        assert "torch is not installed here, so no real training runs: pip install 'slurm-ones[demo]'" in done.stdout
        assert "No live page: starlette, uvicorn, jinja2 not installed" in done.stdout
        assert "All jobs: 2 elastic jobs, 2 ended" in done.stdout

    @pytest.mark.nightly
    def test_a_small_study(self, service: Environment, tmp_path: Path) -> None:
        done = service.run(
            "slurm-ones", "simulate", "--workload", "ones-sc21", "--jobs", "3", "--cluster", "1x4", "--policy", "ones",
            "--processes", "1", "--figures", tmp_path / "study.json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "study.json").read_text())["policies"]["ones"]["unfinished"] == 0
