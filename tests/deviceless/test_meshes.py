"""Meshes of one device: XLA leaves no collective in a program for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.deviceless import pipeline


def test_collectives_of_one_gpu_become_kernels(h200: Any) -> None:
    mesh = Mesh(np.array([h200]), ("i",))

    def body(x: Any) -> Any:
        rows = jax.lax.all_gather(jax.lax.ppermute(x, "i", [(0, 0)]), "i", tiled=True)
        return jax.lax.pmean(rows, "i") + jax.lax.psum(jnp.sin(x), "i")

    spec: Any = P("i")
    function: Any = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    argument = jax.ShapeDtypeStruct((8,), jnp.float32)
    lowered = pipeline.lower_for_gpu(pipeline.make_capture_request(function, (argument,)), h200)
    assert lowered.program.steps
    assert lowered.eager_regions == ()
