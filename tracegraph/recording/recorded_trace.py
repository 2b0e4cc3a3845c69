"""RecordedTrace: the ops of a with-block go into a jaxpr, and the user gets arrays for them.

Note [Recording]. `jax.jit` calls a function, so that its tracers die with the call. A with-block
has no end of a call: what it makes must be readable long after, by the same names. So JAX's own
trace records the ops, unchanged, but what it returns to the block is wrapped: a LIVE `Array`, which
stands for its tracer as long as the block lasts and for a static output afterwards. JAX asks such
an array for its value before it binds an op, and gets the tracer. Inside of `jax.jit`, `jax.grad`
and their like all is as ever: only the results of the block's own ops are wrapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tracegraph.jax_internals import (
    JaxprTrace,
    find_base_trace,
    has_kept_trace,
    is_array_aval,
    is_asked_for_operand,
    is_key_dtype,
    pass_on_results,
    send_ops_to,
)
from tracegraph.recording.graph_errors import make_device_error
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.graph_output import GraphOutput
from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.jax_interop import ArrayImpl, PRNGKeyArray, unwrap_key, wrap_key


class RecordedTrace(JaxprTrace):
    """Records the ops of a with-block, see Note [Recording].

    Overrides what a block's own ops go through (``process_...``, ``stage_value``), to wrap the
    results, and what takes values of outside in (``to_jaxpr_tracer``, ``new_const``), to make
    arrays inputs of the program and not constants of it.

    Args:
        debug_info: JAX's words for a program without a function.
        jax_device: that the program is for.

    Attributes:
        fixed: plain arrays of outside that were read, each with its tracer.
        live: buffers of LIVE arrays of outside that were read, each with its tracer.
        written: the tracers of those that were written, by the identity of the buffer.
        is_kept: True once a function that JAX traces, and whose trace it keeps, has read an array
            of the block or a LIVE one of outside.
    """

    def __init__(self, debug_info: Any, jax_device: Any) -> None:
        super().__init__(debug_info)
        self.fixed: dict[int, tuple[Any, Any]] = {}
        self.live: dict[int, tuple[Any, Any]] = {}
        self.written: dict[int, Any] = {}
        self.is_kept = False
        self._jax_device = jax_device
        self._made: list[tuple[weakref.ref[Array], GraphOutput]] = []
        # By the identity of its key data, which it holds.
        self._keys: dict[int, tuple[Any, Any]] = {}
        # By the identity of its tracer, which it holds.
        self._arrays: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
        self._wraps = True
        _pass_on_results()

    def take_made(self) -> list[tuple[weakref.ref[Array], GraphOutput]]:
        """Returns the arrays that the block has made, in order, and drops them."""
        made, self._made = self._made, []
        self._keys.clear()
        return made

    def read_live(self, buffer: Any) -> Any:
        """Returns the tracer of a LIVE array: of this block, or of outside; then it is an input."""
        self.is_kept = self.is_kept or has_kept_trace(self)
        made = buffer.find_recorded(self) if isinstance(buffer, GraphOutput) else None
        if made is not None:
            return made
        if id(buffer) not in self.live:
            if buffer.jax_device != self._jax_device:
                raise make_device_error(buffer.aval, buffer.jax_device, self._jax_device)
            self.live[id(buffer)] = buffer, self._add_input(buffer.aval)
        return self.written.get(id(buffer), self.live[id(buffer)][1])

    def write_live(self, buffer: Any, value: Any) -> None:
        """Records that a LIVE array of outside gets another value: `read_live` returns that one."""
        self.read_live(buffer)
        # A copy: no other result of the block is the same value.
        self.written[id(buffer)] = self._bind(lambda: jnp.array(value, buffer.aval.dtype))

    def show_value(self, value: Any) -> Any:
        """Returns a new array of the block for a tracer; anything else as it is."""
        return self._wrap(value)

    def offer_value(self, value: Any) -> Any:
        """Returns the array for the tracer of a LIVE array, where the block's ops take arrays.

        `jax.vjp` and `jax.checkpoint` hand to the user what they got, if their function returns its
        own argument. A function that JAX traces may hold nothing but tracers.
        """
        if find_base_trace() is not self:
            return value
        if is_asked_for_operand():
            return self._wrap(value)
        # It is a result of what JAX has traced.
        self.is_kept = True
        return value

    # What JAX calls.

    def invalidate(self) -> None:
        """Forgets all that it holds: what JAX keeps of a block's tracers holds their trace."""
        super().invalidate()
        self.fixed, self.live, self.written, self._keys = {}, {}, {}, {}
        self._made = []

    def process_primitive(self, *args: Any, **kwargs: Any) -> Any:
        """Records an op."""
        return self._wrap(super().process_primitive(*args, **kwargs))

    def process_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call."""
        return self._wrap(super().process_call(*args, **kwargs))

    def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call with a derivative of its own."""
        return self._wrap(super().process_custom_jvp_call(*args, **kwargs))

    def process_custom_vjp_call(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call with a derivative of its own."""
        return self._wrap(super().process_custom_vjp_call(*args, **kwargs))

    def stage_value(self, val: Any) -> Any:
        """Takes a value in."""
        return self._wrap(super().stage_value(val))

    def to_jaxpr_tracer(self, x: Any, source_info: Any) -> Any:
        """Returns the tracer of an operand."""
        base = unwrap_key(x)
        if type(base) is not Array or base.state is not ArrayState.LIVE:
            return super().to_jaxpr_tracer(x, source_info)
        data = base.jax()
        if base is x:
            return data
        if id(data) in self._keys:
            return self._keys[id(data)][1]
        return self._bind(lambda: jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)))

    def new_const(self, c: Any, source_info: Any, aval: Any = None) -> Any:
        """Takes a value of outside in: an array becomes an input, anything else a constant."""
        if type(c) is not ArrayImpl and type(c) is not PRNGKeyArray:
            return super().new_const(c, source_info, aval)
        if id(c) not in self.fixed:
            self._check_device(c)
            self.fixed[id(c)] = c, self._add_input(jax.typeof(c))
        return self.fixed[id(c)][1]

    def offer_result(self, value: Any) -> Any:
        """Returns the array for a tracer of this block, where the block's ops take arrays."""
        is_own = isinstance(value, jax.core.Tracer) and value._trace is self
        return self._wrap(value) if is_own and find_base_trace() is self else value

    def _check_device(self, array: Any) -> None:
        """Refuses what the user has put on one other device; the rest is checked with the call."""
        devices = array.devices()
        if not array.committed or len(devices) != 1 or self._jax_device in devices:
            return
        (device,) = devices
        raise make_device_error(jax.typeof(array), device, self._jax_device)

    def _add_input(self, aval: Any) -> Any:
        return self.new_arg(aval, None)

    def _bind(self, compute: Callable[[], Any]) -> Any:
        """Records ops of our own, whose results are not wrapped."""
        self._wraps = False
        try:
            with send_ops_to(self):
                return compute()
        finally:
            self._wraps = True

    def _wrap(self, results: Any) -> Any:
        if not self._wraps:
            return results
        if isinstance(results, list | tuple):
            return type(results)([self._wrap_one(each) for each in results])
        return self._wrap_one(results)

    def _wrap_one(self, value: Any) -> Any:
        """Returns the array for a tracer; tokens, references and the like stay what they are."""
        aval: Any = value.aval if isinstance(value, jax.core.Tracer) else None
        if not is_array_aval(aval):
            return value
        if is_key_dtype(aval.dtype):
            data = self._bind(lambda: jax.random.key_data(value))
            self._keys[id(data)] = data, value
            return wrap_key(aval.dtype, self._make_array(data))
        return self._make_array(value) if isinstance(aval.dtype, np.dtype) else value

    def _make_array(self, tracer: Any) -> Array:
        if (known := self._arrays.get(id(tracer))) is not None:
            return known
        name = f"output {len(self._made)}"
        buffer = GraphOutput(self, tracer, tracer.aval, self._jax_device, name)
        array = Array(buffer, 0, ArrayState.LIVE)
        self._made.append((weakref.ref(array), buffer))
        self._arrays[id(tracer)] = array
        return array


@functools.cache
def _pass_on_results() -> None:
    pass_on_results(_offer_result)


def _offer_result(value: Any) -> Any:
    """Returns an array for a tracer that a rule of JAX hands to a function of a block."""
    trace = recorder_state.recorder
    return trace.offer_result(value) if isinstance(trace, RecordedTrace) else value
