"""The job's directory: reports, orders, requests, checkpoints as names, and who holds it. No torch."""
