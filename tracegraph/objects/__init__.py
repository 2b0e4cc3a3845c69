"""Calls with objects of flax.nnx, which are updated in place as `nnx.jit` updates them."""
