"""Policies compared: what to run, how it went, figures, invariants, and how they are shown."""
