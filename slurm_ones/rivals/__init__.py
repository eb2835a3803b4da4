"""Policies with which `ones` is compared. Each has its own file, which names the paper that it follows."""
