"""The contract of all policies, on every policy there is, and how policies are found."""

from __future__ import annotations

import math
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import settings

from ones_db.reasons import SENTENCES
from slurm_ones import policies
from slurm_ones.ones import Ones
from slurm_ones.policies import POLICIES, find_policy, make_policy, policies_in
from slurm_ones.policy.contract import Policy
from slurm_ones.rivals.ordered import Fifo
from slurm_ones.testing import policy_contract
from slurm_ones.testing.policies import seeded
from slurm_ones.testing.rounds import cluster, job
from tests.marks import NIGHTLY

pytestmark = pytest.mark.slow
FEW = 8
"""Examples by day of each property of a rival; of our own policy there are as many as of all others."""
SHORT = {"pollux": {"population": 20, "generations": 10}}


def short(name: str) -> Policy:
    """The policy, with a short search: what every policy is held to does not depend on how long it searches."""
    return make_policy(name, **SHORT.get(name, {}))


settings.register_profile("rivals", settings.get_profile("ones"), max_examples=FEW)
for _cls in POLICIES.values():
    settings.load_profile("nightly" if NIGHTLY else "ones" if _cls is Ones else "rivals")
    _made = policy_contract(partial(short, _cls.name), starts_what_fits=_cls.name != "gavel")
    globals()[f"Test{_cls.__name__}"] = _made
settings.load_profile("nightly" if NIGHTLY else "ones")


def test_a_policy_is_added_in_one_file(tmp_path: Path) -> None:
    """A file in the folder of rivals is all that it takes; what it imports from others is not found twice."""
    (tmp_path / "largest.py").write_text(
        "from slurm_ones.rivals.ordered import Fifo\n\n\n"
        "class Largest(Fifo):\n    name = 'largest'\n\n\n"
        "class Helper:\n    name = 'no policy'\n"
    )
    package = ModuleType("added")
    package.__path__ = [str(tmp_path)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "added", package)
        found = list(policies_in(package))
        sys.modules.pop("added.largest")
    assert [policy.name for policy in found] == ["largest"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_reasons_are_right_for_a_job_alone(name: str) -> None:
    """Whatever a policy does with the only job of a cluster, that waits or runs, has room or not: it is one of the
    sentences, and speaks of no other jobs."""
    for view in (cluster(2), cluster(2, free=(1, 0)), cluster(1, 2), cluster(0)):
        for alone in (job(1), job(1, requested=64), job(1, gpus=(32,)), job(1, {"n1": 1}, epochs=3, submitted=-9e3)):
            if alone.nodes and not view.nodes:
                continue
            policy, rng = short(name), seeded()
            for now in (0.0, 60.0, 9000.0):
                found = policy.decide(view, [alone], now, rng).reasons[1]
                assert found.code in SENTENCES
                assert "other" not in str(found), str(found)


def test_wrong_names_are_told_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"policy: 'one' is none of .*ones"):
        make_policy("one")
    with pytest.raises(ValueError, match=r"no option 'generation'; it has population, generations"):
        make_policy("ones", generation=3)


WRONG: dict[str, list[tuple[str, object]]] = {
    "ones": [("population", 1), ("mutation", 1.5), ("resize_cost_s", -1), ("generations", "9"), ("sure", 1.5)],
    "pollux": [("population", 1), ("generations", -1), ("power", 0.0), ("power", math.nan)],
    "sia": [("power", 0.5), ("power", math.nan), ("left_out", -1.0), ("time_limit_s", math.inf)],
    "ees": [("interval_s", -1.0)],
    "optimus": [("interval_s", -1.0), ("interval_s", math.nan), ("converged", 0.0)],
    "tiresias": [("thresholds", (0.0,)), ("thresholds", (5.0, 5.0)), ("thresholds", (math.nan,))],
}


@pytest.mark.parametrize(("name", "option", "value"), [(name, *wrong) for name in WRONG for wrong in WRONG[name]])
def test_a_wrong_value_is_refused_by_its_options_name(name: str, option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        make_policy(name, **{option: value})


class TestDoors:
    """Policies of others."""

    def test_by_module_and_class(self) -> None:
        """As settings and `--policy` name it; with options where it has some, and without where it has none."""
        assert find_policy("slurm_ones.rivals.ordered:Fifo") is Fifo
        assert not make_policy("slurm_ones.rivals.ordered:Fifo", backfill=False).options.backfill  # type: ignore[attr-defined]
        made = make_policy(f"{__name__}:NoOptions")
        assert isinstance(made, NoOptions)
        with pytest.raises(ValueError, match="has no option 'speed'; it has none"):
            make_policy(f"{__name__}:NoOptions", speed=1)

    def test_by_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Under the name that its distribution gives it; a name of ours stays ours."""
        points = [
            EntryPoint("mine", f"{__name__}:NoOptions", policies.GROUP),
            EntryPoint("ones", "nowhere:X", policies.GROUP),
        ]
        monkeypatch.setattr(policies, "entry_points", lambda group: [p for p in points if p.group == group])
        assert find_policy("mine") is NoOptions
        assert find_policy("ones") is Ones
        with pytest.raises(ValueError, match=r"none of .*mine.*, and no package\.module:Class"):
            find_policy("yours")

    def test_what_cannot_be_loaded_is_named_with_its_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:

        class Broken:
            name, value, dist = "broken", "no_such_module:Policy", SimpleNamespace(name="their-policies", version="1.2")

        monkeypatch.setattr(policies, "entry_points", lambda group: [Broken()])
        with pytest.raises(ValueError, match=r"'broken' of their-policies 1\.2 cannot be loaded .*ModuleNotFoundError"):
            find_policy("broken")
        for wrong, why in (("sys:nothing", "AttributeError"), ("sys:path", "is no policy"), (":X", "ValueError")):
            with pytest.raises(ValueError, match=why):
                find_policy(wrong)
        assert "no_such_module" not in sys.modules


class NoOptions(Fifo):
    """Somebody's own policy."""

    name = "mine"
    options_type = None
