"""DecentLaM (Yuan et al. 2021, arXiv 2104.11981)."""
