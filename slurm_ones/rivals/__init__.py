"""Policies with which `ones` is compared: one file for each, which names the paper that it follows."""
