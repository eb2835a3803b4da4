"""Membership of a job of blocks: which blocks train together, and how blocks join and leave during training.

`launch` imports `membership.files` before torch is imported. So no module here imports `launch`.
"""
