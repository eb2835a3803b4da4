"""Checks of a script's code outside its loop, and of state that a resize would lose."""
