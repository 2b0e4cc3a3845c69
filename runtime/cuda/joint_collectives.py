"""Joint collectives: what GPUs of several processes exchange between two graphs, by XLA.

Each GPU's bytes are copied out of its arena into an array of JAX, one program of XLA runs on the
GPUs of all processes, and what it returns is copied back. All of it is enqueued: the host waits for
nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_together
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind,
    CollectiveNode,
    Exchange,
    JointCollectiveNode,
)
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.jax_interop import (
    ArrayImpl,
    computing,
    get_quick_call,
    join_parts,
    list_parts,
    make_aval,
)

_get_pointer = ArrayImpl.unsafe_buffer_pointer
_DTYPES = {
    **{"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": jnp.float64},
    **{f"S{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
_FOLDS: dict[str, Callable[[Any], Any]] = {
    "MIN": lambda parts: jnp.min(parts, axis=0),
    "MAX": lambda parts: jnp.max(parts, axis=0),
    "PRODUCT": lambda parts: jnp.prod(parts, axis=0, dtype=parts.dtype),
}
_REDUCERS: dict[str, Any] = {"SUM": lax.psum, "MIN": lax.pmin, "MAX": lax.pmax}
_AXIS = "gpus"


class JointStage:
    """The eager stage of a joint collective, see Note [Joint collectives].

    Args:
        node: the only node of the stage.
        jax_devices: all GPUs of the capture, in the order of their numbers.
        contexts: of the GPUs of this process, by their numbers.
        locate: the address of a byte range on one of these, by its number.

    Attributes:
        launch: enqueues it.
    """

    handles = None

    def __init__(
        self,
        node: JointCollectiveNode,
        jax_devices: Sequence[Any],
        contexts: Mapping[int, CudaContext],
        locate: Callable[[int, BufferUse], int],
    ) -> None:
        exchanges = tuple(member.exchange for member in node.members)
        call, sharding = _compile(exchanges, tuple(jax_devices))
        owned = [_OwnPart(each, number, locate, node.members) for number, each in contexts.items()]
        wholes = [_make_aval(each, len(jax_devices)) for each in exchanges]

        def launch() -> None:
            columns = zip(*(part.read() for part in owned), strict=True)
            pairs = zip(wholes, columns, strict=True)
            given = [join_parts(aval, sharding, parts) for aval, parts in pairs]
            results = [{each.device: each for each in list_parts(r)} for r in call(*given)]
            for part in owned:
                part.write([result[part.device] for result in results])

        self.launch = launch


class _OwnPart:
    """The bytes of one GPU of this process.

    Args:
        context: of the GPU.
        number: of the GPU.
        locate: as of `JointStage`.
        members: of the joint collective.
    """

    def __init__(
        self,
        context: CudaContext,
        number: int,
        locate: Callable[[int, BufferUse], int],
        members: Sequence[CollectiveNode],
    ) -> None:
        self._context, self.device = context, context.jax_device
        self._avals = [_make_aval(each.exchange, 1) for each in members]
        self._sources = [(locate(number, each.source), each.source.nbytes) for each in members]
        self._targets = [(locate(number, each.target), each.target.nbytes) for each in members]

    def read(self) -> list[Any]:
        """Returns the sources as arrays, for work on the same stream only."""
        arrays = allocate_together(self._avals, self.device)
        for array, (address, nbytes) in zip(arrays, self._sources, strict=True):
            self._context.copy(_get_pointer(array), address, nbytes)
        return arrays

    def write(self, results: Sequence[Any]) -> None:
        """Copies results into the targets."""
        for array, (address, nbytes) in zip(results, self._targets, strict=True):
            self._context.copy_array(array, address, nbytes)


def _make_aval(exchange: Exchange, gpus: int) -> Any:
    """Returns the abstract value of the sources of so many GPUs, one behind the other."""
    return make_aval((exchange.count * gpus,), _DTYPES[exchange.dtype])


@functools.lru_cache(maxsize=64)
def _compile(
    exchanges: tuple[Exchange, ...], jax_devices: tuple[Any, ...]
) -> tuple[Callable[..., Any], NamedSharding]:
    """Returns a compiled program of all GPUs, and the sharding of its arguments."""
    mesh, spec = Mesh(np.array(jax_devices), (_AXIS,)), PartitionSpec(_AXIS)
    sharding = NamedSharding(mesh, spec)
    avals = [_make_aval(each, len(jax_devices)) for each in exchanges]
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in avals]

    def run(*sources: Any) -> tuple[Any, ...]:
        return tuple(_exchange(each, x) for each, x in zip(exchanges, sources, strict=True))

    with computing(), jax.enable_x64(True), warnings.catch_warnings():
        # Of sources that have another size than their targets.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        function = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        lowered = jax.jit(function, donate_argnums=range(len(exchanges))).lower(*types)
        return get_quick_call(lowered.compile()), sharding


def _exchange(exchange: Exchange, x: Any) -> Any:
    """Does what one GPU does of a collective."""
    kind, reduction = exchange.kind, exchange.reduction
    if kind is CollectiveKind.PERMUTE:
        return lax.ppermute(x, _AXIS, exchange.pairs)
    groups = exchange.groups if len(exchange.groups) > 1 else None
    if kind is CollectiveKind.ALL_REDUCE and reduction in _REDUCERS:
        return _REDUCERS[reduction](x, _AXIS, axis_index_groups=groups)
    if kind is CollectiveKind.REDUCE_SCATTER and reduction == "SUM":
        return lax.psum_scatter(x, _AXIS, axis_index_groups=groups, tiled=True)
    if kind is CollectiveKind.ALL_GATHER:
        return lax.all_gather(x, _AXIS, axis_index_groups=groups, tiled=True)
    if kind is CollectiveKind.ALL_REDUCE:
        return _FOLDS[reduction](lax.all_gather(x, _AXIS, axis_index_groups=groups))
    split = lax.all_to_all(x, _AXIS, 0, 0, axis_index_groups=groups, tiled=True)
    if kind is CollectiveKind.ALL_TO_ALL:
        return split
    return _FOLDS[reduction](split.reshape(len(exchange.find_group(0)), -1))
