"""The C interface of cuDNN's graphs: descriptors, their attributes, and execution.

Its functions and numbers are public and versioned, in the header ``cudnn_graph.h``: numbers are
never used again, and a library that does not know one answers with an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.runtime.errors import CudaError

MESSAGE_BYTES = 512


class Kind(enum.IntEnum):
    """cudnnBackendDescriptorType_t."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17


class ValueType(enum.IntEnum):
    """cudnnBackendAttributeType_t."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    BACKEND_DESCRIPTOR = 15
    CHAR = 24


C_TYPES: Mapping[ValueType, Any] = {
    ValueType.HANDLE: ctypes.c_void_p,
    ValueType.BOOLEAN: ctypes.c_bool,
    ValueType.INT64: ctypes.c_int64,
    ValueType.FLOAT: ctypes.c_float,
    ValueType.DOUBLE: ctypes.c_double,
    ValueType.VOID_PTR: ctypes.c_void_p,
    ValueType.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    ValueType.CHAR: ctypes.c_char,
}


class Attribute(enum.Enum):
    """cudnnBackendAttributeName_t, each with the type of its values.

    Attributes:
        number: that of the header.
        value_type: of each of its values.
    """

    def __init__(self, number: int, value_type: ValueType) -> None:
        # A plan sets fifty: what is looked up in an enum takes as long as cuDNN.
        self.number, self.value_type = number, value_type

    POINTWISE_MODE = 0, ValueType.POINTWISE_MODE
    POINTWISE_MATH_PREC = 1, ValueType.DATA_TYPE
    POINTWISE_RELU_UPPER_CLIP = 4, ValueType.DOUBLE
    POINTWISE_RELU_LOWER_CLIP_SLOPE = 5, ValueType.DOUBLE
    CONVOLUTION_COMP_TYPE = 100, ValueType.DATA_TYPE
    CONVOLUTION_CONV_MODE = 101, ValueType.CONVOLUTION_MODE
    CONVOLUTION_DILATIONS = 102, ValueType.INT64
    CONVOLUTION_FILTER_STRIDES = 103, ValueType.INT64
    CONVOLUTION_POST_PADDINGS = 104, ValueType.INT64
    CONVOLUTION_PRE_PADDINGS = 105, ValueType.INT64
    CONVOLUTION_SPATIAL_DIMS = 106, ValueType.INT64
    ENGINEHEUR_MODE = 200, ValueType.HEUR_MODE
    ENGINEHEUR_OPERATION_GRAPH = 201, ValueType.BACKEND_DESCRIPTOR
    ENGINEHEUR_RESULTS = 202, ValueType.BACKEND_DESCRIPTOR
    ENGINECFG_ENGINE = 300, ValueType.BACKEND_DESCRIPTOR
    ENGINECFG_KNOB_CHOICES = 302, ValueType.BACKEND_DESCRIPTOR
    EXECUTION_PLAN_HANDLE = 400, ValueType.HANDLE
    EXECUTION_PLAN_ENGINE_CONFIG = 401, ValueType.BACKEND_DESCRIPTOR
    EXECUTION_PLAN_WORKSPACE_SIZE = 402, ValueType.INT64
    EXECUTION_PLAN_JSON_REPRESENTATION = 405, ValueType.CHAR
    KNOB_CHOICE_KNOB_TYPE = 600, ValueType.KNOB_TYPE
    KNOB_CHOICE_KNOB_VALUE = 601, ValueType.INT64
    OPERATION_CONVOLUTION_FORWARD_ALPHA = 700, ValueType.FLOAT
    OPERATION_CONVOLUTION_FORWARD_BETA = 701, ValueType.FLOAT
    OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_FORWARD_W = 703, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_FORWARD_X = 704, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_FORWARD_Y = 705, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706, ValueType.FLOAT
    OPERATION_CONVOLUTION_BWD_DATA_BETA = 707, ValueType.FLOAT
    OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_DATA_W = 709, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_DATA_DX = 710, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_DATA_DY = 711, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712, ValueType.FLOAT
    OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713, ValueType.FLOAT
    OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_FILTER_DW = 715, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_FILTER_X = 716, ValueType.BACKEND_DESCRIPTOR
    OPERATION_CONVOLUTION_BWD_FILTER_DY = 717, ValueType.BACKEND_DESCRIPTOR
    OPERATION_POINTWISE_PW_DESCRIPTOR = 750, ValueType.BACKEND_DESCRIPTOR
    OPERATION_POINTWISE_XDESC = 751, ValueType.BACKEND_DESCRIPTOR
    OPERATION_POINTWISE_BDESC = 752, ValueType.BACKEND_DESCRIPTOR
    OPERATION_POINTWISE_YDESC = 753, ValueType.BACKEND_DESCRIPTOR
    OPERATION_POINTWISE_ALPHA1 = 754, ValueType.FLOAT
    OPERATION_POINTWISE_ALPHA2 = 755, ValueType.FLOAT
    OPERATIONGRAPH_HANDLE = 800, ValueType.HANDLE
    OPERATIONGRAPH_OPS = 801, ValueType.BACKEND_DESCRIPTOR
    TENSOR_BYTE_ALIGNMENT = 900, ValueType.INT64
    TENSOR_DATA_TYPE = 901, ValueType.DATA_TYPE
    TENSOR_DIMENSIONS = 902, ValueType.INT64
    TENSOR_STRIDES = 903, ValueType.INT64
    TENSOR_UNIQUE_ID = 906, ValueType.INT64
    TENSOR_IS_VIRTUAL = 907, ValueType.BOOLEAN
    VARIANT_PACK_UNIQUE_IDS = 1000, ValueType.INT64
    VARIANT_PACK_DATA_POINTERS = 1001, ValueType.VOID_PTR
    VARIANT_PACK_WORKSPACE = 1003, ValueType.VOID_PTR
    ENGINE_OPERATION_GRAPH = 1300, ValueType.BACKEND_DESCRIPTOR
    ENGINE_GLOBAL_INDEX = 1301, ValueType.INT64
    ENGINE_NUMERICAL_NOTE = 1303, ValueType.NUMERICAL_NOTE


# One value, or several of one attribute; text as bytes. Factors may be of either precision.
Values: TypeAlias = int | float | ctypes.c_double | bytes | Sequence[int] | None


class CudnnError(Exception):
    """A call of cuDNN that failed; its text names the call, the status, and cuDNN's reason."""


