"""Layouts: how one replica of a model is spread over several ranks."""
