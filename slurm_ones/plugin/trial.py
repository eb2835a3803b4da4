"""Whether the plugin is loaded and works: asked by submissions that only test (`sbatch --test-only`)."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ones.plugin.build import run
from slurm_ones.plugin.install import PluginSite

WRONG = "2-1"
"""A range that the plugin refuses."""


@dataclass(frozen=True)
class TrialFinding:
    """One thing that was tried."""

    what: str
    good: bool
    text: str


def _submission(*options: str) -> tuple[bool, str]:
    """Whether Slurm would take a job that does nothing, and what it says; the job is not submitted."""
    done = run("sbatch", "--test-only", *options, "--wrap", "true")
    return done.returncode == 0, (done.stderr + done.stdout).strip()


def trial(site: PluginSite) -> tuple[TrialFinding, ...]:
    """What works of the plugin, here and for the user who asks; raises `PluginError` where there is no Slurm."""
    taken, said = _submission()
    # A site may refuse such a job for reasons of its own: what counts is that none of them is ours.
    text = "a job without our options is not touched" if taken else f"not submitted: {_last(said)}"
    found = [TrialFinding("plain jobs", "ones:" not in said, text)]
    offered = "--elastic-gpus" in run("sbatch", "--help").stdout
    text = "sbatch knows --elastic-gpus" if offered else f"sbatch does not know --elastic-gpus: see {site.plugstack}"
    found.append(TrialFinding("options", offered, text))
    option = f"--elastic-gpus={WRONG}" if offered else f"--comment=ones: gpus={WRONG}"
    taken, said = _submission(option)
    ours = next((line.partition("ones:")[2].strip() for line in said.splitlines() if "ones:" in line), "")
    if taken:
        text = f"{option} is taken, so nothing is checked and options have no effect: {_why(site)}"
    else:
        text = f"{option} is refused: {ours}" if ours else f"could not be tried: {_last(said)}"
    found.append(TrialFinding("checks", not taken and bool(ours), text))
    return tuple(found)


def _why(site: PluginSite) -> str:
    """What is probably missing where no script of ours runs."""
    plugins = {"JobSubmitPlugins": site.job_submit, "CliFilterPlugins": site.cli_filter}
    lua = [name for name, value in plugins.items() if "lua" in value.split(",")]
    if not lua:
        return f"neither JobSubmitPlugins nor CliFilterPlugins names lua in {site.conf}"
    return f"lua is in {' and '.join(lua)}, so its script does not call ours, or cannot read it"


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "no reason given"
