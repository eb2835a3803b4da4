"""Elastic training in loops that a framework runs: one module each, which imports its framework.

`steps` holds their common code. The rest of `ones_wrapper` imports nothing from here.
"""
