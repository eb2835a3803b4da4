"""How often a user's own companion looks: by what slurmctld says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.cli.run import paced
from slurm_ones.config import Settings
from slurm_ones.slurm.command import CommandClient
from slurm_ones.slurm.parse import mean_rpc_s
from tests.cluster import Cluster

OWN = Settings(scope="own")
RPCS = """\
Remote Procedure Call statistics by message type
\tREQUEST_PARTITION_INFO                  ( 2009) count:{count}      ave_time:{each}    total_time:{total}
\tREQUEST_JOB_INFO                        ( 2003) count:1      ave_time:100    total_time:100

Remote Procedure Call statistics by user
\troot            (       0) count:1000   ave_time:9000000 total_time:9000000000
"""


def site(folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, sdiag: str) -> CommandClient:
    """The commands of a site, as two scripts."""
    for name, text in (("scontrol", f"SlurmctldParameters = {parameters}"), ("sdiag", sdiag)):
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return CommandClient()


@pytest.mark.parametrize(
    ("parameters", "each", "interval_s"),
    [("(null)", 900_000, 30.0), ("(null)", 1_100_000, 180.0), ("enable_configless,rl_enable", 100, 180.0)],
)
def test_a_users_companion_looks_often_if_slurm_has_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, each: int, interval_s: float
) -> None:
    client = site(tmp_path, monkeypatch, parameters, RPCS.format(count=999, each=each, total=999 * each))
    assert paced(OWN, client).interval_s == interval_s


def test_who_set_an_interval_or_is_an_operator_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = site(tmp_path, monkeypatch, "(null)", "")
    assert paced(OWN.model_copy(update={"tick_s": 75.0}), client).interval_s == 75.0
    assert paced(Settings(), client).interval_s == 60.0


def test_a_slurm_without_sdiag_is_left_in_peace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = site(tmp_path, monkeypatch, "(null)", "")
    (tmp_path / "sdiag").write_text("#!/bin/sh\necho 'sdiag: error: Access denied' >&2\nexit 1\n")
    assert paced(OWN, client).interval_s == 180.0


@pytest.mark.cluster
def test_a_real_controller_says_it(gres: Cluster) -> None:
    gres.run(["squeue"])
    assert 0 < mean_rpc_s(gres.run(["sdiag"]).stdout) < 5
