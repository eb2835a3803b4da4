"""Simulated training jobs: their true speed and efficiency, their training, and their reports."""
