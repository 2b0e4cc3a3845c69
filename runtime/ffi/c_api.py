"""The C structures of XLA's foreign function interface, as ``xla/ffi/api/c_api.h`` declares them.

Note [Versions of the interface]
    Minor versions only add: fields at the end of a structure, functions at the end of the table.
    So the structures here are those of `NEWEST`, and a handler that was compiled against an older
    version finds in them what it knows. What is written into a structure of the handler's is
    bounded by its ``struct_size``. A handler of a newer version may look for what is not here, and
    one of another major version finds other things: both are refused before they are called. XLA
    refuses what is too old for it when the handler is registered. Three names have changed, and
    nothing else: ``Error_GetMessage`` is ``Error_GetDetails``, ``ExecutionContext`` is
    ``InvokeContext``, ``Extension_Base`` is ``InternalExtension``.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any, ClassVar

MAJOR = 0
NEWEST = 5

COMMAND_BUFFER_COMPATIBLE = 1
EXTENSION_METADATA = 1
BUFFER = 1


class ErrorCode(enum.IntEnum):
    """XLA_FFI_Error_Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class DataType(enum.IntEnum):
    """XLA_FFI_DataType: the names and numbers of XLA's element types."""

    INVALID = 0
    PRED = 1
    S1 = 30
    S2 = 26
    S4 = 21
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U1 = 31
    U2 = 27
    U4 = 22
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    BF16 = 16
    C64 = 15
    C128 = 18
    TOKEN = 17
    F8E5M2 = 19
    F8E3M4 = 29
    F8E4M3 = 28
    F8E4M3FN = 20
    F8E4M3B11FNUZ = 23
    F8E5M2FNUZ = 24
    F8E4M3FNUZ = 25
    F4E2M1FN = 32
    F8E8M0FNU = 33


class AttrType(enum.IntEnum):
    """XLA_FFI_AttrType."""

    ARRAY = 1
    DICTIONARY = 2
    SCALAR = 3
    STRING = 4


class ExecutionStage(enum.IntEnum):
    """XLA_FFI_ExecutionStage."""

    INSTANTIATE = 0
    PREPARE = 1
    INITIALIZE = 2
    EXECUTE = 3
    RECORD = 4


_pointer, _size, _int, _long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_HEAD: list[tuple[str, Any]] = [("struct_size", _size), ("extension_start", _pointer)]
_CONTEXT: list[tuple[str, Any]] = [*_HEAD, ("ctx", _pointer)]


class Sized(ctypes.Structure):
    """A structure that begins with its own size."""

    LAST: ClassVar[str] = ""

    @classmethod
    def full_size(cls) -> int:
        """Returns the size that XLA writes into it: up to the end of its last counted field."""
        field = getattr(cls, cls.LAST or cls._fields_[-1][0])
        return field.offset + field.size

    @classmethod
    def new(cls, **fields: Any) -> Any:
        """Returns a structure with its size set, and with these fields."""
        made: Any = cls(**fields)
        made.struct_size = cls.full_size()
        return made


class InternalExtension(Sized):
    """What may be hung on to a structure."""

    _fields_ = [("struct_size", _size), ("type", _int), ("next", _pointer)]


class ApiVersion(Sized):
    """XLA_FFI_Api_Version."""

    _fields_ = [*_HEAD, ("major_version", _int), ("minor_version", _int)]


class ErrorCreateArgs(Sized):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [*_HEAD, ("message", ctypes.c_char_p), ("errc", _int)]


class ErrorGetDetailsArgs(Sized):
    """XLA_FFI_Error_GetDetails_Args; before 0.4 without the code."""

    _fields_ = [*_HEAD, ("error", _pointer), ("message", _pointer), ("errc", _int)]


class ErrorDestroyArgs(Sized):
    """XLA_FFI_Error_Destroy_Args."""

    _fields_ = [*_HEAD, ("error", _pointer)]


class Buffer(Sized):
    """XLA_FFI_Buffer."""

    _fields_ = [*_HEAD, ("dtype", _int), ("data", _pointer), ("rank", _long), ("dims", _pointer)]


class ByteSpan(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("ptr", _pointer), ("len", _size)]


class Scalar(ctypes.Structure):
    """XLA_FFI_Scalar."""

    _fields_ = [("dtype", _int), ("value", _pointer)]


class Array(ctypes.Structure):
    """XLA_FFI_Array."""

    _fields_ = [("dtype", _int), ("size", _size), ("data", _pointer)]


class TypeId(ctypes.Structure):
    """XLA_FFI_TypeId."""

    _fields_ = [("type_id", _long)]


class TypeInfo(Sized):
    """XLA_FFI_TypeInfo."""

    _fields_ = [*_HEAD, ("deleter", _pointer)]


_type_id, _type_info = ctypes.POINTER(TypeId), ctypes.POINTER(TypeInfo)


class FutureCreateArgs(Sized):
    """XLA_FFI_Future_Create_Args; the future itself is not counted in its size."""

    LAST = "extension_start"
    _fields_ = [*_HEAD, ("future", _pointer)]


class FutureSetAvailableArgs(Sized):
    """XLA_FFI_Future_SetAvailable_Args."""

    _fields_ = [*_HEAD, ("future", _pointer)]


class FutureSetErrorArgs(Sized):
    """XLA_FFI_Future_SetError_Args."""

    _fields_ = [*_HEAD, ("future", _pointer), ("error", _pointer)]


class Args(Sized):
    """XLA_FFI_Args."""

    _fields_ = [*_HEAD, ("size", _long), ("types", _pointer), ("args", _pointer)]


