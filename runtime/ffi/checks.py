"""Whether a call has a handler that can be called with the structures of `c_api`."""

from __future__ import annotations

from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.ffi.context import InterfaceError
from tracegraph.runtime.ffi.handler import Handler, is_readable, read_facts
from tracegraph.runtime.ffi.registrations import find_handler

# They call Python, which no graph does. Trying them out would call the user's function.
CALLBACKS = (
    "xla_ffi_python_gpu_callback",
    "xla_ffi_partitioned_python_gpu_callback",
    "xla_buffer_python_gpu_callback",
)


def find_callable(call: FfiCall, platform: str) -> Handler | str:
    """Returns the handler of a call, or why there is none to be called; reads on after its name.

    Args:
        call: of a compiled program.
        platform: as in ``jax.ffi.register_ffi_target``.
    """
    if call.target in CALLBACKS:
        return "which calls Python on the host"
    handler = find_handler(call.target, platform)
    if handler is None:
        return (
            f"for which no handler of {platform} is known: it is built into XLA, or was registered "
            "before tracegraph was imported"
        )
    try:
        facts = read_facts(handler)
    except InterfaceError as error:
        return f"whose handler does not say what it is: {error.message}"
    if not is_readable(facts):
        major, minor = facts.version
        return (
            f"whose handler is of version {major}.{minor} of XLA's interface; this version of "
            "tracegraph knows those up to 0.5"
        )
    return handler


def find_registration_problem(call: FfiCall, platform: str) -> str:
    """Returns why a call has no handler to be called, or an empty text."""
    found = find_callable(call, platform)
    return found if isinstance(found, str) else ""
