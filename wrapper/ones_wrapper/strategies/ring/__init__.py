"""Sequence parallelism over a ring of ranks (ring attention)."""
