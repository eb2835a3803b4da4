"""Simulated training jobs: what they truly are, how they train, and what they report."""