class CudnnBackend:
    """cuDNN's functions, with errors in place of statuses.

    Args:
        library: the loaded one, as `ctypes.CDLL`.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        pointer, number = ctypes.c_void_p, ctypes.c_int
        signatures = {
            "cudnnCreate": (pointer,),
            "cudnnDestroy": (pointer,),
            "cudnnSetStream": (pointer, pointer),
            "cudnnBackendCreateDescriptor": (number, pointer),
            "cudnnBackendDestroyDescriptor": (pointer,),
            "cudnnBackendFinalize": (pointer,),
            "cudnnBackendSetAttribute": (pointer, number, number, ctypes.c_int64, pointer),
            "cudnnBackendGetAttribute": (
                *(pointer, number, number, ctypes.c_int64, pointer, pointer),
            ),
            "cudnnBackendExecute": (pointer, pointer, pointer),
            "cudnnGetErrorString": (number,),
            "cudnnGetLastErrorString": (pointer, ctypes.c_size_t),
            "cudnnGetVersion": (),
        }
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, number
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        library.cudnnGetLastErrorString.restype = None
        library.cudnnGetVersion.restype = ctypes.c_size_t

    def read_version(self) -> str:
        """Returns the library's version, as ``9.10.2``."""
        version = self._library.cudnnGetVersion()
        return f"{version // 10_000}.{version % 10_000 // 100}.{version % 100}"

    def create_handle(self) -> int:
        """Returns a handle for the current context."""
        handle = ctypes.c_void_p()
        self._call("cudnnCreate", ctypes.byref(handle))
        return handle.value or 0

    def destroy_handle(self, handle: int) -> None:
        """Destroys a handle; waits for the GPU."""
        self._call("cudnnDestroy", handle)

    def set_stream(self, handle: int, stream: int) -> None:
        """Lets what is executed with the handle be enqueued on a stream."""
        self._call("cudnnSetStream", handle, stream)

    def make(self, kind: Kind, values: Mapping[Attribute, Values]) -> int:
        """Returns a finalized descriptor; attributes with the value None are not set.

        Raises:
            CudnnError: cuDNN refuses a value, or the whole.
        """
        present = [(attribute, value) for attribute, value in values.items() if value is not None]
        with self.open_descriptor(kind) as descriptor:
            for attribute, value in present:
                self._set(descriptor, attribute, value)
            self._call("cudnnBackendFinalize", descriptor, shown=kind)
        return descriptor

    @contextlib.contextmanager
    def open_descriptor(self, kind: Kind) -> Iterator[int]:
        """Yields an empty descriptor, which is destroyed when the block fails."""
        made = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", kind, ctypes.byref(made))
        descriptor = made.value or 0
        try:
            yield descriptor
        except BaseException:
            self.destroy(descriptor)
            raise

    def destroy(self, descriptor: int) -> None:
        """Destroys a descriptor."""
        self._library.cudnnBackendDestroyDescriptor(descriptor)

    def read_numbers(self, descriptor: int, attribute: Attribute, limit: int = 1) -> list[int]:
        """Returns the values of an attribute, at most `limit` of them."""
        found = (_find_c_type(attribute) * limit)()
        return [int(value) for value in found[: self._get(descriptor, attribute, limit, found)]]

    def count_values(self, descriptor: int, attribute: Attribute) -> int:
        """Returns how many values an attribute has."""
        return self._get(descriptor, attribute, 0, None)

    def read_descriptors(
        self, descriptor: int, attribute: Attribute, made: Sequence[int]
    ) -> list[int]:
        """Writes the values of an attribute into descriptors made for it; returns those written."""
        found = (ctypes.c_void_p * len(made))(*made)
        return list(made[: self._get(descriptor, attribute, len(made), found)])

    def execute(self, handle: int, plan: int, pack: int) -> None:
        """Enqueues a plan on the handle's stream, with the addresses in a variant pack."""
        self._call("cudnnBackendExecute", handle, plan, pack)

    def forget_messages(self) -> None:
        """Lets the text of the next error be of nothing that went wrong before."""
        self._take_messages()

    def _take_messages(self) -> str:
        text = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._library.cudnnGetLastErrorString(text, MESSAGE_BYTES)
        return text.value.decode(errors="replace")

    def _set(self, descriptor: int, attribute: Attribute, value: Any) -> None:
        value_type, count = attribute.value_type, 1
        if isinstance(value, bytes):
            array, count = ctypes.create_string_buffer(value, len(value)), len(value)
        elif isinstance(value, ctypes.c_double):
            value_type, array = ValueType.DOUBLE, ctypes.byref(value)
        else:
            values = value if isinstance(value, Sequence) else (value,)
            array, count = (_find_c_type(attribute) * len(values))(*values), len(values)
        arguments = descriptor, attribute.number, value_type, count, array
        self._call("cudnnBackendSetAttribute", *arguments, shown=attribute)

    def _get(self, descriptor: int, attribute: Attribute, limit: int, array: Any) -> int:
        count = ctypes.c_int64()
        arguments = descriptor, attribute.number, attribute.value_type, limit
        found = ctypes.byref(count), array
        self._call("cudnnBackendGetAttribute", *arguments, *found, shown=attribute)
        return min(count.value, limit) if limit else count.value

    def _call(self, name: str, *arguments: Any, shown: enum.Enum | None = None) -> None:
        """Calls a function; an error shows what it was called for."""
        status = getattr(self._library, name)(*arguments)
        if not status:
            return
        call = name if shown is None else f"{name}({shown.name})"
        reason = " ".join(self._take_messages().split())
        text = self._library.cudnnGetErrorString(status).decode()
        raise CudnnError(f"{call} returned {text}" + (f": {reason}" if reason else ""))


def _find_c_type(attribute: Attribute) -> Any:
    """Returns the C type of an attribute's values; enumerations are ints."""
    return C_TYPES.get(attribute.value_type, ctypes.c_int)


def make_cudnn_error(what: str, place: str, error: CudnnError) -> CudaError:
    """Returns the error that a call of cuDNN failed where it could not be foreseen."""
    return CudaError(
        what,
        where=f"{place}: {error}",
        why="cuDNN refused the call, or it could not be loaded",
        fix="check the driver and the CUDA wheels; if they are right, report this text",
        anchor="cuda",
    )
