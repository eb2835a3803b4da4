"""Simulated training jobs: their true speed and efficiency, the course of their training, and their reports."""
