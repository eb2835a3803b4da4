"""Data of one rank in one step: its share of the global batch, its samples, streams and random numbers."""
