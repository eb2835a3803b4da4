"""Throughput, statistical efficiency and progress of each job, from what was observed; pure."""
