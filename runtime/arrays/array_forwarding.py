"""The names that an `Array` forwards to its plain value."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.jax_interop import ArrayImpl

# Known from the abstract value, without reading.
AVAL_PROPERTIES = ("dtype", "ndim", "shape", "size", "weak_type")
OPERATORS = (
    *("__abs__", "__invert__", "__neg__", "__pos__", "__round__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__"),
    *("__mod__", "__rmod__", "__divmod__", "__rdivmod__", "__pow__", "__rpow__"),
    *("__matmul__", "__rmatmul__", "__and__", "__rand__", "__or__", "__ror__"),
    *("__xor__", "__rxor__", "__lshift__", "__rlshift__", "__rshift__", "__rrshift__"),
)
PROTOCOLS = (
    *("__getitem__", "__setitem__", "__contains__", "__iter__", "__reversed__"),
    *("__hex__", "__oct__", "__array_module__", "__array_namespace__"),
    *("__dlpack__", "__dlpack_device__"),
    *("__repr__", "__copy__", "__deepcopy__", "__reduce__"),
)
METHODS = (
    *("addressable_data", "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype"),
    *("byteswap", "choose", "clip", "clone", "compress", "conj", "conjugate", "copy"),
    *("cumprod", "cumsum", "diagonal", "dot", "flatten", "max", "mean", "min", "nonzero"),
    *("on_device_size_in_bytes", "platform", "prod", "ptp", "ravel", "repeat", "reshape"),
    *("round", "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take", "to_device"),
    *("tobytes", "trace", "transpose", "unsafe_buffer_pointer", "unsafe_raw_buffer", "var", "view"),
)
PROPERTIES = (
    *("T", "addressable_shards", "device_buffer", "device_buffers", "flat", "format"),
    *(
        "global_shards",
        "imag",
        "is_fully_addressable",
        "is_fully_replicated",
        "itemsize",
        "mT",
        "nbytes",
        "real",
        "traceback",
    ),
    "__cuda_array_interface__",
)
# What JAX itself calls on an array that it has not converted yet.
INTERNAL_METHODS = ("_chunk_iter", "_fully_replicated_shard", "_multi_slice", "_split", "_unstack")
INTERNAL_PROPERTIES = ("_arrays", "_npy_value", "_pjrt_layout", "_sharding", "_value")


def _to_array(host: Any, dtype: Any = None, context: Any = None, copy: Any = None) -> Any:
    """What `__array__` returns; ``context`` is of NumPy's older protocol, and JAX drops it too."""
    del context
    # NumPy before 2.0 takes no None.
    return np.asarray(host, dtype) if copy is None else np.asarray(host, dtype, copy=copy)


def _format(host: Any, spec: str) -> str:
    return format(host if host.ndim else host[()], spec)


# What JAX computes from the value on the host alone.
HOST_METHODS: dict[str, Callable[..., Any]] = {
    "__array__": _to_array,
    "__format__": _format,
    "__str__": str,
    "item": lambda host, *args: host.item(*args),
    "tolist": lambda host: host.tolist(),
}
# The same, of a scalar; JAX's own array says what else cannot be converted.
HOST_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__complex__": complex,
    "__float__": float,
    "__index__": operator.index,
    "__int__": int,
}


def forward_names(
    array_type: type, read: Callable[[Any], Any], read_host: Callable[[Any], Any]
) -> None:
    """Gives a type every name of the tables that JAX's own arrays have in this version of JAX.

    Args:
        array_type: gets the names.
        read: returns the plain array of an instance.
        read_host: returns its value on the host; None where the plain array has to be asked.
    """
    for name, compute in (HOST_METHODS | HOST_CONVERSIONS).items():
        forward = _forward_method(name, read)
        setattr(array_type, name, _compute_on_host(name, forward, read_host, compute))
    for name in AVAL_PROPERTIES:
        setattr(array_type, name, _forward_property(name, lambda array: array.aval))
    for name in OPERATORS + PROTOCOLS + METHODS + INTERNAL_METHODS:
        if hasattr(ArrayImpl, name):
            setattr(array_type, name, _forward_method(name, read))
    array_type.at = _forward_at(read)  # pyright: ignore[reportAttributeAccessIssue]
    for name in PROPERTIES + INTERNAL_PROPERTIES:
        if hasattr(ArrayImpl, name):
            setattr(array_type, name, _forward_property(name, read))


def _forward_method(name: str, read: Callable[[Any], Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = read(self)
        result = getattr(value, name)(*args, **kwargs)
        return result if result is not value else _keep_value(value)

    forward.__name__ = name
    forward.__qualname__ = f"Array.{name}"
    forward.__doc__ = getattr(ArrayImpl, name).__doc__
    return forward


def _compute_on_host(
    name: str,
    forward: Callable[..., Any],
    read_host: Callable[[Any], Any],
    compute: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns a method that computes from the value on the host, if it is to be had."""
    is_of_scalars = name in HOST_CONVERSIONS

    @functools.wraps(forward)
    def read_and_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_of_scalars and (self.shape or (name == "__index__" and self.dtype.kind not in "iu")):
            return forward(self, *args, **kwargs)
        host = read_host(self)
        return forward(self, *args, **kwargs) if host is None else compute(host, *args, **kwargs)

    return read_and_compute


def _forward_property(name: str, read: Callable[[Any], Any]) -> property:
    def forward(self: Any) -> Any:
        value = read(self)
        result = getattr(value, name)
        return result if result is not value else _keep_value(value)

    return property(forward, doc=getattr(ArrayImpl, name).__doc__)


def _keep_value(value: Any) -> Any:
    """Returns a value that a method left as it was; in a block that is recorded, as an array."""
    recorder = recorder_state.recorder
    return value if recorder is None else recorder.show_value(value)


def _forward_at(read: Callable[[Any], Any]) -> property:
    """Returns the property ``at``; its functions may return the array that they are called on."""

    def forward(self: Any) -> Any:
        value = read(self)
        recorder = recorder_state.recorder
        return value.at if recorder is None else type(value.at)(recorder.show_value(value))

    return property(forward, doc=ArrayImpl.at.__doc__)
