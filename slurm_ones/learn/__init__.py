"""Models of each job's throughput, statistical efficiency and progress, learned from job histories; no I/O."""
