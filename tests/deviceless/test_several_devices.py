"""Programs for two described GPUs of one process: XLA compiles them, and this version refuses them.

The thunks are those that docs/design/data_parallel.md names.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.deviceless import topology
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import read_program
from tracegraph.lowering.xla.schema import legal_compile_options, load_schema
from tracegraph.lowering.xla.thunks import read_kind
from tracegraph.runtime.errors import UnsupportedError


def body(x: Any) -> Any:
    """One collective of each kind; the sum is too large for XLA's own kernel."""
    rows = lax.all_to_all(x, "i", 0, 0, tiled=True)
    moved = lax.ppermute(rows, "i", [(0, 1), (1, 0)])
    whole = lax.all_gather(moved, "i", tiled=True)
    part = lax.psum_scatter(whole * 2, "i", tiled=True)
    return lax.psum(jnp.sin(part), "i") + lax.axis_index("i")


def list_kinds(thunks: Any) -> list[str]:
    kinds = []
    for thunk in thunks:
        kind = read_kind(thunk)
        kinds.append(kind)
        inner = getattr(thunk, thunk.WhichOneof("impl"))
        if kind == "async_start":
            kinds += list_kinds(inner.thunks.thunks)
        elif kind in ("sequential", "collective_group"):
            kinds += list_kinds(inner.thunks)
    return kinds


def compile_for_two(function: Any, size: int, **options: str | bool) -> bytes:
    mesh = Mesh(np.array(topology.find_h200s(2)), ("i",))
    run = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    spread = NamedSharding(mesh, P("i"))
    given = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=spread)
    lowered = jax.jit(run(function, check_vma=False)).lower(given)
    executable: Any = lowered.compile(compiler_options=options)
    return executable.runtime_executable().serialize()


@pytest.fixture(scope="module")
def serialized(h200: Any) -> bytes:
    return compile_for_two(body, 1 << 22)


def test_one_program_has_a_thunk_for_each_collective(serialized: bytes) -> None:
    program: Any = read_executable(serialized, load_schema())
    config = program.hlo_module_with_config.config
    assert (config.replica_count, config.num_partitions) == (1, 2)
    kinds = {*list_kinds(program.thunks)}
    wanted = {"all_to_all", "collective_permute", "all_gather", "reduce_scatter", "partition_id"}
    assert wanted <= kinds
    assert kinds & {"all_reduce", "collective_kernel"}
    # One color for all memory: none of it is registered with NCCL.
    assert {each.color for each in program.buffer_allocations.values} == {0}


def test_it_is_refused_by_the_number_of_its_devices(serialized: bytes) -> None:
    with pytest.raises(UnsupportedError, match="is for 1 by 2 devices"):
        read_program(serialized, name="step")


def test_an_option_leaves_small_sums_to_nccl(h200: Any) -> None:
    assert h200 is not None
    option = "xla_gpu_experimental_use_collective_kernels"
    if option not in legal_compile_options():
        pytest.skip("this XLA has another option")
    serialized = compile_for_two(lambda x: lax.psum(x * 2, "i"), 256, **{option: ""})
    program: Any = read_executable(serialized, load_schema())
    assert list_kinds(program.thunks)[-1] == "all_reduce"
