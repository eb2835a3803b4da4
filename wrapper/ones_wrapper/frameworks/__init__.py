"""Elastic training in loops that a framework runs: one module each, which imports its framework.

`steps` is what they have in common. Nothing here is imported by the rest of `ones_wrapper`.
"""
