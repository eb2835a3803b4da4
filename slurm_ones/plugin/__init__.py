"""Slurm plugin: options `--elastic-…` for sbatch, and scripts that check and complete elastic jobs at submission.

Its sources are package data. A SPANK plugin in C passes on the options' text. Lua scripts for `job_submit/lua` and
`cli_filter/lua` turn it into the job's comment. `build` compiles the SPANK plugin; `install` writes all files into a
folder and checks that they work.
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
