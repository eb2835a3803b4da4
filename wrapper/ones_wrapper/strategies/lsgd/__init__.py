"""Leader SGD (Teng et al. 2019, arXiv 1905.10395)."""
