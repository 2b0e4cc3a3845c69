"""CUDA graphs for JAX: capture a function once, replay it with one launch."""

from __future__ import annotations

import pathlib

_package = pathlib.Path(__file__).resolve().parent
_house = _package.parent
if not (_package / "runtime").is_dir() and (_house / "runtime").is_dir():
    # In a checkout `lowering/` and `runtime/` stand beside this folder; in a wheel they are in it.
    __path__.append(str(_house))

from tracegraph import memory as memory
from tracegraph.decorator import capture as capture
from tracegraph.graphed_function import CacheInfo as CacheInfo
from tracegraph.graphed_function import GraphedFunction as GraphedFunction
from tracegraph.runtime.array import Array as Array
from tracegraph.runtime.errors import CaptureError as CaptureError
from tracegraph.runtime.errors import ConfigError as ConfigError
from tracegraph.runtime.errors import CudaError as CudaError
from tracegraph.runtime.errors import OutOfMemoryError as OutOfMemoryError
from tracegraph.runtime.errors import ReplayError as ReplayError
from tracegraph.runtime.errors import StaleOutputError as StaleOutputError
from tracegraph.runtime.errors import TracegraphError as TracegraphError
from tracegraph.runtime.errors import UnsupportedError as UnsupportedError
from tracegraph.runtime.errors import VerificationError as VerificationError
from tracegraph.runtime.memory.pool_id import PoolId as PoolId
from tracegraph.runtime.memory.private_pool import graph_pool_handle as graph_pool_handle
from tracegraph.runtime.stream import Event as Event
from tracegraph.runtime.stream import Stream as Stream
from tracegraph.runtime.stream import current_stream as current_stream
from tracegraph.runtime.stream import default_stream as default_stream
from tracegraph.runtime.stream import set_stream as set_stream
from tracegraph.runtime.stream import stream as stream
from tracegraph.runtime.stream import synchronize as synchronize

__version__ = "0.1.0"
