"""A process of the job: its rank, signals, errors, end and log. Imports no torch."""
