"""Mean of the gradients over a step's samples: exchange between ranks, accumulation, and the noise scale."""
