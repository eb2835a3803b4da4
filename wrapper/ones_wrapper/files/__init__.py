"""Files of the job's directory: reports, orders, requests, names of checkpoints, claims and locks. No torch."""
