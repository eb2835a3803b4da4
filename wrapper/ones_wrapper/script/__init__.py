"""Checks of what a script does besides its loop, and what of that a resize would not carry."""
