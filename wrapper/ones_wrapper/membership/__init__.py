"""A job of blocks: which blocks train together, and how they change while they do.

This room lies below `launch`, which asks `files` whether a block is wanted before torch is imported; so nothing here
imports `launch`.
"""
