"""Data of one rank: its share of each step's global batch, its samples, streams and random numbers."""