class Rets(Sized):
    """XLA_FFI_Rets."""

    _fields_ = [*_HEAD, ("size", _long), ("types", _pointer), ("rets", _pointer)]


class Attrs(Sized):
    """XLA_FFI_Attrs."""

    _fields_ = [
        *_HEAD,
        ("size", _long),
        ("types", _pointer),
        ("names", _pointer),
        ("attrs", _pointer),
    ]


class CallFrame(Sized):
    """XLA_FFI_CallFrame; the future is not counted in its size."""

    LAST = "attrs"
    _fields_ = [
        *_HEAD,
        ("api", _pointer),
        ("ctx", _pointer),
        ("stage", _int),
        ("args", Args),
        ("rets", Rets),
        ("attrs", Attrs),
        ("future", _pointer),
    ]


class TypeRegisterArgs(Sized):
    """XLA_FFI_Type_Register_Args; what deletes one is not counted in its size."""

    LAST = "type_id"
    _fields_ = [*_HEAD, ("name", ByteSpan), ("type_id", _type_id), ("type_info", _type_info)]


class InvokeContextFindExtensionArgs(Sized):
    """XLA_FFI_InvokeContext_FindExtension_Args."""

    _fields_ = [*_CONTEXT, ("extension_type", _long), ("extension", _pointer)]


class InvokeContextGetArgs(Sized):
    """XLA_FFI_InvokeContext_Get_Args."""

    _fields_ = [*_CONTEXT, ("type_id", _type_id), ("data", _pointer)]


class CustomOptionsGetArgs(Sized):
    """XLA_FFI_CustomOptions_Get_Args."""

    _fields_ = [*_CONTEXT, ("attrs", _pointer)]


class StateSetArgs(Sized):
    """XLA_FFI_State_Set_Args."""

    _fields_ = [*_CONTEXT, ("stage", _int), ("type_id", _type_id), ("state", _pointer)]


class StateGetArgs(Sized):
    """XLA_FFI_State_Get_Args."""

    _fields_ = StateSetArgs._fields_


class StreamGetArgs(Sized):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = [*_CONTEXT, ("stream", _pointer)]


class DeviceMemoryAllocateArgs(Sized):
    """XLA_FFI_DeviceMemory_Allocate_Args."""

    _fields_ = [*_CONTEXT, ("size", _size), ("alignment", _size), ("data", _pointer)]


class DeviceMemoryFreeArgs(Sized):
    """XLA_FFI_DeviceMemory_Free_Args."""

    _fields_ = [*_CONTEXT, ("size", _size), ("data", _pointer)]


class ThreadPoolScheduleArgs(Sized):
    """XLA_FFI_ThreadPool_Schedule_Args."""

    _fields_ = [*_CONTEXT, ("task", _pointer), ("data", _pointer)]


class ThreadPoolNumThreadsArgs(Sized):
    """XLA_FFI_ThreadPool_NumThreads_Args."""

    _fields_ = [*_CONTEXT, ("num_threads", ctypes.POINTER(_long))]


class RunIdGetArgs(Sized):
    """XLA_FFI_RunId_Get_Args."""

    _fields_ = [*_CONTEXT, ("run_id", _long)]


class DeviceOrdinalGetArgs(Sized):
    """XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = [*_CONTEXT, ("device_ordinal", ctypes.c_int32)]


class Metadata(Sized):
    """XLA_FFI_Metadata; the type of the state came later and is not counted in its size."""

    LAST = "traits"
    _fields_ = [
        ("struct_size", _size),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
        ("state_type_id", TypeId),
    ]


class MetadataExtension(Sized):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("extension_base", InternalExtension), ("metadata", ctypes.POINTER(Metadata))]


# The functions of the table in their order, with the structure that each takes.
FUNCTIONS: tuple[tuple[str, type[Sized] | None], ...] = (
    ("Error_Create", ErrorCreateArgs),
    ("Error_GetDetails", ErrorGetDetailsArgs),
    ("Error_Destroy", ErrorDestroyArgs),
    ("Handler_Register", None),
    ("Stream_Get", StreamGetArgs),
    ("Type_Register", TypeRegisterArgs),
    ("InvokeContext_Get", InvokeContextGetArgs),
    ("State_Set", StateSetArgs),
    ("State_Get", StateGetArgs),
    ("DeviceMemory_Allocate", DeviceMemoryAllocateArgs),
    ("DeviceMemory_Free", DeviceMemoryFreeArgs),
    ("ThreadPool_Schedule", ThreadPoolScheduleArgs),
    ("ThreadPool_NumThreads", ThreadPoolNumThreadsArgs),
    ("Future_Create", FutureCreateArgs),
    ("Future_SetAvailable", FutureSetAvailableArgs),
    ("Future_SetError", FutureSetErrorArgs),
    ("RunId_Get", RunIdGetArgs),
    ("DeviceOrdinal_Get", DeviceOrdinalGetArgs),
    ("InvokeContext_FindExtension", InvokeContextFindExtensionArgs),
    ("CustomOptions_Get", CustomOptionsGetArgs),
)


class Api(Sized):
    """XLA_FFI_Api."""

    _fields_ = [
        *_HEAD,
        ("api_version", ApiVersion),
        ("internal_api", _pointer),
        *((name, _pointer) for name, _ in FUNCTIONS),
    ]


# Every function of the table takes the address of a structure and returns that of an error, or 0;
# the two that return nothing are called the same way.
FUNCTION = ctypes.CFUNCTYPE(_pointer, _pointer)
# A handler, from the address of a call frame.
HANDLER = ctypes.CFUNCTYPE(_pointer, _pointer)
# Takes the address of what it deletes, or of a task's data.
ROUTINE = ctypes.CFUNCTYPE(None, _pointer)
