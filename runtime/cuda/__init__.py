"""The CUDA device: driver, graphs, memory and order with JAX."""
