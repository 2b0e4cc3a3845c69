"""Programs for two described GPUs of one process: what XLA writes, and the graphs made of it.

The thunks are those that docs/design/data_parallel.md names.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.deviceless import topology
from tests.deviceless.building import check_built
from tests.deviceless.spreading import Network, lower_over, make_mesh, make_type, place_all
from tracegraph.lowering.planning.step_order import find_ancestors
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import read_program
from tracegraph.lowering.xla.schema import legal_compile_options, load_schema
from tracegraph.lowering.xla.thunks import read_kind
from tracegraph.runtime.definition.collective_nodes import CollectiveNode, NumberNode
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.nodes import KernelNode
from tracegraph.runtime.definition.placement import list_exchanged
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


def test_a_program_for_another_number_of_devices_is_refused(serialized: bytes) -> None:
    with pytest.raises(UnsupportedError, match="is for 1 by 2 devices"):
        read_program(serialized, name="step")
    with pytest.raises(UnsupportedError, match="is for 1 by 2 devices"):
        read_program(serialized, name="step", partitions=4)


def test_an_option_leaves_small_sums_to_nccl(h200: Any) -> None:
    assert h200 is not None
    option = "xla_gpu_experimental_use_collective_kernels"
    if option not in legal_compile_options():
        pytest.skip("this XLA has another option")
    serialized = compile_for_two(lambda x: lax.psum(x * 2, "i"), 256, **{option: ""})
    program: Any = read_executable(serialized, load_schema())
    assert list_kinds(program.thunks)[-1] == "all_reduce"


COLLECTIVES: dict[str, Any] = {
    "all": body,
    "sums": lambda x: lax.psum(jnp.sin(x), "i") + lax.psum(x * x, "i") * lax.pmax(x, "i"),
    "columns": lambda x: lax.all_gather(x.reshape(-1, 8), "i", axis=1, tiled=True),
    "long_scan": lambda x: lax.fori_loop(0, 3000, lambda i, c: lax.pmean(c, "i") * 0.99, x),
    "while": lambda x: lax.while_loop(
        lambda c: lax.pmax(jnp.max(c), "i") > 0.5, lambda c: c * 0.7, x
    ),
    # XLA sorts by a handler of its own, which no graph holds.
    "sort": lambda x: lax.psum(jnp.sort(x), "i"),
    "cond": lambda x: lax.cond(
        lax.psum(x.sum(), "i") > 0, lambda y: lax.psum(y, "i"), lambda y: y * 2, x
    ),
}


@pytest.mark.parametrize("name", list(COLLECTIVES))
@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_each_gpu_gets_a_graph_with_the_collectives_inside(h200: Any, name: str, size: int) -> None:
    assert h200 is not None
    mesh = make_mesh(2)
    over = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    run = jax.shard_map(COLLECTIVES[name], check_vma=False, **over)
    found = lower_over(run, [make_type((size,), mesh, "i")])
    definition = found.lowered.definition
    assert list_exchanged(definition)
    # None of them may overtake another, on any GPU.
    for part in list_parts(definition):
        order = [n for n, node in enumerate(part.nodes) if isinstance(node, CollectiveNode)]
        ancestors = find_ancestors(len(part.nodes), part.edges)
        assert all(ancestors[b] >> a & 1 for a, b in itertools.pairwise(order))
    for placed in place_all(definition, 2):
        nodes = [*list_nested(node for stage in placed.stages for node in stage.nodes)]
        assert not any(isinstance(node, CollectiveNode | NumberNode) for node in nodes)
        check_built(placed)


def list_parts(definition: Any) -> list[Any]:
    parts = list(definition.stages)
    for node in list_nested(node for stage in definition.stages for node in stage.nodes):
        parts += getattr(node, "bodies", ())
    return parts


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_state_is_updated_in_place_on_each_gpu(h200: Any, is_cut: bool, count: int) -> None:
    assert h200 is not None
    network = Network(make_mesh(count), is_cut)
    found = lower_over(network.train, network.list_arguments(), donate_argnums=(0,))
    definition, program = found.lowered.definition, found.lowered.program
    assert {each.alias for each in program.outputs} == {"params['w']", "params['v']", None}
    shapes = {slot.name: slot.shape for slot in definition.slots}
    parts = count if is_cut else 1
    assert shapes["params['w']"] == (64, 256 // parts)
    assert found.types["params['w']"].aval.shape == (64, 256)
    exchanges = [node for node in definition.stages[0].nodes if isinstance(node, CollectiveNode)]
    assert exchanges
    assert all(node.exchange.groups == (tuple(range(count)),) for node in exchanges)
    # Sums of two numbers have one order.
    assert bool(found.lowered.inexact_causes) == (count > 2)
    tables = []
    for placed in place_all(definition, count):
        check_built(placed)
        kernels = [node for node in placed.stages[0].nodes if isinstance(node, KernelNode)]
        tables.append([n.parameters[0] for n in kernels if n.name == exchanges[0].name])
    # Each GPU has the same addresses, and its own number.
    heads = {bytes(table[0][:-16]) for table in tables}
    ranks = [int.from_bytes(table[0][-16:-12], "little") for table in tables]
    assert (len(heads), ranks) == (1, [*range(count)])


def test_two_axes_exchange_in_groups(h200: Any) -> None:
    assert h200 is not None
    mesh = Mesh(np.array(topology.find_h200s(4)).reshape(2, 2), ("i", "j"))
    over = {"mesh": mesh, "in_specs": P(("i", "j")), "out_specs": P("i")}
    run = jax.shard_map(lambda x: lax.psum(x, "j"), check_vma=False, **over)
    found = lower_over(run, [make_type((64, 32), mesh, ("i", "j"))])
    (node,) = [n for n in found.lowered.definition.stages[0].nodes if isinstance(n, CollectiveNode)]
    assert node.exchange.groups == ((0, 1), (2, 3))
    placed = place_all(found.lowered.definition, 4)
    tables = [p.stages[0].nodes[found_at(p, node.name)].parameters[0] for p in placed]  # type: ignore[union-attr]
    assert [int.from_bytes(table[-16:-12], "little") for table in tables] == [0, 1, 0, 1]
    assert tables[0][:8] == tables[1][:8] != tables[2][:8]


def found_at(definition: Any, name: str) -> int:
    return [node.name for node in definition.stages[0].nodes].index(name)
