"""A bound on the mean JCT that no schedule can beat, and what lies between it and a policy's figure."""
