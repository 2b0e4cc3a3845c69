"""The CUDA driver: its bindings, as small typed calls."""
