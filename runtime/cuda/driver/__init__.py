"""The CUDA driver: its bindings and its calls."""
