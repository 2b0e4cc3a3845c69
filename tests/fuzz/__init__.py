"""Random programs against `jax.jit`, and mutated texts of programs."""
