"""Mean of the gradients over a step's samples: exchange, accumulation and the noise scale."""
