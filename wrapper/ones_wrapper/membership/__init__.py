"""Membership of a job of blocks: which blocks train together, and how blocks join and leave during training.

No module here imports `launch`, which itself imports `membership.files` (before torch).
"""
