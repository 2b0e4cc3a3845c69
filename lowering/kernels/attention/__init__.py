"""Kernels of attention: of few rows over a cache, and of whole sequences in tiles."""
