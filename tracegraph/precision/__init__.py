"""Flags for the precision of matmuls and convolutions, and what they change in a trace."""
