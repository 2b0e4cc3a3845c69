"""Keys of programs: equal for programs that are lowered alike, in any process.

Note [Keys]
A key is a digest of all that lowering depends on, written out: the graph op by op, with every
parameter of every primitive, and what surrounds it. A value is written by its kind, and one of an
unknown kind has no key: its program is compiled each time, which is slow, where a key that leaves
something out would be wrong. That is so for functions that a program calls back, for one. Rules of
derivatives are functions, too, but nothing that is lowered: derivatives are ops by then. What is
lowered of a `reduce` is its jaxpr, not the function that it was traced from.

Closed-over arrays that are inputs of the graph are written by their type; those that XLA embeds, by
their bytes. Streams and events are numbered by their first use, lines of the source are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from tracegraph.constraints.traces import read_array
from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.jax_internals import (
    EquationContext,
    describe_settings,
    find_key_implementation,
    is_jaxpr,
    unwrap_array,
)
from tracegraph.kernel_caching.known_rules import describe_rules, is_defined_by_jax
from tracegraph.lowering.collector import hold_collector

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# No region calls their functions, see Note [Keys].
_UNCALLED = frozenset(
    ["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"]
    + ["custom_lin", "linear_call", "reduce"]
)
_NUMBERED = ("stream", "event")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class NoKey(Exception):
    """A program has no key; the text says what is of an unknown kind."""


@hold_collector
def make_key(graph: Graph, embedded: Mapping[Value, Any], surroundings: Mapping[str, Any]) -> str:
    """Returns the key of a program, see Note [Keys].

    Args:
        graph: checked and optimised.
        embedded: those of its constants that are part of XLA's program.
        surroundings: what else lowering depends on, by name.

    Raises:
        NoKey: something in it is of a kind that this version does not know.

    Example:
        >>> from tracegraph.tracing.trace import trace_function
        >>> def trace(function):
        ...     return trace_function(function, (1.0,), {}, name="f").graph
        >>> first = make_key(trace(lambda x: x * 2), {}, {})
        >>> first == make_key(trace(lambda y: y * 2), {}, {})
        True
        >>> first == make_key(trace(lambda x: x * 3), {}, {})
        False
    """
    writer = _Writer()
    for name in sorted(surroundings):
        writer.write(name, surroundings[name])
    writer.write_graph(graph, embedded)
    return writer.make_digest()


class _Writer:
    """Writes values into a digest, each with its kind and its length."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        # Added to the digest together: a call for each of thousands would take as long again.
        self._texts: list[str] = []
        self._types: dict[Any, str] = {}
        self._numbers: dict[tuple[str, Any], int] = {}
        self._values: dict[Value, int] = {}
        self._value_numbers = itertools.count()
        self._known: set[Any] = set()

    def make_digest(self) -> str:
        """Returns the digest of all that was written."""
        self._flush()
        return self._digest.hexdigest()

    def write_graph(self, graph: Graph, embedded: Mapping[Value, Any]) -> None:
        """Writes a graph; values are numbered in their order, whatever the trace called them."""
        self._add("graph", graph.name)
        for value in graph.inputs:
            self._define(value)
        for held in graph.constants:
            self._define(held.value)
            self._add("constant", held.name)
            self.write("array", read_array(held.array) if held.value in embedded else None)
        for op in graph.ops:
            self._write_op(op)
        for operand in graph.outputs:
            self._write_operand(operand)
        self.write("aliases", graph.aliases)

    def _write_op(self, op: Op) -> None:
        self._write_rules(op.primitive)
        self._add("op", op.name)
        for operand in op.operands:
            self._write_operand(operand)
        origin = op.origin
        for kind, stream in (("on", origin.stream), ("backward", origin.backward_on)):
            self._add(kind, str(stream and self._number("stream", stream)))
        self._write_settings(origin.equation_context)
        jaxprs = 0
        for name in sorted(op.params):
            value = op.params[name]
            if name in _NUMBERED and isinstance(value, int):
                self._add(name, str(value and self._number(name, value)))
                continue
            if op.name in _UNCALLED and _is_function(value) and not is_jaxpr(value):
                continue
            jaxprs += self.write(f"{op.name}.{name}", value)
        if jaxprs != len(op.subgraphs):
            raise NoKey(f"`{op.name}` holds {jaxprs} programs, and {len(op.subgraphs)} are known")
        for name, inner in op.subgraphs:
            self._add("inner", name)
            self.write_graph(inner, {each.value: each.array for each in inner.constants})
        for result in op.results:
            self._define(result)

    def _write_rules(self, primitive: Any) -> None:
        """Writes once how a primitive is lowered, see Note [Rules of others]."""
        if primitive in self._known:
            return
        rules = describe_rules(primitive)
        if rules is None:
            raise NoKey(f"`{primitive}` is lowered by a rule that is not JAX's")
        self._add("rules", rules)
        self._known.add(primitive)

    def _write_settings(self, context: EquationContext | None) -> None:
        """Writes settings once, and then their number: most ops have the same ones."""
        settings = context and context.settings
        is_new = ("settings", settings) not in self._numbers
        self._add("settings", str(self._number("settings", settings)))
        if is_new:
            self.write("settings", describe_settings(context))

    def _write_operand(self, operand: Operand) -> None:
        if isinstance(operand, Literal):
            self._write_type(operand.aval)
            self.write("literal", operand.value)
            return
        # What no inner graph defines is of a graph around it.
        self._add("value", str(self._values.get(operand, -1)))

    def _define(self, value: Value) -> None:
        self._values[value] = next(self._value_numbers)
        self._write_type(value.aval)

    def _write_type(self, aval: Any) -> None:
        text = self._types.get(aval)
        if text is None:
            text = self._types[aval] = _describe_type(aval)
        self._add("aval", text)

    def _number(self, kind: str, value: Any) -> int:
        return self._numbers.setdefault((kind, value), len(self._numbers) + 1)

    def write(self, name: str, value: Any) -> int:
        """Writes a value; returns how many jaxprs it holds, which are written as graphs."""
        value = unwrap_array(value)
        kind = type(value)
        if kind in _PLAIN:
            self._add(name, f"{kind.__name__} {value!r}")
        elif is_jaxpr(value):
            self._add(name, "jaxpr")
            return 1
        elif isinstance(value, np.generic | np.ndarray | jax.Array):
            found = np.ascontiguousarray(read_array(value))
            self._add(name, f"array {found.dtype} {found.shape}")
            self._flush()
            self._digest.update(found.reshape(-1).view(np.uint8).data)
        elif isinstance(value, np.dtype):
            self._add(name, f"dtype {value}")
        elif isinstance(value, type):
            self._add(name, f"type {value.__module__}.{value.__qualname__}")
        elif isinstance(value, jax.sharding.Mesh):
            self._add(name, f"mesh {value.shape} {value.devices.tolist()}")
        elif isinstance(value, types.FunctionType) and _is_named_by_jax(value):
            self._add(name, f"function {value.__module__}.{value.__qualname__}")
        elif isinstance(value, enum.Enum):
            self._add(name, f"{kind.__qualname__}.{value.name}")
        else:
            return self._write_parts(name, value)
        return 0

    def _write_parts(self, name: str, value: Any) -> int:
        if isinstance(value, tuple | list):
            self._add(name, f"{type(value).__qualname__} of {len(value)}")
            return sum([self.write(f"{name}[]", each) for each in value])
        if isinstance(value, frozenset | set):
            self._add(name, f"set of {len(value)}")
            return sum([self.write(f"{name}[]", each) for each in sorted(value, key=repr)])
        if isinstance(value, Mapping):
            self._add(name, f"mapping of {len(value)}")
            pairs: Iterable[tuple[Any, Any]] = sorted(value.items(), key=lambda pair: repr(pair[0]))
            return sum([self.write(f"{name}[]", part) for pair in pairs for part in pair])
        if dataclasses.is_dataclass(value):
            fields = [each.name for each in dataclasses.fields(value) if each.compare]
            self._add(name, f"{type(value).__qualname__} of {len(fields)}")
            return sum([self.write(f"{name}.{each}", getattr(value, each)) for each in fields])
        if _is_primitive_of_jax(value):
            self._add(name, f"primitive {type(value).__module__}.{type(value).__qualname__}")
            return self.write(f"{name}.params", value.params)
        self._write_by_repr(name, value)
        return 0

    def _write_by_repr(self, name: str, value: Any) -> None:
        # An array inside of it is written whole, with all digits.
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            kind, text = type(value), repr(value)
        is_jax = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
        if _is_function(value) or not is_jax or _ADDRESS.search(text):
            raise NoKey(f"`{name}` is a {kind.__module__}.{kind.__qualname__}")
        self._add(name, f"{kind.__qualname__} {text}")

    def _add(self, name: str, text: str) -> None:
        self._texts.append(f"\n{name} {len(text)} {text}")

    def _flush(self) -> None:
        self._digest.update("".join(self._texts).encode())
        self._texts.clear()


def _describe_type(aval: Any) -> str:
    implementation = find_key_implementation(aval)
    if implementation is not None and not is_defined_by_jax(implementation):
        raise NoKey(f"{aval} are random keys of an implementation that is not JAX's")
    weak = bool(getattr(aval, "weak_type", False))
    return f"{aval.str_short()} {weak} {getattr(aval, 'sharding', None)}"


def _is_named_by_jax(function: types.FunctionType) -> bool:
    """True for a function of JAX's own modules, which its version tells; not for one made later."""
    is_own = function.__module__.partition(".")[0] == "jax"
    return is_own and "<" not in function.__qualname__ and function.__closure__ is None


def _is_function(value: Any) -> bool:
    """True for what is called, and for JAX's record of a function."""
    return callable(value) or hasattr(value, "call_wrapped")


def _is_primitive_of_jax(value: Any) -> bool:
    """True for the parameter of ``call_hi_primitive``, if its class is JAX's own.

    Such an object is a class with its parameters; the version of JAX tells what the class does.
    """
    is_own = type(value).__module__.partition(".")[0] == "jax"
    return is_own and hasattr(value, "in_avals") and isinstance(value.params, Mapping)
