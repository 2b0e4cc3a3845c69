"""The CUDA device: its buffers, its results and its order with JAX's work."""
