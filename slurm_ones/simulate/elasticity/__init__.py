"""What elasticity would bring to a cluster, from a trace of its own jobs."""
