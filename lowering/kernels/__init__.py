"""Kernels of our own, as PTX: what XLA leaves to the host between two launches."""
