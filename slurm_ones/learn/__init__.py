"""Learning of each job's throughput, statistical efficiency and progress from its history; no I/O."""
