"""Faults by the thousand, from a seed: the unchanged companion on the simulated cluster, and all that can go wrong.

A seed makes a plan (`plan.py`): a small cluster, some jobs, how often each kind of fault is injected. `run.py` carries
it out; `safety.py` and `invariants.py` look for what must never happen.
"""
