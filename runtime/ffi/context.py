"""What handlers may ask for while they run, and the table of functions that they ask with.

Contexts, errors and futures are numbers to a handler. The functions look them up here, so that no C
structure holds a Python object. What a handler asks for and may not have (collectives, data of
users, functions of XLA's own) is an error of the interface with a message, which the handler
returns as its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tracegraph.runtime.ffi import c_api
from tracegraph.runtime.ffi.c_api import ErrorCode, ExecutionStage
from tracegraph.runtime.ffi.states import States

FUTURE_LIMIT_S = 60.0
# XLA refuses handlers more, on every platform; ours must not run in a graph and fail under jit.
MAX_ALIGNMENT = 16


class HandlerScratch(Protocol):
    """Memory for temporaries of handlers."""

    def allocate(self, nbytes: int) -> int:
        """Returns an address, aligned to MAX_ALIGNMENT, that no other call's work uses with it."""
        ...

    def free(self, address: int) -> None:
        """Is called when the handler needs the memory no more for what it enqueues next."""
        ...


class InterfaceError(Exception):
    """An error of the interface, with its code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code.name}: {message}")


class CallContext:
    """What one handler may ask for.

    Args:
        states: what its earlier stages have left.
        stream: handle of the stream to enqueue on; 0 where there is none.
        scratch: memory; None where there is none.
        ordinal: number of the device.

    Attributes:
        failure: what a function raised, so that it is not lost in the handler's own error.
    """

    def __init__(
        self,
        states: States,
        stream: int = 0,
        scratch: HandlerScratch | None = None,
        ordinal: int = -1,
    ) -> None:
        self.states, self.stream, self.scratch = states, stream, scratch
        self.ordinal = ordinal
        self.failure: BaseException | None = None


_numbers = itertools.count(1)
_contexts: dict[int, CallContext] = {}
_errors: dict[int, tuple[ErrorCode, Any]] = {}
_futures: dict[int, Future] = {}
_types: dict[bytes, int] = {}
# Far from the numbers that XLA counts up.
_type_numbers = itertools.count(1 << 40)


class Future:
    """What a handler completes later, from any thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error = 0

    def complete(self, error: int = 0) -> None:
        """Completes it; an error is what `make_interface_error` takes."""
        self._error = error
        self._done.set()

    def wait(self) -> int:
        """Returns the error that it was completed with, or 0, after it was."""
        if not self._done.wait(FUTURE_LIMIT_S):
            return make_error(ErrorCode.DEADLINE_EXCEEDED, "its future was not completed")
        return self._error


@contextmanager
def lend_context(context: CallContext) -> Iterator[int]:
    """Yields the number by which a handler knows a context."""
    number = next(_numbers)
    _contexts[number] = context
    try:
        yield number
    finally:
        del _contexts[number]


def make_error(code: ErrorCode, message: str) -> int:
    """Returns the number of a new error."""
    number = next(_numbers)
    _errors[number] = code, ctypes.create_string_buffer(message.encode())
    return number


def make_interface_error(number: int) -> InterfaceError:
    """Returns the error of a number, and forgets it."""
    code, text = _errors.pop(number)
    return InterfaceError(code, text.value.decode(errors="replace"))


def forget_error(number: int) -> None:
    """Forgets the error of a number; 0 is none."""
    _errors.pop(number, None)


def wait_for_future(number: int) -> int:
    """Returns the number of the error that a future ends with, or 0."""
    return _futures.pop(number).wait()


def count_living() -> tuple[int, int, int]:
    """Returns how many contexts, errors and futures there are."""
    return len(_contexts), len(_errors), len(_futures)


@functools.cache
def find_table() -> int:
    """Returns the address of the table of functions, which lives as long as the process."""
    return ctypes.addressof(_make_table())


@functools.cache
def _make_table() -> Any:
    table = c_api.Api.new()
    table.api_version = c_api.ApiVersion.new(major_version=c_api.MAJOR, minor_version=c_api.NEWEST)
    for name, arguments in c_api.FUNCTIONS:
        setattr(table, name, ctypes.cast(_make_function(name, arguments), ctypes.c_void_p))
    return table


_kept: list[Any] = []


