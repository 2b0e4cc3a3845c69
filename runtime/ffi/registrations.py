"""Finds handlers of `jax.ffi` by name and platform; see Note [Registered handlers]."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from tracegraph.runtime.ffi.c_api import ExecutionStage, TypeId, TypeInfo
from tracegraph.runtime.ffi.handler import Handler
from tracegraph.runtime.ffi.recorder import recorded_targets, recorded_types
from tracegraph.runtime.ffi.states import States
from tracegraph.runtime.jax_interop import find_cpu_targets, platform_names

TYPED = 1
# Modules of jaxlib with handlers for GPUs.
_HANDLER_MODULES = ("linalg", "prng", "rnn", "solver", "sparse", "triton")


def find_handler(target: str, platform: str) -> Handler | None:
    """Returns the handler that is registered under a name, or None.

    Args:
        target: the name.
        platform: as in ``jax.ffi.register_ffi_target``: ``cpu``, ``CUDA``.

    A handler of the older, untyped interface is not among them.
    """
    platform = platform_names.get(platform, platform)
    functions, api_version = _find_functions(target, platform)
    if functions is None or api_version != TYPED:
        return None
    _register_deleters()
    stages = functions if isinstance(functions, dict) else {"execute": functions}
    return Handler(
        target,
        tuple(
            (ExecutionStage[stage.upper()], _read_capsule(capsule))
            for stage, capsule in stages.items()
            if capsule is not None
        ),
    )


def _find_functions(target: str, platform: str) -> tuple[Any, int]:
    if (platform, target) in recorded_targets:
        return recorded_targets[platform, target]
    listed = find_cpu_targets(platform).get(target)
    return (listed, TYPED) if listed is not None else _find_own_functions(target, platform)


def _find_own_functions(target: str, platform: str) -> tuple[Any, int]:
    """Returns jaxlib's own handler for GPUs of a name, and the version of its interface."""
    for module in _HANDLER_MODULES:
        try:
            listed = importlib.import_module(f"jaxlib.gpu_{module}").registrations()
        except (ImportError, AttributeError):
            # Not every version has each.
            continue
        for name, function, *rest in listed.get(platform, ()):
            if name == target:
                return function, rest[0] if rest else TYPED
    return None, TYPED


def _register_deleters() -> None:
    """Says what deletes states of the registered types; XLA numbers them when it gets them."""
    for registration in recorded_types.values():
        number = TypeId.from_address(_read_capsule(registration["type_id"])).type_id
        capsule = registration.get("type_info")
        deleter: Any = None
        if capsule is not None:
            deleter = getattr(TypeInfo.from_address(_read_capsule(capsule)), "deleter", None)
        States.register_deleter(number, deleter)


def _read_capsule(capsule: Any) -> int:
    """Returns the address in a capsule, whatever its name."""
    find_name, find_pointer = _PYTHON.PyCapsule_GetName, _PYTHON.PyCapsule_GetPointer
    return find_pointer(capsule, find_name(capsule))


# A library object of its own: the types of the functions of `ctypes.pythonapi` are everybody's.
_PYTHON: Any = ctypes.PyDLL(None)
_PYTHON.PyCapsule_GetName.restype = ctypes.c_char_p
_PYTHON.PyCapsule_GetName.argtypes = [ctypes.py_object]
_PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p
_PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
