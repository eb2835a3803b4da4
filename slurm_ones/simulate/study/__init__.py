"""Comparison of policies: plans, runs, figures, and their presentation."""
