"""Policies that `ones` is compared with: one file for each, naming the paper that it follows."""
