"""Graphed callables: a forward and a backward graph of a function, for eager code around it."""
