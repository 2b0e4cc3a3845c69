"""What the scripts of tests over several devices have in common: a mesh, a model, places, bytes.

A script is run in a process of its own, for the number of JAX's devices is set when it starts. It
has ``jax``, ``jnp``, ``np`` and, by name, ``NamedSharding`` and ``P``; its ``mesh`` has an axis
``data``.
"""

from __future__ import annotations

MODEL = """
# Two arrays may share the memory of one of NumPy's, if it is aligned: each gets its own.
def put(value, *spec, over=mesh):
    return jax.device_put(jax.tree.map(np.array, value), NamedSharding(over, P(*spec)))

def read(tree):
    "Every part on every device, with the sharding."
    return [
        (leaf.sharding, [(s.device, s.index, np.asarray(s.data).tobytes()) for s in
         sorted(leaf.addressable_shards, key=lambda s: s.device.id)])
        for leaf in jax.tree.leaves(tree)
    ]

x = np.arange(16, dtype=np.float32).reshape(8, 2) / 7
w = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}

def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)

def train(params, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value
"""
