"""Data of one rank in one step: shares of the global batch, samples, streams and random numbers."""