def _make_function(name: str, arguments: type[c_api.Sized] | None) -> Any:
    """Returns the C function of an entry of the table."""
    answer = _ANSWERS.get(name)

    def call(address: int) -> int:
        try:
            if answer is None or arguments is None:
                raise InterfaceError(ErrorCode.UNIMPLEMENTED, _ABSENT.get(name, name))
            return answer(arguments.from_address(address)) or 0
        except InterfaceError as error:
            return make_error(error.code, error.message)
        # What must not pass through C: it is raised again when the handler has returned.
        except BaseException as error:  # noqa: BLE001 `run` raises it
            _note_failure(arguments, address, error)
            return make_error(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")

    made = c_api.FUNCTION(call)
    _kept.append(made)
    return made


def _note_failure(arguments: type[c_api.Sized] | None, address: int, error: BaseException) -> None:
    if arguments is None or not hasattr(arguments, "ctx"):
        return
    context = _contexts.get(getattr(arguments.from_address(address), "ctx", None) or 0)
    if context is not None:
        context.failure = error


def _find_context(given: Any) -> CallContext:
    context = _contexts.get(given.ctx or 0)
    if context is None:
        raise InterfaceError(ErrorCode.FAILED_PRECONDITION, "the call of this context has ended")
    return context


def _create_error(given: Any) -> int:
    code = given.errc if given.errc in tuple(ErrorCode) else ErrorCode.UNKNOWN
    return make_error(ErrorCode(code), (given.message or b"").decode(errors="replace"))


def _get_details(given: Any) -> None:
    code, text = _errors[given.error]
    given.message = ctypes.addressof(text)
    # Before 0.4 the structure ends with the message.
    if given.struct_size >= c_api.ErrorGetDetailsArgs.full_size():
        given.errc = code


def _destroy_error(given: Any) -> None:
    forget_error(given.error)


def _get_stream(given: Any) -> None:
    context = _find_context(given)
    if not context.stream:
        raise InterfaceError(ErrorCode.FAILED_PRECONDITION, "this stage has no stream")
    given.stream = context.stream


def _register_type(given: Any) -> None:
    name = ctypes.string_at(given.name.ptr, given.name.len)
    number = _types.setdefault(name, given.type_id[0].type_id or next(_type_numbers))
    if given.type_id[0].type_id not in (0, number):
        raise InterfaceError(ErrorCode.ALREADY_EXISTS, f"type {name!r} has another number")
    given.type_id[0].type_id = number
    States.register_deleter(number, given.type_info[0].deleter if given.type_info else None)


def _set_state(given: Any) -> None:
    context = _find_context(given)
    problem = context.states.put(ExecutionStage(given.stage), given.type_id[0].type_id, given.state)
    if problem:
        raise InterfaceError(ErrorCode.FAILED_PRECONDITION, problem)


def _get_state(given: Any) -> None:
    context = _find_context(given)
    found = context.states.find(ExecutionStage(given.stage), given.type_id[0].type_id)
    if found is None:
        raise InterfaceError(ErrorCode.NOT_FOUND, "there is no state of this type and stage")
    given.state = found


def _allocate(given: Any) -> None:
    context = _find_context(given)
    if context.scratch is None:
        raise InterfaceError(ErrorCode.FAILED_PRECONDITION, "this stage has no device memory")
    if given.alignment.bit_count() != 1 or given.alignment > MAX_ALIGNMENT:
        problem = f"Unsupported alignment: {given.alignment}"
        raise InterfaceError(ErrorCode.INVALID_ARGUMENT, problem)
    given.data = context.scratch.allocate(given.size)


def _free(given: Any) -> None:
    context = _find_context(given)
    if context.scratch is not None and given.data:
        context.scratch.free(given.data)


def _schedule(given: Any) -> None:
    _find_context(given)
    # A task may run in the thread that schedules it.
    c_api.ROUTINE(given.task)(given.data)


def _count_threads(given: Any) -> None:
    _find_context(given)
    given.num_threads[0] = 1


def _create_future(given: Any) -> None:
    given.future = next(_numbers)
    _futures[given.future] = Future()


def _complete_future(given: Any) -> None:
    _futures[given.future].complete()


def _fail_future(given: Any) -> None:
    _futures[given.future].complete(given.error)


def _get_run(given: Any) -> None:
    _find_context(given)
    given.run_id = -1


def _get_ordinal(given: Any) -> None:
    given.device_ordinal = _find_context(given).ordinal


@functools.cache
def _no_options() -> Any:
    return c_api.Attrs.new()


def _get_options(given: Any) -> None:
    _find_context(given)
    given.attrs = ctypes.addressof(_no_options())


# Each takes the structure that the handler passed; one returns the number of an error.
_ANSWERS: dict[str, Callable[[Any], int | None]] = {
    "Error_Create": _create_error,
    "Error_GetDetails": _get_details,
    "Error_Destroy": _destroy_error,
    "Stream_Get": _get_stream,
    "Type_Register": _register_type,
    "State_Set": _set_state,
    "State_Get": _get_state,
    "DeviceMemory_Allocate": _allocate,
    "DeviceMemory_Free": _free,
    "ThreadPool_Schedule": _schedule,
    "ThreadPool_NumThreads": _count_threads,
    "Future_Create": _create_future,
    "Future_SetAvailable": _complete_future,
    "Future_SetError": _fail_future,
    "RunId_Get": _get_run,
    "DeviceOrdinal_Get": _get_ordinal,
    "CustomOptions_Get": _get_options,
}
_ABSENT = {
    "Handler_Register": "handlers are registered with XLA, not with a call",
    "InvokeContext_Get": "no data of users is passed to a call in a CUDA graph",
    "InvokeContext_FindExtension": "collectives and recording are not offered in a CUDA graph",
}
