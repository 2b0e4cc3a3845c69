"""Conformance: JAX's own primitive harnesses through capture and replay, against `jax.jit`."""
