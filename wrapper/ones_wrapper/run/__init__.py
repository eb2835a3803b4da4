"""One run of a job, from its first report to its last."""
