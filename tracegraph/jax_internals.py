"""The front end's one door to the parts of JAX that are not public.

A table says for each private name why the public API is not enough; a JAX without one of them is
refused when tracegraph is imported, by name. Members of exported classes are used too, which are
not documented: ``dtype._impl`` of a typed key's dtype, because ``jax.random.key_impl`` wants an
array; ``Primitive.get_bind_params``, ``Primitive.abstract_eval``, ``JaxprEqn.ctx`` and its
``manager``, without which an op cannot be bound again as JAX's own evaluation of a jaxpr binds it;
``Jaxpr.replace`` and ``JaxprEqn.replace``, because a jaxpr that is built anew loses its effects;
``Jaxpr.debug_info``, and a trace's ``frame.invars``, ``to_jaxpr``, ``invalidate``, to end a trace
that no function of JAX has begun.

This file is past 400 lines because it is the one door.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as extend_core
from jax.interpreters import ad

from tracegraph.runtime.jax_interop import KeyTy, load_private
from tracegraph.runtime.own_folders import OWN_FOLDERS
from tracegraph.runtime.source_lines import Line

PRIVATE_NAMES = {
    "jax._src.api_util.InternalFloatingPointError": "what JAX raises of an invalid result",
    "jax._src.api_util.maybe_recursive_nan_check": "its search for the op, in its own words",
    "jax._src.config._check_vma": "whether a `shard_map` follows what varies over its mesh",
    "jax._src.config.config_ext": "`make_setting`; `jax.make_user_context` sets a thread only",
    "jax._src.config.remove_size_one_mesh_axis_from_type": "types as if nothing were sharded",
    "jax._src.config.trace_context": "the settings under which `jax.jit` keeps programs apart",
    "jax._src.config.trace_context_names": "what these settings are called",
    "jax._src.distributed.global_state": "what processes tell each other without a collective",
    "jax._src.effects.control_flow_allowed_effects": "a loop takes known effects only",
    "jax._src.effects.custom_derivatives_allowed_effects": "so do custom derivatives",
    "jax._src.effects.remat_allowed_effects": "and `jax.checkpoint`",
    "jax._src.core.NamedAxisEffect": "an effect that moves no data",
    "jax._src.core.ShapedArray": "the type of an array's abstract value",
    "jax._src.core.Trace": "the base of what takes ops; see `mixed_precision/region_trace.py`",
    "jax._src.core.eval_trace": "what computes an op at once; see `trace_state`",
    "jax._src.core.extend_axis_env_nd": "the axis names that the body of a `shard_map` may use",
    "jax._src.core.set_current_trace": "what ops go to between two lines, not within a function",
    "jax._src.core.trace_state_strong_ref": "whether this thread traces, at every call",
    "jax._src.hashable_array.HashableArray": "an array among the parameters of a foreign call",
    "jax._src.interpreters.ad.LinearizeTrace": "whether ops are linearized for an eager `jax.vjp`",
    "jax._src.interpreters.ad.fallback_linearize_rule": "what a rule for `jax.vjp` is to return",
    "jax._src.interpreters.ad.primitive_linearizations": "such rules; see `define_linearization`",
    "jax._src.interpreters.mlir._lowerings": "who lowers an op: JAX, or a rule of the user's",
    "jax._src.interpreters.mlir._platform_specific_lowerings": "the same, for one platform",
    "jax._src.interpreters.partial_eval.DynamicJaxprTrace": "what records ops as `jax.jit` does",
    "jax._src.random.prng.prngs": "the implementations of typed keys; a public call computes one",
    "jax._src.source_info_util": "the user's line of an equation, and the line of an op bound anew",
    "jax._src.traceback_util": "hides the frames of a library in tracebacks",
    "jax._src.tree_util._registry": "which types are nodes of trees, and how JAX makes them",
}
_private = {
    path.rpartition(".")[2]: load_private(path, reason, door="tracegraph/jax_internals.py")
    for path, reason in PRIVATE_NAMES.items()
}
_ShapedArray: Any = _private["ShapedArray"]
_NamedAxisEffect: Any = _private["NamedAxisEffect"]
_source_info_util: Any = _private["source_info_util"]
for _folder in OWN_FOLDERS:
    _source_info_util.register_exclusion(_folder)
    _private["traceback_util"].register_exclusion(_folder)


_UNCHANGED = contextlib.nullcontext()
# The modules of `Primitive.bind` and of `jax.vjp`.
_TAKERS = ("jax._src.core", "jax._src.api")
_NO_SETTINGS = ("configs", "__weakref__")
# Raised for the results of a whole program; a user never sees it.
InvalidFloatSignal: Any = _private["InternalFloatingPointError"]
# Calls a function with debug settings on, op by op; always raises FloatingPointError.
rerun_op_by_op: Any = _private["maybe_recursive_nan_check"]
# The two classes are one since JAX 0.11, which has the second name, but does not export it.
_JAXPRS = (extend_core.Jaxpr, getattr(extend_core, "ClosedJaxpr", extend_core.Jaxpr))


# One is made per equation, and most equations of a line have an equal one: a tuple is made and
# found again in a fraction of the time.
class EquationContext(NamedTuple):
    """What a jaxpr records of an equation besides its operands and parameters.

    Attributes:
        traceback: JAX's traceback of the line that made it, or None.
        name_stack: JAX's name stack, relative to the outermost jaxpr.
        settings: JAX's settings when it was traced, those of the enclosing call first.
        effects: what it does besides computing its results.
    """

    traceback: Any
    name_stack: Any
    settings: tuple[Any, ...]
    effects: frozenset[Any]


class EquationOrigin(Protocol):
    """Where an op comes from; `ir.graph.Origin` is one."""

    @property
    def equation_context(self) -> EquationContext | None:
        """What its equation knew."""
        ...


class Equation(Protocol):
    """What is read of an op here; `ir.graph.Op` is one. The IR imports this file."""

    @property
    def primitive(self) -> Any:
        """JAX's primitive."""
        ...

    @property
    def operands(self) -> Sequence[Any]:
        """What it takes; each has an ``aval``."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Its parameters, as JAX names them."""
        ...

    @property
    def origin(self) -> EquationOrigin:
        """Where it comes from."""
        ...


