"""How gradients become the mean over a step's samples: exchange, accumulation and the noise scale."""
