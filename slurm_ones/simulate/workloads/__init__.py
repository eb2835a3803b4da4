"""Workloads: generated ones, measured profiles of applications, and files of published studies and traces."""
