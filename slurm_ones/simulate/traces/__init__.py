"""Records of real clusters' jobs, each format read into one form."""
