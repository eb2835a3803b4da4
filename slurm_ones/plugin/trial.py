"""Whether the plugin is loaded and works: asked by submissions that only test (`sbatch --test-only`)."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.plugin.build import run
from slurm_ones.plugin.install import Site

WRONG = "2-1"
"""A range that the plugin refuses."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    what: str
    good: bool
    text: str


def _submission(*options: str) -> tuple[bool, str]:
    """Whether Slurm would take a job that does nothing, and what it says; the job is not submitted."""
    done = run("sbatch", "--test-only", *options, "--wrap", "true")
    return done.returncode == 0, (done.stderr + done.stdout).strip()


def trial(site: Site) -> tuple[Finding, ...]:
    """What works of the plugin, here and for the user who asks; raises `PluginError` where there is no Slurm."""
    taken, said = _submission()
    # A site may refuse such a job for reasons of its own: what counts is that none of them is ours.
    plain = Finding(
        "plain jobs",
        "ones:" not in said,
        "a job without our options is not touched" if taken else f"not submitted: {_last(said)}",
    )
    offered = "--elastic-gpus" in run("sbatch", "--help").stdout
    known = Finding(
        "options",
        offered,
        "sbatch knows --elastic-gpus" if offered else f"sbatch does not know --elastic-gpus: see {site.plugstack}",
    )
    option = f"--elastic-gpus={WRONG}" if offered else f"--comment=ones: gpus={WRONG}"
    wrong_taken, said = _submission(option)
    refused = not wrong_taken and "ones:" in said
    lua = [name for name, value in _lua(site).items() if "lua" in value.split(",")]
    checked = Finding(
        "checks",
        refused,
        f"{option} is refused: {_ours(said)}"
        if refused
        else f"{option} is not refused: the options have no effect ("
        + (
            f"{' and '.join(lua)} name lua: are job_submit.lua and cli_filter.lua ours?)"
            if lua
            else f"{site.conf}: neither JobSubmitPlugins nor CliFilterPlugins names lua)"
        ),
    )
    return plain, known, checked


def _lua(site: Site) -> dict[str, str]:
    return {"JobSubmitPlugins": site.job_submit, "CliFilterPlugins": site.cli_filter}


def _ours(said: str) -> str:
    return next((line.partition("ones:")[2].strip() for line in said.splitlines() if "ones:" in line), "")


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "no reason given"