# JAX's own function, without a frame around it: it runs at every call of a captured function.
read_settings: Any = _private["trace_context"]
# In their order; a setting of ours counts once its module is imported.
list_setting_names: Any = _private["trace_context_names"]
# What JAX does with an op in this thread: it computes it when `trace_state.value` is `eval_trace`.
trace_state: Any = _private["trace_state_strong_ref"]
eval_trace: Any = _private["eval_trace"]
_LinearizeTrace: Any = _private["LinearizeTrace"]
# What records ops as a jaxpr. `tracegraph/recording/recorded_trace.py` says what it overrides.
JaxprTrace: Any = _private["DynamicJaxprTrace"]
# The base of all traces: what an op goes through before it is computed or recorded.
BaseTrace: Any = _private["Trace"]


def make_primitive(name: str) -> Any:
    """Returns a new primitive with a list of results."""
    primitive = extend_core.Primitive(name)
    primitive.multiple_results = True
    return primitive


def define_linearization(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers how JAX linearizes a primitive for `jax.vjp`, beside its rule for `jax.jvp`.

    With the latter alone JAX traces the tangents of each op into a jaxpr, which it evaluates once:
    correct, and slower than most small ops. So it is where this JAX has another form of rules.

    Args:
        primitive: with a list of results.
        rule: from which operands have tangents, the operands and the parameters to the results,
            which of them have tangents, and a function from all tangents to those of the results.
    """
    form = _count_rule_results()

    def linearize(
        _is_vjp: bool, has_tangent: Sequence[bool], *values: Any, **params: Any
    ) -> tuple[Any, ...]:
        results, has_moved, move = rule(has_tangent, *values, **params)
        if form == 4:  # Until JAX 0.10.
            return results, has_moved, (), lambda _residuals, *tangents: move(tangents)
        return results, has_moved, (), None, lambda _residuals, _more, *tangents: move(tangents)

    if form in (4, 5):
        _private["primitive_linearizations"][primitive] = linearize


def pass_on_results(offer: Callable[[Any], Any]) -> None:
    """Makes JAX's rules for derivatives pass each result on through a function, for good.

    Where a function that is differentiated calls one of `jax.jit` or `jax.checkpoint`, these rules
    do not compute what the inner one returns of its operands: they hand it out as they got it.

    Args:
        offer: from a result to what the function that is differentiated gets.
    """
    primitives = (extend_core.primitives.jit_p, extend_core.primitives.remat_p)
    for rules in (_private["primitive_linearizations"], ad.primitive_jvps):
        for primitive in rules.keys() & primitives:
            rules[primitive] = functools.partial(_offer_results, rules[primitive], offer)


def _offer_results(
    rule: Callable[..., Any], offer: Callable[[Any], Any], /, *args: Any, **params: Any
) -> tuple[Any, ...]:
    results, *rest = rule(*args, **params)
    return [offer(each) for each in results], *rest


@functools.cache
def _count_rule_results() -> int:
    """Returns how many things a rule of JAX returns, as JAX's own one does for a new primitive."""
    primitive = make_primitive("linearized_identity")
    ad.primitive_jvps[primitive] = lambda values, tangents: (list(values), list(tangents))
    try:
        return len(_private["fallback_linearize_rule"](primitive, True, [True], np.float32(0)))
    finally:
        del ad.primitive_jvps[primitive]


def make_effect(name: str) -> Any:
    """Returns an effect of ours: an op that has it stays, though its results are not used."""
    kind = type(name, (extend_core.Effect,), {"__str__": lambda _self: name})
    return kind()


def allow_effect(kind: type) -> None:
    """Lets JAX trace loops, custom derivatives and checkpoints with ops of this effect in them."""
    for place in ("control_flow", "custom_derivatives", "remat"):
        _private[f"{place}_allowed_effects"].add_type(kind)


def find_key_value_store() -> Any:
    """Returns the store of `jax.distributed`; None in a program of one process."""
    return _private["global_state"].client


def is_eager_vjp() -> bool:
    """True where JAX linearizes ops for `jax.vjp` and computes their primal values at once."""
    trace = trace_state.value
    return type(trace) is _LinearizeTrace and trace.is_vjp and trace.parent_trace is eval_trace


def embeds_arrays() -> bool:
    """True where `jax.jit` makes closed-over arrays a part of the program, not inputs of it.

    Scalars it always does. The option that changes this is not documented.
    """
    return getattr(jax.config, "jax_use_simplified_jaxpr_constants", True) is False


def make_setting(name: str, default: Any) -> Any:
    """Returns a setting of ours, of the process and of a thread, that `read_settings` reads too.

    So another value is another signature, at no cost for a call. Programs of `jax.jit` that are
    compiled already stay so.

    Args:
        name: as reports show it.
        default: hashable.
    """
    make = _private["config_ext"].Config
    return make(name, default, include_in_jit_key=False, include_in_trace_context=True)


def equation_context(equation: Any) -> EquationContext:
    """Returns the context of an equation of a jaxpr."""
    source = equation.source_info
    return EquationContext(
        source.traceback, source.name_stack, (equation.ctx,), frozenset(equation.effects)
    )


def nest_contexts(outer: EquationContext, inner: EquationContext) -> EquationContext:
    """Returns the context of an op that moves out of a call: the call's scope, then its own."""
    return EquationContext(
        inner.traceback or outer.traceback,
        outer.name_stack + inner.name_stack,
        tuple(dict.fromkeys(outer.settings + inner.settings)),
        inner.effects,
    )


def describe_scope(context: EquationContext) -> str:
    """Returns the name stack as text, as ``transpose(jvp(layer))``."""
    return str(context.name_stack)


def read_frames(context: EquationContext) -> Iterator[tuple[CodeType, int]]:
    """Yields code and instruction of each frame of an equation, the innermost first."""
    if context.traceback is not None:
        yield from zip(*context.traceback.raw_frames(), strict=True)


def list_lines(context: EquationContext) -> Iterator[Line]:
    """Yields the lines that an equation comes from, the innermost first; JAX's own among them."""
    for code, instruction in read_frames(context):
        frame = _source_info_util.raw_frame_to_frame(code, instruction)
        yield Line(frame.file_name, frame.start_line, frame.function_name)


def describe_current_scope() -> str:
    """Returns the name stack that an op of this thread gets now, as text."""
    return str(_source_info_util.current_name_stack())


def describe_source(context: EquationContext) -> str | None:
    """Returns the user's line as ``file.py:12 in step``, or None where JAX does not know it."""
    frame = _source_info_util.user_frame(context.traceback)
    if frame is None:
        return None
    function = frame.function_name.rpartition("<locals>.")[2]
    return f"{_name_file(frame.file_name)}:{frame.start_line} in {function}"


# Called for every op; a function's ops come from few files.
@functools.lru_cache(maxsize=256)
def _name_file(path: str) -> str:
    return pathlib.Path(path).name


def find_source_path(op: Equation) -> str | None:
    """Returns the user's line with its whole path, as ``/home/me/file.py:12``, or None."""
    context = op.origin.equation_context
    frame = _source_info_util.user_frame(context.traceback) if context is not None else None
    return None if frame is None else f"{frame.file_name}:{frame.start_line}"


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jaxpr and the arrays it closes over; JAX 0.11 made the two classes one.

    What a kernel of Pallas has traced inside of itself holds its own references, which are tracers:
    they are parameters.
    """
    consts = tuple(getattr(jaxpr, "consts", ()))
    is_open = any(_is_traced_reference(each) for each in consts)
    return getattr(jaxpr, "jaxpr", jaxpr), () if is_open else consts


def _is_traced_reference(value: Any) -> bool:
    return isinstance(value, Tracer) and hasattr(value.aval, "inner_aval")


def replace_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """Returns a jaxpr with other equations, closed or open as the given one."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    replaced = inner.replace(eqns=list(equations))
    return replaced if isinstance(jaxpr, extend_core.Jaxpr) else jaxpr.replace(jaxpr=replaced)


@contextlib.contextmanager
def send_ops_to(trace: Any) -> Iterator[None]:
    """Makes a trace record every op of this thread, with scopes that begin anew."""
    with _source_info_util.reset_name_stack(), _private["set_current_trace"](trace):
        yield


def run_in(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a trace take the ops of this thread, in the scopes that they are in."""
    return _private["set_current_trace"](trace)


def drop_open_trace() -> None:
    """Empties the trace that this thread makes of a function, which has just raised.

    JAX keeps an unfinished trace, with the arrays that the function closes over, for ever: each of
    its constants has a finalizer that holds the trace.
    """
    trace = trace_state.value
    # Without `jax.jit` ops go to the trace around it, which goes on.
    if isinstance(trace, JaxprTrace) and not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        trace.invalidate()


def is_asked_for_operand() -> bool:
    """True where JAX asks for a value to bind it, or to differentiate there; called by a handler.

    Where it closes a trace it asks, too, with the outer trace in charge already: `jax.jit` passes
    on the tracers that the function holds, and would make constants of arrays.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _name_module(frame).startswith("tracegraph."):
        frame = frame.f_back
    return frame is not None and _name_module(frame) in _TAKERS


def _name_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def find_base_trace() -> Any:
    """Returns what takes ops of this thread on values that are neither differentiated nor mapped.

    Derivatives and `jax.vmap` hand such ops on to the trace that they were called in.
    """
    trace = trace_state.value
    while trace is not eval_trace and not isinstance(trace, JaxprTrace):
        outer = getattr(trace, "parent_trace", None)
        if outer is None:
            break
        trace = outer
    return trace


def has_kept_trace(outermost: Any) -> bool:
    """True where this thread traces a function inside of a trace, and JAX may keep what it traces.

    The tangents of `jax.vjp` are traced once for each call.
    """
    trace = find_base_trace()
    is_inner = isinstance(trace, JaxprTrace) and trace is not outermost
    return is_inner and getattr(trace, "tag", None) is None


@functools.cache
def make_debug_info() -> Any:
    """Returns JAX's words for a program without a function; made where nothing is traced."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info


def close_trace(trace: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns what a trace recorded as a closed jaxpr, and makes the trace drop it.

    Args:
        trace: a `JaxprTrace` that no op is sent to any more.
        inputs: of its tracers, those that are inputs, in order.
        outputs: of its tracers, the results.
    """
    trace.frame.invars = [tracer.val for tracer in inputs]
    source = _source_info_util.current()
    jaxpr, arrays = trace.to_jaxpr(list(outputs), make_debug_info(), source)
    trace.invalidate()
    close: Any = _JAXPRS[1]
    return close(jaxpr, arrays)


@functools.cache
def _find_precision(setting: Any) -> Any:
    del setting  # What the answer depends on.
    one = jax.ShapeDtypeStruct((1, 1), np.float32)
    (equation,) = open_jaxpr(jax.make_jaxpr(jax.lax.dot)(one, one))[0].eqns
    return equation.params["precision"]


def find_open_precision() -> Any:
    """Returns the precision that JAX's settings give a matmul that names none."""
    return _find_precision(getattr(jax.config, "jax_default_matmul_precision", None))


@functools.cache
def list_primitive_names() -> frozenset[str]:
    """Returns the names of JAX's primitives."""
    found = vars(extend_core.primitives).values()
    return frozenset(each.name for each in found if isinstance(each, extend_core.Primitive))


def call_jaxpr(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Computes what a closed jaxpr says, op by op, where the ops of this thread go."""
    return extend_core.jaxpr_as_fun(jaxpr)(*operands)


def infer_dtypes(primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Returns the dtypes that JAX gives the results of an op."""
    avals = [jax.typeof(operand) for operand in operands]
    results, _ = primitive.abstract_eval(*avals, **params)
    return [each.dtype for each in (results if primitive.multiple_results else [results])]


def enclose(function: Any, around: Any, *args: Any) -> Any:
    """Returns a function, or JAX's record of one, that is called by another function.

    Args:
        function: as a trace is given it.
        around: called as ``around(function, *args, ...)``; of a module, since JAX compares records.
        *args: hashable.
    """
    if hasattr(function, "wrap"):
        return function.wrap(around, args, None)
    return functools.partial(around, function, *args)


def make_function(jaxpr: Any) -> Any:
    """Returns the function that a closed jaxpr describes, which is traced at most once per type."""
    return jax.jit(extend_core.jaxpr_as_fun(jaxpr))


def is_jaxpr(value: Any) -> bool:
    """True for a jaxpr, closed or open."""
    return isinstance(value, _JAXPRS)


def is_literal(atom: Any) -> bool:
    """True for a scalar written into a jaxpr, where a variable could stand."""
    return isinstance(atom, extend_core.Literal)


def name_jaxprs(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the jaxprs among a primitive's parameters, as ``jaxpr`` or ``branches[0]``."""
    found: list[tuple[str, Any]] = []
    for name, value in params.items():
        if isinstance(value, _JAXPRS):
            found.append((name, value))
        elif isinstance(value, (tuple, list)):
            items = enumerate(value)
            found += [(f"{name}[{i}]", item) for i, item in items if isinstance(item, _JAXPRS)]
    return found


def rewrite_jaxprs(params: Mapping[str, Any], write: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Returns a primitive's parameters with their jaxprs rewritten; the same object if none is."""
    written = {name: _rewrite_value(value, write) for name, value in params.items()}
    is_same = all(written[name] is value for name, value in params.items())
    return params if is_same else written


def _rewrite_value(value: Any, write: Callable[[Any], Any]) -> Any:
    if is_jaxpr(value):
        return write(value)
    if not isinstance(value, tuple | list):
        return value
    items = [write(item) if is_jaxpr(item) else item for item in value]
    if all(one is other for one, other in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def expand_equation(equation: Any, operands: Sequence[Any]) -> Any:
    """Returns what a ``HiPrim`` does, as `custom_root` is one, as a closed jaxpr; None if none."""
    primitive = equation.params.get("_prim")
    if primitive is None:
        return None

    def expand(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves)))

    return jax.make_jaxpr(expand)(*operands)


def measure_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a ``scan`` are constants and how many are carried."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def fit_jaxpr(closed: Any, example: Any) -> Any:
    """Returns a closed jaxpr without arrays as an op has it that has an example: closed or open."""
    return closed if isinstance(example, type(closed)) else closed.jaxpr


def bind_op(op: Equation, operands: Sequence[Any]) -> list[Any]:
    """Binds the op's primitive on arrays or tracers, as JAX's evaluation of a jaxpr does.

    Line, scope and settings of the original equation are in force, so that what is lowered from
    it names the user's code.

    Args:
        op: the op.
        operands: one array, tracer or scalar per operand.

    Returns:
        One array or tracer per result.
    """
    with contextlib.ExitStack() as stack:
        _enter_context(stack, op.origin.equation_context)
        # JAX's own rules pop from the parameters, so they get a copy.
        params = op.primitive.get_bind_params(dict(op.params))
        results = op.primitive.bind(*operands, **params)
    return list(results) if op.primitive.multiple_results else [results]


def bind_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds an equation of a jaxpr on arrays or tracers, as JAX's evaluation of a jaxpr does."""
    with hold_equation(equation):
        params = equation.primitive.get_bind_params(dict(equation.params))
        results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


@contextlib.contextmanager
def hold_equation(equation: Any) -> Iterator[None]:
    """Puts line, scope and settings of an equation in force."""
    with contextlib.ExitStack() as stack:
        _enter_context(stack, equation_context(equation))
        yield


def make_open(closed: Any) -> Any:
    """Returns a closed jaxpr that closes over no array as an open one."""
    return closed if isinstance(closed, extend_core.Jaxpr) else closed.jaxpr


def infer_results(op: Equation) -> tuple[Any, ...] | None:
    """Returns the abstract values that JAX gives the op's results, None where it has no rule."""
    if not _has_rule(op.primitive):
        return None
    avals = [operand.aval for operand in op.operands]
    with contextlib.ExitStack() as stack:
        _enter_context(stack, op.origin.equation_context)
        results, _ = op.primitive.abstract_eval(*avals, **op.params)
    return tuple(results) if op.primitive.multiple_results else (results,)


@contextlib.contextmanager
def bind_axes(op: Equation) -> Iterator[None]:
    """Binds the axis names that an op gives its sub-graphs, as JAX does while it traces them.

    A `shard_map` names the axes of its mesh. Without them JAX has no types for the ops in its
    body: a collective, or the cast of a constant to a value that varies over the mesh.
    """
    if op.primitive.name != "shard_map":
        yield
        return
    mesh = op.params["mesh"]
    names = {*op.params["newly_manual_axes"], *mesh.manual_axes}
    sizes = [(name, size) for name, size in mesh.shape.items() if name in names]
    with _private["extend_axis_env_nd"](sizes), _private["_check_vma"](op.params["check_vma"]):
        yield


def drop_unit_axes(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which mesh axes of size 1 do not appear in types.

    A graph reads plain memory of one device, so its inputs have types without a mesh. Where an
    argument's type names one, which explicit meshes do, the function may ask for it: JAX must take
    an axis of size 1 for no axis at all.

    Args:
        leaves: the arguments of a call; other calls are traced with the settings as they are.
    """
    named = [leaf for leaf in leaves if _has_mesh(leaf)]
    if any(leaf.sharding.num_devices > 1 for leaf in named):
        # A call over several devices: the function sees the types that it has under `jax.jit`.
        return _UNCHANGED
    is_named = any(not jax.typeof(leaf).sharding.mesh.empty for leaf in named)
    return _private["remove_size_one_mesh_axis_from_type"](True) if is_named else _UNCHANGED


def _has_mesh(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, jax.sharding.NamedSharding)


def find_effects(op: Equation) -> frozenset[Any]:
    """Returns JAX's effects of the op; none for an op that was not traced."""
    context = op.origin.equation_context
    return frozenset() if context is None else context.effects


def has_data_effects(op: Equation) -> bool:
    """True when the op does more than compute its results (naming an axis does not count)."""
    return any(not isinstance(effect, _NamedAxisEffect) for effect in find_effects(op))


def has_plain_placement(op: Equation) -> bool:
    """True when a call says nothing about devices, layouts or compiler options."""
    shardings = (*op.params.get("in_shardings", ()), *op.params.get("out_shardings", ()))
    layouts = (*op.params.get("in_layouts", ()), *op.params.get("out_layouts", ()))
    has_sharding = any(isinstance(each, jax.sharding.Sharding) for each in shardings)
    has_layout = any(each is not None for each in layouts)
    return not (has_sharding or has_layout or op.params.get("compiler_options_kvs"))


def make_array_aval(
    shape: Sequence[int], dtype: Any, *, weak_type: bool, is_on_host: bool = False
) -> Any:
    """Returns the abstract value of an array on one device, or in its host memory."""
    space = jax.memory.Space.Host if is_on_host else jax.memory.Space.Device
    return _ShapedArray(tuple(shape), dtype, weak_type=weak_type, memory_space=space)


def is_host_aval(aval: Any) -> bool:
    """True for the abstract value of an array in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def eval_op_by_op(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Computes a closed jaxpr as JAX computes what no `jax.jit` is around."""
    return extend_core.jaxpr_as_fun(jaxpr)(*values)


def is_key_dtype(dtype: Any) -> bool:
    """True for the dtype of typed PRNG keys.

    Example:
        >>> import jax
        >>> is_key_dtype(jax.random.key(0).dtype)
        True
    """
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def list_registered_types() -> list[type]:
    """Returns the types that are registered as nodes of trees, the latest last."""
    return list(_private["_registry"])


def find_dataclass_fields(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns the names of the children and of the other fields of a registered dataclass.

    JAX makes a node of such a type without a check of how many there are.

    Returns:
        None for a type that was registered in another way than by `register_dataclass`.
    """
    entry = _private["_registry"].get(kind)
    make: Any = getattr(entry, "from_iter", None)
    names: tuple[str, ...] = getattr(getattr(make, "__code__", None), "co_freevars", ())
    if not {"data_fields", "meta_fields"} <= set(names):
        return None
    held = {name: cell.cell_contents for name, cell in zip(names, make.__closure__, strict=True)}
    return held["data_fields"], held["meta_fields"]


def find_key_dtype(implementation: str) -> Any:
    """Returns the dtype of typed keys of an implementation; None if none has this name.

    Example:
        >>> import jax
        >>> find_key_dtype("threefry2x32") == jax.random.key(0).dtype
        True
    """
    found = _private["prngs"].get(implementation)
    return None if found is None else KeyTy(found)


def find_key_implementation(aval: Any) -> Any:
    """Returns the functions that draw from typed keys of a type; None for another type."""
    return aval.dtype._impl if is_key_dtype(getattr(aval, "dtype", None)) else None


def list_lowering_rules(primitive: Any) -> list[Any]:
    """Returns what writes an op for XLA, on any platform."""
    tables = (_private["_lowerings"], *_private["_platform_specific_lowerings"].values())
    return [table[primitive].rule for table in tables if primitive in table]


def describe_settings(context: EquationContext | None) -> list[dict[str, Any]]:
    """Returns the settings of JAX that an equation was traced under, by name.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x: x + 1)(1.0)
        >>> found = describe_settings(equation_context(open_jaxpr(jaxpr)[0].eqns[0]))
        >>> "threefry_partitionable" in found[0]
        True
    """
    return [
        # `configs` holds the settings once more, and a weak reference holds nothing.
        {name: getattr(each, name) for name in each.__slots__ if name not in _NO_SETTINGS}
        for each in (context.settings if context else ())
    ]


def unwrap_array(value: Any) -> Any:
    """Returns the array of JAX's wrapper that makes one hashable; other values as they are."""
    return value.val if isinstance(value, _private["HashableArray"]) else value


def is_array_aval(aval: Any) -> bool:
    """True for the abstract value of an array; references and tokens have others."""
    return type(aval) is _ShapedArray


def _enter_context(stack: contextlib.ExitStack, context: EquationContext | None) -> None:
    if context is None:
        return
    names = _source_info_util.current_name_stack() + context.name_stack
    stack.enter_context(_source_info_util.user_context(context.traceback, name_stack=names))
    for settings in context.settings:
        stack.enter_context(settings.manager)


def _has_rule(primitive: Any) -> bool:
    rule = getattr(primitive.abstract_eval, "__func__", None)
    return rule is not extend_core.Primitive.abstract_eval


def describe_physical(aval: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and dtype of the memory that holds a value.

    A typed PRNG key is its key data; ``float0``, which has no bytes in NumPy, is bool as in XLA.
    """
    if is_key_dtype(aval.dtype):
        return (*aval.shape, *aval.dtype._impl.key_shape), np.dtype(np.uint32)
    if aval.dtype == jax.dtypes.float0:
        return tuple(aval.shape), np.dtype(bool)
    return tuple(aval.shape), np.dtype(aval.dtype)


def to_logical(array: Any, aval: Any) -> Any:
    """Returns physical memory as the value that it holds; traceable."""
    if is_key_dtype(aval.dtype):
        return jax.random.wrap_key_data(array, impl=aval.dtype._impl)
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    # XLA leaves out what moves there and back.
    return jax.device_put(array, jax.memory.Space.Host) if is_host_aval(aval) else array


def to_physical(value: Any, aval: Any) -> Any:
    """Returns a value as the array that its memory holds; traceable."""
    if is_key_dtype(aval.dtype):
        return jax.random.key_data(value)
    if aval.dtype == jax.dtypes.float0:
        return jnp.zeros(aval.shape, bool)
    if is_host_aval(aval):
        return jax.device_put(value, jax.memory.Space.Device)
    if isinstance(value, jax.Array):
        return value
    # With a dtype, `asarray` makes a strong type of a Python number.
    number = jnp.asarray(value)
    return number if jax.typeof(number) == aval else jnp.asarray(value, aval.dtype)
