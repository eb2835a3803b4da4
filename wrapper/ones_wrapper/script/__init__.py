"""Checks of a script's code besides its loop, and of state that a resize would lose."""
