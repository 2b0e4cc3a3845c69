"""NVIDIA libraries whose work becomes part of a graph."""
