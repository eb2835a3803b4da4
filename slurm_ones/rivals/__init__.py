"""Policies that `ones` is compared with: one file for each policy, naming the paper that it follows."""
