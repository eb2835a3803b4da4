"""Sequences over a ring of ranks (ring attention)."""
