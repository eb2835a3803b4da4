"""What `slurm-ones plugin check` says of Slurms that answer in various ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ones.plugin.install import PluginSite, trial

SBATCH = """#!/bin/sh
case "$*" in
*--help*) echo "      {option}=RANGE   help" ;;
*2-1*) {wrong} ;;
*) {plain} ;;
esac
"""
TAKEN, REFUSED = "echo would start", "echo sbatch: error: ones: wrong >&2; exit 1"
NO_ACCOUNT = "echo sbatch: error: Invalid account >&2; exit 1"
OPTION = "--elastic-gpus"


@pytest.mark.parametrize(
    ("option", "wrong", "plain", "plugins", "good", "text"),
    [
        (OPTION, REFUSED, TAKEN, "lua", (True, True, True), "is refused: wrong"),
        ("--exclusive", REFUSED, TAKEN, "lua", (True, False, True), "--comment=ones: gpus=2-1 is refused"),
        (OPTION, TAKEN, TAKEN, "", (True, True, False), "neither JobSubmitPlugins nor CliFilterPlugins names lua"),
        (OPTION, TAKEN, TAKEN, "cray,lua", (True, True, False), "lua is in JobSubmitPlugins, so its script"),
        (OPTION, TAKEN, TAKEN, "job_submit/lua", (True, True, False), "lua is in JobSubmitPlugins, so its script"),
        (
            OPTION,
            NO_ACCOUNT,
            NO_ACCOUNT,
            "lua",
            (True, True, False),
            "could not be tried: sbatch: error: Invalid account",
        ),
        (OPTION, REFUSED, REFUSED, "lua", (False, True, True), "is refused: wrong"),
    ],
)
def test_what_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    wrong: str,
    plain: str,
    plugins: str,
    good: tuple[bool, ...],
    text: str,
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(SBATCH.format(option=option, wrong=wrong, plain=plain))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = trial(PluginSite("/etc/slurm/slurm.conf", plugins, "", "/etc/slurm/plugstack.conf"))
    assert tuple(one.good for one in found) == good
    assert text in found[-1].text
