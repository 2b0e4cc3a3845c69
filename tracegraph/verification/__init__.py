"""Comparing a new graph with what it was made from."""
