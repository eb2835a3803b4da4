"""The live page: the cluster, its jobs and what was decided, in a browser. It reads, and changes nothing."""
