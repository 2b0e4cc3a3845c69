"""Kernels of Mosaic GPU, for tests: one without tensor cores, and a matmul with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

TILE = 128


def double_exp(x: Any) -> Any:
    """Returns twice the exponential of an array of rows by 128, rows a multiple of 128."""

    def body(source: Any, target: Any) -> None:
        rows = pallas.ds(lax.axis_index("m") * TILE, TILE)
        target[rows, :] = jnp.exp(source[rows, :]) * 2

    kernel = mosaic_gpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // TILE,),
        grid_names=("m",),
    )
    return kernel(x)


def multiply(a: Any, b: Any) -> Any:
    """Returns a matmul of float16, by the tensor memory accelerator and warp groups of Hopper."""

    def body(a_ref: Any, b_ref: Any, out: Any, *scratch: Any) -> None:
        a_tile, b_tile, tile, bar = scratch
        rows = pallas.ds(lax.axis_index("m") * TILE, TILE)
        columns = pallas.ds(lax.axis_index("n") * TILE, TILE)
        mosaic_gpu.copy_gmem_to_smem(a_ref.at[rows], a_tile, bar.at[0])
        mosaic_gpu.copy_gmem_to_smem(b_ref.at[:, columns], b_tile, bar.at[1])
        mosaic_gpu.barrier_wait(bar.at[0])
        mosaic_gpu.barrier_wait(bar.at[1])

        def compute(acc: Any) -> Any:
            mosaic_gpu.wgmma(acc, a_tile, b_tile)
            return acc[...]

        sums = mosaic_gpu.ACC((TILE, TILE), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        found = pallas.run_scoped(compute, sums)
        tile[...] = found.astype(jnp.float16)
        mosaic_gpu.commit_smem()
        mosaic_gpu.copy_smem_to_gmem(tile, out.at[rows, columns])
        mosaic_gpu.wait_smem_to_gmem(0)

    transforms = (mosaic_gpu.TilingTransform((8, 64)), mosaic_gpu.SwizzleTransform(128))
    shared = mosaic_gpu.SMEM((TILE, TILE), jnp.float16, transforms=transforms)
    kernel = mosaic_gpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float16),
        grid=(a.shape[0] // TILE, b.shape[1] // TILE),
        grid_names=("m", "n"),
        scratch_types=[shared, shared, shared, mosaic_gpu.Barrier(num_barriers=2)],
    )
    return kernel(a, b)
