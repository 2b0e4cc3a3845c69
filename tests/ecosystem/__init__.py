"""Programs as users of JAX and of its libraries write them, each held against `jax.jit`."""
