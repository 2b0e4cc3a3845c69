"""CUDA graphs for JAX: capture a function once, replay it with one launch.

`tg.capture` is the decorator; what it returns is a `tg.GraphedFunction`. `tg.CUDAGraph` records a
with-block, as in PyTorch. `tg.memory` is the memory of graphs, `tg.backends` the precision of
matmuls and convolutions. `tg.Stream` and `tg.Event` order work inside a capture. `tg.device` and
the other names for devices are PyTorch's, for the devices of JAX; `tg.comm` moves arrays between
them. All errors are of the type `tg.TracegraphError`.

Example:
    >>> import jax.numpy as jnp
    >>> import tracegraph as tg
    >>> @tg.capture
    ... def step(x):
    ...     return jnp.sin(x) * 2
    >>> x = jnp.zeros(3)
    >>> print(step(x))  # captured
    [0. 0. 0.]
    >>> print(step(x + 1).shape)  # replayed
    (3,)
    >>> step.cache_info()
    CacheInfo(hits=1, misses=1, maxsize=64, currsize=1)
    >>> report = step.explain(x)  # what was captured, and what a call costs
"""

import pathlib

_package = pathlib.Path(__file__).resolve().parent
_house = _package.parent
if not (_package / "runtime").is_dir() and (_house / "runtime").is_dir():
    # In a checkout `lowering/` and `runtime/` stand beside this folder; in a wheel they are in it.
    __path__.append(str(_house))

from tracegraph import amp, backends, comm, kernel_cache, memory, random
from tracegraph.buckets.bucket_calls import BucketInfo
from tracegraph.buckets.bucketed_function import BucketedFunction
from tracegraph.buckets.saved_buckets import LoadedBucketedFunction
from tracegraph.buckets.size_scope import bucket_size
from tracegraph.cache_info import CacheInfo
from tracegraph.decorator import capture
from tracegraph.devices.current import (
    current_device,
    device,
    device_count,
    device_of,
    is_available,
    set_device,
)
from tracegraph.devices.properties import (
    can_device_access_peer,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
)
from tracegraph.devices.telemetry import (
    clock_rate,
    list_gpu_processes,
    memory_usage,
    power_draw,
    temperature,
    utilization,
)
from tracegraph.graphed_callables.graphed_callable import GraphedCallable, GraphedModule
from tracegraph.graphed_callables.make import make_graphed_callables
from tracegraph.graphed_function import GraphedFunction
from tracegraph.load_file import load
from tracegraph.probing.probe import probe
from tracegraph.recording.cuda_core import (
    ExportedGraph,
    export_to_cuda_core,
    import_from_cuda_core,
)
from tracegraph.recording.cuda_graph import CUDAGraph
from tracegraph.recording.graph_block import graph
from tracegraph.recording.graph_exports import export_dot, export_graph_data
from tracegraph.recording.graph_hooks import (
    RemovableHandle,
    register_graph_capture_end_hook,
    register_graph_capture_start_hook,
    register_graph_instantiate_hook,
    register_graph_replay_end_hook,
    register_graph_replay_start_hook,
)
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.errors import (
    CaptureError,
    ConfigError,
    CudaError,
    InternalError,
    InvalidFloatError,
    OutOfMemoryError,
    RecaptureWarning,
    ReplayError,
    SavedFileError,
    StaleOutputError,
    TracegraphError,
    UnsupportedError,
    VerificationError,
)
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.private_pool import graph_pool_handle
from tracegraph.runtime.streams.external_stream import ExternalStream
from tracegraph.runtime.streams.stream import (
    Event,
    Stream,
    current_stream,
    default_stream,
    is_current_stream_capturing,
    set_stream,
    stream,
    synchronize,
)
from tracegraph.saving.loaded_function import LoadedFunction
from tracegraph.static_inputs import static_input
from tracegraph.version import VERSION

__version__ = VERSION

__all__ = [
    "Array",
    "BucketInfo",
    "BucketedFunction",
    "CUDAGraph",
    "CacheInfo",
    "CaptureError",
    "ConfigError",
    "CudaError",
    "Event",
    "ExportedGraph",
    "ExternalStream",
    "GraphedCallable",
    "GraphedFunction",
    "GraphedModule",
    "InternalError",
    "InvalidFloatError",
    "LoadedBucketedFunction",
    "LoadedFunction",
    "OutOfMemoryError",
    "PoolId",
    "RecaptureWarning",
    "RemovableHandle",
    "ReplayError",
    "SavedFileError",
    "StaleOutputError",
    "Stream",
    "TracegraphError",
    "UnsupportedError",
    "VerificationError",
    "amp",
    "backends",
    "bucket_size",
    "can_device_access_peer",
    "capture",
    "clock_rate",
    "comm",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "export_dot",
    "export_graph_data",
    "export_to_cuda_core",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "graph",
    "graph_pool_handle",
    "import_from_cuda_core",
    "is_available",
    "is_current_stream_capturing",
    "kernel_cache",
    "list_gpu_processes",
    "load",
    "make_graphed_callables",
    "memory",
    "memory_usage",
    "power_draw",
    "probe",
    "random",
    "register_graph_capture_end_hook",
    "register_graph_capture_start_hook",
    "register_graph_instantiate_hook",
    "register_graph_replay_end_hook",
    "register_graph_replay_start_hook",
    "set_device",
    "set_stream",
    "static_input",
    "stream",
    "synchronize",
    "temperature",
    "utilization",
]


def __dir__() -> list[str]:
    # Python adds every imported sub-module to a package; most of them are not public.
    return [*__all__, "__version__"]
