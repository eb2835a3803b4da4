"""Slurm plugin: options `--elastic-…` of sbatch, and scripts that check and complete elastic jobs at submission.

A SPANK plugin in C passes the options on as text. Lua scripts for `job_submit/lua` and `cli_filter/lua` turn that text
into the job's comment. Their sources are data of this package. `build` compiles the SPANK plugin; `install` writes all
files into a folder and checks that they work.
"""
