"""`make gpu`: what tests on CPUs cannot show, checked on this machine's GPUs, with the wrapper that jobs use.

    make gpu PYTHON=/path/of/an/environment/with/a/CUDA/torch/bin/python

Nothing but the checkout and that environment is needed, no Slurm. `checks.py` lists what is checked.
"""
