"""PartTrace: records the ops of a function part by part; a host read ends a part.

Note [Readable tracers]. JAX's tracers refuse to be read, and its own trace begins and ends with a
function. Here one trace takes all ops of the function, and what it has recorded is taken out of it
at each read. The user gets a `ReadableTracer` for each value. It stands for a tracer of JAX's in
the part that made it, and for an input of each later part that uses it. Ops refer to JAX's tracers
only, so that a value whose `ReadableTracer` is gone is used by no later part: that is how the
results of a part are known before the rest of the function has run. Inside of `jax.jit`, `jax.grad`
and their like all is as ever, and a value that is mapped or traced there cannot be read.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.core
import numpy as np

from tracegraph.jax_internals import JaxprTrace, close_trace, is_array_aval, make_debug_info


class TracedValue:
    """A value of the function that is traced.

    Attributes:
        aval: JAX's abstract value.
        part: number of the part that makes it; -1 for an argument.
        index: its place among the values of the part, or the leaves of the arguments.
        tracer: what stands for it in its own part, while that is recorded.
        place: of its result among those of the part; None if the part does not return it.
    """

    __slots__ = ("__weakref__", "aval", "index", "part", "place", "tracer")

    def __init__(self, aval: Any, part: int, index: int, tracer: Any, place: int | None) -> None:
        self.aval, self.part, self.index = aval, part, index
        self.tracer, self.place = tracer, place


class ReadableTracer(jax.core.Tracer):
    """What the user's function gets for a value, see Note [Readable tracers]."""

    __slots__ = ("value",)
    _trace: Any
    aval: Any

    def __init__(self, trace: PartTrace, value: TracedValue) -> None:
        super().__init__(trace, value.aval)  # pyright: ignore[reportCallIssue]
        self.value = value

    def _read(self, kind: str) -> Any:
        return self._trace.read(self.value, kind)

    def _is_number(self) -> bool:
        return is_array_aval(self.aval) and isinstance(self.aval.dtype, np.dtype)

    def _is_scalar(self) -> bool:
        return self._is_number() and self.aval.size == 1

    # Where the value is no scalar, JAX says what is wrong.

    def __bool__(self) -> bool:
        return self._read("bool") if self._is_scalar() else super().__bool__()

    def __int__(self) -> int:
        return self._read("int") if self._is_scalar() else super().__int__()

    def __float__(self) -> float:
        return self._read("float") if self._is_scalar() else super().__float__()

    def __complex__(self) -> complex:
        return self._read("complex") if self._is_scalar() else super().__complex__()

    def __index__(self) -> int:
        is_integer = self._is_scalar() and np.issubdtype(self.aval.dtype, np.integer)
        return self._read("index") if is_integer and not self.aval.shape else super().__index__()

    def __hex__(self) -> str:
        return hex(operator.index(self))

    def __oct__(self) -> str:
        return oct(operator.index(self))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_number():
            return super().__array__(*args, **kwargs)
        return self._read("array").__array__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self._read("array"), spec) if self._is_number() else super().__format__(spec)

    def item(self, *args: Any) -> Any:
        """Returns the value as a Python scalar."""
        return self._read("array").item(*args)

    def tolist(self) -> Any:
        """Returns the value as nested lists."""
        return self._read("array").tolist()

    # In JAX a method that only raises.
    def tobytes(self, order: Any = "C") -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the bytes of the value."""
        return self._read("array").tobytes(order)


class RecordedPart:
    """What was recorded since the last read.

    Attributes:
        jaxpr: closed; from ``inputs`` to results.
        inputs: values of arguments and earlier parts, in order.
        made: references to the values that it made, in order.
    """

    __slots__ = ("inputs", "jaxpr", "made")

    def __init__(
        self,
        jaxpr: Any,
        inputs: tuple[TracedValue, ...],
        made: list[weakref.ref[TracedValue]],
    ) -> None:
        self.jaxpr, self.inputs, self.made = jaxpr, inputs, made


class PartTrace(JaxprTrace):
    """Takes the ops of a function, see Note [Readable tracers].

    Overrides what ops go through (``process_...``, ``stage_value``), to make the results readable,
    and what takes operands in (``to_jaxpr_tracer``).

    Args:
        read: is called with a value and how it is read; returns what was read.
    """

    def __init__(self, read: Callable[[TracedValue, str], Any]) -> None:
        super().__init__(make_debug_info())
        self.read = read
        self._part = 0
        self._start()

    def _start(self) -> None:
        self._inputs: dict[int, tuple[TracedValue, Any]] = {}
        self._made: list[weakref.ref[TracedValue]] = []

    def make_argument(self, aval: Any, index: int) -> ReadableTracer:
        """Returns the tracer of a leaf of the arguments."""
        return ReadableTracer(self, TracedValue(aval, -1, index, None, index))

    def add_input(self, value: TracedValue) -> None:
        """Makes a value an input of the part, whether it is used or not; the last of them."""
        known = self._inputs.pop(id(value), None)
        self._inputs[id(value)] = known or (value, self.new_arg(value.aval, None))

    def list_alive(self) -> list[TracedValue]:
        """Returns the values of this part that anything may still use."""
        alive = [made() for made in self._made]
        return [value for value in alive if value is not None]

    def find(self, value: TracedValue) -> Any:
        """Returns JAX's tracer of a value in this part."""
        if value.part == self._part:
            return value.tracer
        known = self._inputs.get(id(value))
        if known is None:
            known = self._inputs[id(value)] = value, self.new_arg(value.aval, None)
        return known[1]

    def to_tracer(self, leaf: Any) -> Any:
        """Returns JAX's tracer of a result of the function."""
        return self.to_jaxpr_tracer(leaf, None)

    def close(self, results: Sequence[Any]) -> RecordedPart:
        """Ends the part; the next op begins another.

        Args:
            results: tracers of JAX's.
        """
        inputs, made = tuple(self._inputs.values()), self._made
        for reference in made:
            value = reference()
            if value is not None:
                value.tracer = None
        jaxpr = close_trace(self, [tracer for _, tracer in inputs], results)
        self.frame = JaxprTrace(make_debug_info()).frame
        self._part += 1
        self._start()
        return RecordedPart(jaxpr, tuple(value for value, _ in inputs), made)

    def end(self) -> None:
        """Drops what refers to the caller: nothing is traced any more."""
        self.read = _raise_late_read
        self.invalidate()
        self._start()

    # What JAX calls.

    def process_primitive(self, *args: Any, **kwargs: Any) -> Any:
        """Records an op."""
        return self._show(super().process_primitive(*args, **kwargs))

    def process_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call."""
        return self._show(super().process_call(*args, **kwargs))

    def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call with a derivative of its own."""
        return self._show(super().process_custom_jvp_call(*args, **kwargs))

    def process_custom_vjp_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call with a derivative of its own."""
        return self._show(super().process_custom_vjp_call(*args, **kwargs))

    def process_shard_map(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call on a mesh."""
        return self._show(super().process_shard_map(*args, **kwargs))

    def stage_value(self, val: Any) -> Any:
        """Takes a value in."""
        return self._show(super().stage_value(val))

    def to_jaxpr_tracer(self, x: Any, source_info: Any) -> Any:
        """Returns the tracer of an operand."""
        if type(x) is ReadableTracer and x._trace is self:
            return self.find(x.value)
        return super().to_jaxpr_tracer(x, source_info)

    def _show(self, results: Any) -> Any:
        if isinstance(results, list | tuple):
            return type(results)([self._show_one(each) for each in results])
        return self._show_one(results)

    def _show_one(self, tracer: Any) -> Any:
        if not isinstance(tracer, jax.core.Tracer) or type(tracer) is ReadableTracer:
            return tracer
        value = TracedValue(tracer.aval, self._part, len(self._made), tracer, None)
        self._made.append(weakref.ref(value))
        return ReadableTracer(self, value)


def _raise_late_read(_value: TracedValue, _kind: str) -> NoReturn:
    raise jax.errors.UnexpectedTracerError("a traced value is read after its function has ended")
