"""Lower bound on the mean JCT of any schedule, and the gap between this bound and a policy's mean JCT."""
