"""LentMemory: bytes at an address as an array that JAX takes by DLPack, and does not own.

Fields and numbers are those of ``dlpack.h``, without a version.
"""

from __future__ import annotations

import ctypes
from typing import Any

_CPU, _CUDA = 1, 2
_UNSIGNED = 1
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Record(ctypes.Structure):
    # What comes behind the deleter is ours.
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


# Library objects of their own: the types of the functions of `ctypes.pythonapi` are everybody's.
_PYTHON: Any = ctypes.PyDLL(None)
_PYTHON.PyCapsule_New.restype = ctypes.py_object
_PYTHON.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_C: Any = ctypes.CDLL(None)
_C.malloc.restype = ctypes.c_void_p
_C.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_C.free, ctypes.c_void_p)


class LentMemory:
    """Bytes of a device, for ``jax.dlpack.from_dlpack``: the array reads them where they are.

    Nothing is waited for: they are undefined, or there already.

    Args:
        address: of the first byte; must be valid for as long as the array lives.
        nbytes: how many.
        jax_device: that they are on; a CPU or a GPU.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> memory = np.arange(3, dtype=np.uint8)
        >>> lent = LentMemory(memory.ctypes.data, 3, jax.devices("cpu")[0])
        >>> print(jax.dlpack.from_dlpack(lent))
        [0 1 2]
    """

    def __init__(self, address: int, nbytes: int, jax_device: Any) -> None:
        self._address, self._nbytes = address, nbytes
        kind = _CUDA if jax_device.platform == "gpu" else _CPU
        self._device = kind, jax_device.local_hardware_id

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's kind of the device, and its number."""
        return self._device

    def __dlpack__(self, **_: object) -> Any:
        """Returns a capsule with the record of a new array, which the array frees."""
        # C frees it, for JAX may do so in a thread without Python.
        place = _C.malloc(ctypes.sizeof(_Record))
        record = _Record.from_address(place)
        record.count = self._nbytes
        shape = place + _Record.count.offset
        record.tensor = _Tensor(self._address, *self._device, 1, _UNSIGNED, 8, 1, shape, None, 0)
        record.context, record.deleter = None, _FREE
        return _PYTHON.PyCapsule_New(place, _NAME, None)
