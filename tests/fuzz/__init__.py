"""Random programs: captured, in both modes, against `jax.jit`."""
