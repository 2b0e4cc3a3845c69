"""Kernels that compute along rows: norms, losses, activations, and their gradients."""
