"""Call frames: an FfiCall and addresses as the C structures that a handler reads.

A frame owns every structure that it points to, so it must live while the handler runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tracegraph.runtime.ffi import c_api
from tracegraph.runtime.ffi.c_api import AttrType, DataType
from tracegraph.runtime.ffi.call import (
    ArrayAttribute,
    ArrayType,
    CallAttribute,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)

_VALUES: dict[DataType, Any] = {
    DataType.PRED: ctypes.c_bool,
    DataType.S8: ctypes.c_int8,
    DataType.S16: ctypes.c_int16,
    DataType.S32: ctypes.c_int32,
    DataType.S64: ctypes.c_int64,
    DataType.U8: ctypes.c_uint8,
    DataType.U16: ctypes.c_uint16,
    DataType.U32: ctypes.c_uint32,
    DataType.U64: ctypes.c_uint64,
    DataType.F32: ctypes.c_float,
    DataType.F64: ctypes.c_double,
}


class Frame:
    """The call frame of one call, without its stage.

    Args:
        call: types and attributes.
        operands: address of each operand; 0 where there are none yet.
        results: address of each result.

    Attributes:
        call: as given.
        addresses: of the operands, then of the results.
        args, rets, attrs: as they are copied into XLA_FFI_CallFrame.
    """

    def __init__(self, call: FfiCall, operands: Sequence[int], results: Sequence[int]) -> None:
        self.call, self.addresses = call, (*operands, *results)
        self._kept: list[Any] = []
        types, args = self._pack_buffers(call.operands, operands)
        self.args = c_api.Args.new(size=len(operands), types=types, args=args)
        types, rets = self._pack_buffers(call.results, results)
        self.rets = c_api.Rets.new(size=len(results), types=types, rets=rets)
        self.attrs = self._pack_attributes(call.attributes)

    def _keep(self, made: Any) -> int:
        """Keeps a C object alive, and returns its address."""
        self._kept.append(made)
        return ctypes.addressof(made)

    def _pack_buffers(
        self, types: Sequence[ArrayType], addresses: Sequence[int]
    ) -> tuple[int, int]:
        """Returns the addresses of the list of kinds and of the list of buffers."""
        buffers = [
            self._keep(
                c_api.Buffer.new(
                    dtype=each.dtype,
                    data=address,
                    rank=len(each.dims),
                    dims=self._keep((ctypes.c_int64 * len(each.dims))(*each.dims)),
                )
            )
            for each, address in zip(types, addresses, strict=True)
        ]
        kinds = (ctypes.c_int * len(buffers))(*[c_api.BUFFER] * len(buffers))
        return self._keep(kinds), self._keep_pointers(buffers)

    def _keep_pointers(self, addresses: Sequence[int]) -> int:
        return self._keep((ctypes.c_void_p * len(addresses))(*addresses))

    def _pack_attributes(self, dictionary: DictionaryAttribute) -> Any:
        # Handlers look names up by halving.
        items = sorted(dictionary.items)
        packed = [self._pack_attribute(each) for _, each in items]
        return c_api.Attrs.new(
            size=len(items),
            types=self._keep((ctypes.c_int * len(items))(*[kind for kind, _ in packed])),
            names=self._keep_pointers([self._pack_text(name.encode()) for name, _ in items]),
            attrs=self._keep_pointers([address for _, address in packed]),
        )

    def _pack_text(self, text: bytes) -> int:
        characters = self._keep(ctypes.create_string_buffer(text, len(text) + 1))
        return self._keep(c_api.ByteSpan(characters, len(text)))

    def _pack_attribute(self, attribute: CallAttribute) -> tuple[AttrType, int]:
        if isinstance(attribute, bytes):
            return AttrType.STRING, self._pack_text(attribute)
        if isinstance(attribute, DictionaryAttribute):
            return AttrType.DICTIONARY, self._keep(self._pack_attributes(attribute))
        made = _VALUES[attribute.dtype]
        if isinstance(attribute, ScalarAttribute):
            value = self._keep(made(attribute.value))
            return AttrType.SCALAR, self._keep(c_api.Scalar(attribute.dtype, value))
        return AttrType.ARRAY, self._pack_array(attribute, made)

    def _pack_array(self, attribute: ArrayAttribute, made: Any) -> int:
        count = len(attribute.values)
        data = self._keep((made * count)(*attribute.values))
        return self._keep(c_api.Array(attribute.dtype, count, data))
