"""Slurm plugin: options `--elastic-…` for sbatch, and scripts that check and complete elastic jobs at submission.

Its sources are package data. A SPANK plugin in C passes on the options' text. Lua scripts for `job_submit/lua` and
`cli_filter/lua` turn it into the job's comment. `build` compiles the SPANK plugin; `install` writes all files into a
folder and checks that they work.
"""
