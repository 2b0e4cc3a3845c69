"""Writes down which handlers are registered with `jax.ffi`, from the import of tracegraph on.

Note [Registered handlers]
    jaxlib lists the handlers of its own registry, `custom_call_targets`, which is that of the CPU.
    A GPU's handlers are passed on to its plugin, which keeps them and lists none. They go through
    one function per platform, in a dictionary of jaxlib's; registrations before that function is
    there wait in another. So when tracegraph is imported, the waiting ones are read, and the
    dictionary is exchanged for one that writes down what each function is called with, and what
    was waiting when it was put in. jaxlib's list of the CPU names one stage only, so that this is
    the better source for it too. What was
    registered for a GPU after its plugin started and before tracegraph was imported is not seen,
    but for jaxlib's own handlers, which its modules list. Handlers that are built into the plugin,
    as those of XLA's radix sort (``xla.gpu.ext.``), are never registered from outside, and no
    interface of the plugin hands them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.runtime.jax_interop import exchange_registrars, waiting_targets, waiting_types

# By platform and name: the functions with the version of their interface, and types of states.
recorded_targets: dict[tuple[str, str], tuple[Any, int]] = {}
recorded_types: dict[tuple[str, str], Mapping[str, Any]] = {}


class _Recorder(dict[str, Callable[..., None]]):
    """The functions that registrations of each platform go through; each also writes them down.

    Args:
        record: writes one down.
        functions: what jaxlib had in its place.
        waiting: registrations of platforms without a function.
    """

    def __init__(
        self,
        record: Callable[..., None],
        functions: Mapping[str, Callable[..., None]],
        waiting: Mapping[str, list[Any]],
    ) -> None:
        super().__init__()
        self._record, self._waiting = record, waiting
        for platform in waiting:
            self._record_waiting(platform)
        for platform, function in functions.items():
            self[platform] = function

    def __setitem__(self, platform: str, function: Callable[..., None]) -> None:
        record = self._record

        def pass_on(name: str, registered: Any, *rest: Any) -> None:
            function(name, registered, *rest)
            record(platform, name, registered, *rest)

        # jaxlib passes these to the function itself.
        self._record_waiting(platform)
        super().__setitem__(platform, pass_on)

    def _record_waiting(self, platform: str) -> None:
        for name, registered, *rest in self._waiting.get(platform, ()):
            self._record(platform, name, registered, platform, *rest)


def record_registrations() -> None:
    """Reads the registrations so far, and writes down all later ones."""
    exchange_registrars(_make_recorder)


def _make_recorder(kind: str, functions: Mapping[str, Callable[..., None]]) -> _Recorder:
    if kind == "target":
        return _Recorder(_record_target, functions, waiting_targets)
    return _Recorder(_record_type, functions, waiting_types)


def _record_target(
    platform: str, name: str, functions: Any, _: str, api_version: int = 0, *__: Any
) -> None:
    recorded_targets[platform, name] = functions, api_version


def _record_type(platform: str, name: str, registration: Any, *_: Any) -> None:
    if isinstance(registration, Mapping):
        recorded_types[platform, name] = registration
