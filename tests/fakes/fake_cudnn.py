"""A stand-in for the loaded cuDNN: keeps descriptors, and executes by a function of the test."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.cuda.libraries.cudnn_backend import (
    Attribute,
    CudnnBackend,
    Kind,
    ValueType,
)

NOT_SUPPORTED = 3000
NAMES = {(each.number): each for each in Attribute}
POINTER_TYPES = (ValueType.HANDLE, ValueType.VOID_PTR, ValueType.BACKEND_DESCRIPTOR)


@dataclasses.dataclass
class Described:
    """A descriptor: its attributes by name, and whether they may still change."""

    kind: Kind
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_final: bool = False


@dataclasses.dataclass(frozen=True)
class Engine:
    """What an engine takes and is."""

    knobs: tuple[int, ...] = ()
    workspace_bytes: int = 0
    notes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call: stream, address of each tensor, workspace, and what was executed."""

    stream: int
    addresses: dict[int, int]
    workspace: int
    plan: dict[str, Any]


class Function:
    """A function of a loaded library, whose types are set on it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.argtypes: tuple[Any, ...] | None = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert self.argtypes is not None
        assert len(arguments) == len(self.argtypes)
        return self._run(*arguments)


class FakeCudnn:
    """The library.

    Args:
        engines: those that it has, by number; heuristics give them in this order.

    Attributes:
        alive: descriptors that are not destroyed yet.
        handles: handles that are not destroyed yet, with the stream of each.
        executions: what was executed, in order.
        act: called with each execution.
        calls: how often each function was called.
        fail_at: name of the function that fails, and at which call of it, from 1.
    """

    def __init__(self, engines: dict[int, Engine] | None = None) -> None:
        self.engines = {0: Engine()} if engines is None else engines
        self.alive: dict[int, Described] = {}
        self.handles: dict[int, int] = {}
        self.executions: list[Execution] = []
        self.act: Callable[[Execution], None] = lambda execution: None
        self.calls: collections.Counter[str] = collections.Counter()
        self.fail_at: tuple[str, int] = ("", 0)
        self.message = b""
        self._count = 0x1000
        for name, run in {
            "cudnnGetVersion": self._get_version,
            "cudnnGetErrorString": self._get_error_string,
            "cudnnGetLastErrorString": self._get_last_error_string,
            "cudnnCreate": self._create,
            "cudnnDestroy": self._destroy,
            "cudnnSetStream": self._set_stream,
            "cudnnBackendCreateDescriptor": self._create_descriptor,
            "cudnnBackendDestroyDescriptor": self._destroy_descriptor,
            "cudnnBackendFinalize": self._finalize,
            "cudnnBackendSetAttribute": self._set_attribute,
            "cudnnBackendGetAttribute": self._get_attribute,
            "cudnnBackendExecute": self._execute,
        }.items():
            setattr(self, name, Function(self._wrap(name, run)))

    def make_backend(self) -> CudnnBackend:
        """Returns the functions as `load_cudnn` does."""
        return CudnnBackend(self)

    def list_alive(self, kind: Kind) -> list[dict[str, Any]]:
        """Returns the attributes of each finalized descriptor of a kind."""
        found = [each for each in self.alive.values() if each.kind is kind and each.is_final]
        return [each.values for each in found]

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls[name] += 1
            if self.fail_at == (name, self.calls[name]):
                return self._refuse("planted")
            return function(*arguments)

        return run

    def _refuse(self, reason: str) -> int:
        self.message = reason.encode()
        return NOT_SUPPORTED

    def _number(self) -> int:
        self._count += 16
        return self._count

    def _get_version(self) -> int:
        return 92401

    def _get_error_string(self, status: int) -> bytes:
        assert status == NOT_SUPPORTED
        return b"CUDNN_STATUS_NOT_SUPPORTED"

    def _get_last_error_string(self, text: Any, size: int) -> None:
        text.value = self.message[: size - 1]
        self.message = b""

    def _create(self, out: Any) -> int:
        out._obj.value = self._number()
        self.handles[out._obj.value] = 0
        return 0

    def _destroy(self, handle: int) -> int:
        del self.handles[handle]
        return 0

    def _set_stream(self, handle: int, stream: int) -> int:
        self.handles[handle] = stream
        return 0

    def _create_descriptor(self, kind: int, out: Any) -> int:
        out._obj.value = self._number()
        self.alive[out._obj.value] = Described(Kind(kind))
        return 0

    def _destroy_descriptor(self, descriptor: int) -> int:
        del self.alive[descriptor]
        return 0

    def _set_attribute(
        self, descriptor: int, attribute: int, value_type: int, count: int, array: Any
    ) -> int:
        described, name = self.alive[descriptor], NAMES[attribute]
        assert not described.is_final
        if value_type == ValueType.DOUBLE and name.value_type is ValueType.FLOAT:
            described.values[name.name] = ("double", array._obj.value)
            return 0
        assert value_type == name.value_type
        if value_type == ValueType.CHAR:
            described.values[name.name] = array.raw
            return 0
        values = [each or 0 for each in array]
        assert len(values) == count
        if value_type == ValueType.BACKEND_DESCRIPTOR:
            # As cuDNN does: what a descriptor holds is its own.
            assert all(self.alive[each].is_final for each in values)
            values = [self.alive[each].values | {"kind": self.alive[each].kind} for each in values]
        described.values[name.name] = values
        return 0

    def _finalize(self, descriptor: int) -> int:
        described = self.alive[descriptor]
        described.is_final = True
        values = described.values
        if described.kind is Kind.ENGINE and values["ENGINE_GLOBAL_INDEX"][0] not in self.engines:
            return self._refuse("no such engine")
        if described.kind is Kind.ENGINECFG:
            engine = self.engines[values["ENGINECFG_ENGINE"][0]["ENGINE_GLOBAL_INDEX"][0]]
            for knob in values.get("ENGINECFG_KNOB_CHOICES", []):
                if knob["KNOB_CHOICE_KNOB_TYPE"][0] not in engine.knobs:
                    return self._refuse("no such knob")
        if values.get("EXECUTION_PLAN_JSON_REPRESENTATION") == b"of another version":
            return self._refuse("schemaVersion")
        return 0

    def _get_attribute(
        self, descriptor: int, attribute: int, value_type: int, limit: int, count: Any, array: Any
    ) -> int:
        described, name = self.alive[descriptor], NAMES[attribute]
        assert value_type == name.value_type
        readers: dict[Attribute, Callable[[dict[str, Any]], Any]] = {
            Attribute.ENGINEHEUR_RESULTS: self._list_recommended,
            Attribute.ENGINECFG_ENGINE: self._list_engines,
            Attribute.ENGINE_NUMERICAL_NOTE: self._list_notes,
            Attribute.EXECUTION_PLAN_WORKSPACE_SIZE: self._list_workspaces,
        }
        found = readers[name](described.values)
        count._obj.value = len(found)
        for index, value in enumerate(found[:limit]):
            if value_type == ValueType.BACKEND_DESCRIPTOR:
                self.alive[array[index]] = Described(value.pop("kind"), value, is_final=True)
            else:
                array[index] = value
        return 0

    def _list_recommended(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        if values["ENGINEHEUR_MODE"] != [3]:
            return []
        engines = [{"kind": Kind.ENGINE, "ENGINE_GLOBAL_INDEX": [n]} for n in self.engines]
        return [{"kind": Kind.ENGINECFG, "ENGINECFG_ENGINE": [engine]} for engine in engines]

    def _list_engines(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        return [dict(each) for each in values["ENGINECFG_ENGINE"]]

    def _list_notes(self, values: dict[str, Any]) -> tuple[int, ...]:
        return self.engines[values["ENGINE_GLOBAL_INDEX"][0]].notes

    def _list_workspaces(self, values: dict[str, Any]) -> list[int]:
        if "EXECUTION_PLAN_ENGINE_CONFIG" not in values:
            return [256]
        engine = values["EXECUTION_PLAN_ENGINE_CONFIG"][0]["ENGINECFG_ENGINE"][0]
        return [self.engines[engine["ENGINE_GLOBAL_INDEX"][0]].workspace_bytes]

    def _execute(self, handle: int, plan: int, pack: int) -> int:
        assert self.alive[plan].kind is Kind.EXECUTION_PLAN
        values = self.alive[pack].values
        addresses = dict(
            zip(
                values["VARIANT_PACK_UNIQUE_IDS"],
                values["VARIANT_PACK_DATA_POINTERS"],
                strict=True,
            )
        )
        (workspace,) = values["VARIANT_PACK_WORKSPACE"]
        stream = self.handles[handle]
        execution = Execution(stream, addresses, workspace, self.alive[plan].values)
        self.executions.append(execution)
        self.act(execution)
        return 0


def read_floats(address: int, count: int) -> list[float]:
    """Returns the float32 values at an address."""
    return list((ctypes.c_float * count).from_address(address))
