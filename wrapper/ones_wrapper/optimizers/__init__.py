"""Optimizers whose exchange between ranks is their own."""
