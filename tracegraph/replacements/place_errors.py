"""How far a replacement is from what it replaces, measured on the values at its place.

Note [Errors in place]
The results of a whole train step are no measure: an optimizer that divides a gradient by its own
size turns the last bit of one that is nearly zero into a step in the other direction. So each
replacement is measured where it stands: XLA computes the function up to it, with the options that
it has there, and what is compared is how far both sides are from a reference that adds up in a
wider type. That is a program of its own, of which XLA does not time how it is computed fastest:
for one layer of attention, trying out matmuls of the reference took half a minute. Layers of a
model share one. Threads compile these programs, and those that compute the values, bodies of loops
included: all at once.

Where a result is the place of the largest element, what is compared is the element that is found
there, in the reference, with the largest one. Both may have been rounded before they were compared,
so each side may be off by a whole unit in the last place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.ir.interpreter import evaluate_graph
from tracegraph.passes.dead_code import DeadCode
from tracegraph.replacements.bodies import describe, enter_body, group_by_body
from tracegraph.replacements.match import Match, OpBody
from tracegraph.runtime.jax_interop import carry_settings

XlaOptions = Sequence[tuple[str, bool | str]]
# What runs once need not be fast: matmuls of the library, which are there, and its first algorithm.
UNTIMED: dict[str, bool | str] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}
# Programs that are compiled at once.
MAX_COMPILERS = 8


@dataclasses.dataclass(frozen=True)
class PlaceError:
    """The largest differences from the reference at one place, and what is allowed.

    Attributes:
        ours: of the replacement; infinite where only one side is finite.
        theirs: of XLA.
        rounding: half a unit in the last place of the largest result; of a sum in float32 times
            the root of the number of its terms, which is what rounding each of them comes to.
    """

    ours: float
    theirs: float
    rounding: float

    @property
    def is_allowed(self) -> bool:
        """True where the replacement is as right as XLA, or as its type can be."""
        return self.ours <= max(self.theirs, self.rounding)


def measure_options(
    graph: Graph,
    matches: Sequence[Match],
    arguments: Sequence[Any],
    options: tuple[XlaOptions, XlaOptions],
) -> list[PlaceError]:
    """Returns the errors of ops that stay, where XLA compiles with other options.

    Args:
        graph: that the matches were found in.
        matches: of it; what they compute is not looked at.
        arguments: one array per input; they are not changed.
        options: XLA's, over its defaults: those that it has, and those that are tried.
    """
    usual, other = (measure_places(graph, matches, arguments, each) for each in options)
    return [
        dataclasses.replace(theirs, ours=ours.theirs)
        for theirs, ours in zip(usual, other, strict=True)
    ]


def measure_places(
    graph: Graph,
    matches: Sequence[Match],
    arguments: Sequence[Any],
    options: XlaOptions = (),
) -> list[PlaceError]:
    """Returns the errors of matches on the values of one call.

    Args:
        graph: that the matches were found in.
        matches: of it.
        arguments: one array per input; they are not changed.
        options: XLA's, over its defaults.
    """
    with ThreadPoolExecutor(MAX_COMPILERS, "tracegraph-errors") as threads:
        programs = _PlaceCompiler(threads, options).compile_programs(graph, matches)
        return _run_programs(programs, arguments)


@dataclasses.dataclass(frozen=True)
class _Programs:
    """What measures the matches of a graph, while it is compiled.

    Attributes:
        graph: that the matches were found in.
        matches: of it.
        missing: the values that are needed and not given.
        compute: the program that computes them, of inputs and constants.
        compare: the program of each match outside of bodies.
        inside: the programs of each body with matches.
    """

    graph: Graph
    matches: Sequence[Match]
    missing: tuple[Value, ...]
    compute: Future[jax.stages.Compiled]
    compare: Sequence[Future[jax.stages.Compiled]]
    inside: Mapping[OpBody, _Programs]


@dataclasses.dataclass(frozen=True)
class _PlaceCompiler:
    """Compiles in threads; programs that compare are one where their text is.

    Attributes:
        threads: that compile.
        options: XLA's, of what computes values.
        comparisons: what compares, by its number of inputs and its text.
    """

    threads: ThreadPoolExecutor
    options: XlaOptions
    comparisons: dict[tuple[int, str], Future[jax.stages.Compiled]] = dataclasses.field(
        default_factory=dict
    )

    def compile_programs(self, graph: Graph, matches: Sequence[Match]) -> _Programs:
        """Begins to compile what measures matches, those inside of bodies included."""
        own = [match for match in matches if not match.path]
        groups = group_by_body(matches)
        needed = [each for match in own for each in (*match.inputs, *match.results)]
        needed += [operand for body in groups for operand in body.op.operands]
        given = _list_given(graph)
        known = frozenset(given)
        missing = {each: None for each in needed if isinstance(each, Value) and each not in known}
        # Constants are arguments: in the program, XLA would fold them.
        cut = dataclasses.replace(graph, inputs=given, constants=(), outputs=tuple(missing))
        run = functools.partial(evaluate_graph, DeadCode().apply(cut))
        types = [describe(value.aval) for value in given]
        jitted = jax.jit(run, compiler_options=dict(self.options))
        compute = self._submit(jitted.lower(*types))
        makers = {value: op for op in graph.ops for value in op.results}
        inside = {body: self.compile_programs(body.graph, each) for body, each in groups.items()}
        compare = [self._compile_comparison(match, makers) for match in own]
        return _Programs(graph, matches, tuple(missing), compute, compare, inside)

    def _compile_comparison(
        self, match: Match, makers: Mapping[Value, Op]
    ) -> Future[jax.stages.Compiled]:
        lowered = _lower_comparison(match, makers)
        key = len(match.inputs), lowered.as_text()
        if key not in self.comparisons:
            self.comparisons[key] = self._submit(lowered, UNTIMED)
        return self.comparisons[key]

    def _submit(
        self, lowered: jax.stages.Lowered, options: dict[str, bool | str] | None = None
    ) -> Future[jax.stages.Compiled]:
        return self.threads.submit(carry_settings(functools.partial(lowered.compile, options)))


def _run_programs(programs: _Programs, arguments: Sequence[Any]) -> list[PlaceError]:
    """Returns the errors of matches, in their order."""
    graph, matches = programs.graph, programs.matches
    given = [*arguments, *(constant.array for constant in graph.constants)]
    values = dict(zip(_list_given(graph), given, strict=True))
    computed = programs.compute.result()(*given)
    values |= dict(zip(programs.missing, computed, strict=True))
    own = [match for match in matches if not match.path]
    pairs = zip(own, programs.compare, strict=True)
    errors = iter([PlaceError(*_compare(one, each.result(), values)) for one, each in pairs])
    inside = {
        body: iter(_run_programs(inner, enter_body(body, _read_all(body.op.operands, values))))
        for body, inner in programs.inside.items()
    }
    return [next(inside[match.path[0]] if match.path else errors) for match in matches]


def _list_given(graph: Graph) -> tuple[Value, ...]:
    return (*graph.inputs, *(constant.value for constant in graph.constants))


def _lower_comparison(match: Match, makers: Mapping[Value, Op]) -> jax.stages.Lowered:
    """Returns the program of the three numbers of a `PlaceError`."""
    roundings = [_find_rounding(value, makers, match.terms) for value in match.results]

    def compare(given: Sequence[Any], theirs: Sequence[Any]) -> Any:
        sides = match.compute(*given), theirs, match.reference(*given)
        rows = [
            _find_errors(one, other, right, rounding)
            for one, other, right, rounding in zip(*sides, roundings, strict=True)
            if right.size and jnp.issubdtype(right.dtype, jnp.floating)
        ]
        return jnp.max(jnp.stack(rows), axis=0) if rows else jnp.zeros(3, jnp.float32)

    given, theirs = (
        [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in operands]
        for operands in (match.inputs, match.results)
    )
    # With all of its parameters, so that programs of one text take the same arrays.
    return jax.jit(compare, keep_unused=True).lower(given, theirs)


def _compare(match: Match, program: Any, values: Mapping[Value, Any]) -> list[float]:
    """Returns the three numbers of a `PlaceError`."""
    given = _read_all(match.inputs, values)
    theirs = [values[value] for value in match.results]
    return [float(each) for each in jax.device_get(program(given, theirs))]


def _read_all(operands: Sequence[Operand], values: Mapping[Value, Any]) -> list[Any]:
    given = [each.value if isinstance(each, Literal) else values[each] for each in operands]
    pairs = zip(given, operands, strict=True)
    return [jnp.asarray(array, operand.aval.dtype) for array, operand in pairs]


def _find_errors(ours: Any, theirs: Any, right: Any, rounding: float) -> Any:
    """Returns the three numbers of one result."""
    if jnp.issubdtype(theirs.dtype, jnp.integer):
        sides = [jnp.take_along_axis(right, each[..., None], -1)[..., 0] for each in (ours, theirs)]
        (ours, theirs), right = sides, right.max(-1)
    largest = jnp.max(jnp.where(jnp.isfinite(right), jnp.abs(right), 0)).astype(jnp.float32)
    return jnp.stack([_differ(ours, right), _differ(theirs, right), largest * rounding])


def _differ(one: Any, right: Any) -> Any:
    """Returns the largest difference; infinite where only one side is an infinity or a NaN."""
    is_finite = jnp.isfinite(right)
    one = one.astype(right.dtype)
    rest = [jnp.where(is_finite, 0, each) for each in (one, right)]
    distance = jnp.max(jnp.where(is_finite, jnp.abs(one - right), 0)).astype(jnp.float32)
    is_alike = jnp.array_equal(*rest, equal_nan=True) & ~jnp.isnan(distance)
    return jnp.where(is_alike, distance, jnp.inf)


def _find_rounding(value: Value, makers: Mapping[Value, Op], terms: int) -> float:
    """Returns what rounding makes of a result of one: see `PlaceError.rounding`."""
    maker, dtype, units = makers.get(value), value.dtype, 0.5
    if maker is not None and maker.name == "argmax":
        dtype, units = maker.operands[0].aval.dtype, 1.0
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    # Partial sums are float32, and so is the reference: theirs are no better than that.
    units *= math.sqrt(terms) if jnp.finfo(dtype).bits >= 32 else 1.0
    return float(jnp.finfo(dtype).eps) * units
