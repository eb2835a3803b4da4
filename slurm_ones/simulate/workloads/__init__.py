"""Submissions and applications: generated workloads, measured profiles, and files of published studies."""
