"""Lower bound on the mean JCT that any schedule can reach, and how far a policy is from it."""
