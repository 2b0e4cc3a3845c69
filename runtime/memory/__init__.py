"""Segments, blocks and pools: pure Python, without JAX and without CUDA."""
