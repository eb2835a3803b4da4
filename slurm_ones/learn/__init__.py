"""Models of each job's throughput, statistical efficiency and progress, learned from its history; no I/O."""
