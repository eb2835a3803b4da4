"""What one rank reads in one step: shares of the global batch, samples, streams and random numbers."""
