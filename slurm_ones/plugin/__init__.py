"""The Slurm plugin: sbatch's options `--elastic-…`, and what checks and completes elastic jobs as they are submitted.

Its sources are package data: a SPANK plugin in C hands the options' text on, and Lua for Slurm's `job_submit/lua` and
`cli_filter/lua` makes the comment of it. `build` compiles the one, `install` writes all of them into a folder and
says whether they work.
"""

from __future__ import annotations

from slurm_ones.plugin.build import SPANK, PluginError, compile_spank
from slurm_ones.plugin.install import PluginSite, TrialFinding, look, trial, write_own, write_site

__all__ = [
    "SPANK",
    "PluginError",
    "PluginSite",
    "TrialFinding",
    "compile_spank",
    "look",
    "trial",
    "write_own",
    "write_site",
]
