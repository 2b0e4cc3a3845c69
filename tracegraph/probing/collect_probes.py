"""Turns the probes of a traced function into further results of it, see Note [Probes].

What is called once is inlined where it holds a probe: `jit`, custom derivatives, `checkpoint`, and
what solves in a `custom_linear_solve` or a `custom_root`. A scan gives the values of its
iterations, stacked. What a derivative computes or solves again is not probed again. While loops and
branches are refused, and so is a probe in the linear function of a solve that never calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from tracegraph.jax_internals import (
    bind_equation,
    describe_source,
    equation_context,
    expand_equation,
    hold_equation,
    is_literal,
    make_open,
    measure_scan,
    name_jaxprs,
    open_jaxpr,
)
from tracegraph.probing.probe import has_probes, probe_p
from tracegraph.probing.probe_errors import make_place_error, make_twice_error, make_unrun_error

_SOLVE = "custom_linear_solve"

_CALLS = frozenset(
    ["jit", "pjit", "closed_call", "core_closed_call", "core_call", "call", "custom_jvp_call"]
    + ["custom_vjp_call", "custom_vjp_call_jaxpr", "eval_jaxpr"]
)
_CHECKPOINTS = frozenset(["checkpoint", "remat2", "remat"])


@dataclasses.dataclass(frozen=True)
class ProbeSpec:
    """A probe of a function.

    Attributes:
        name: as the user gave it.
        tree: of its value.
        source: the user's line.
    """

    name: str
    tree: Any
    source: str


@dataclasses.dataclass(frozen=True)
class _Solves:
    """What is known of the linear solves of a function, in all its loops.

    Attributes:
        names: of the probes that a solve keeps, by the identity of its functions' jaxprs.
        first: the equation that keeps them, by the same.
        skipped: the line of each probe in a linear function.
    """

    names: dict[int, frozenset[str]] = dataclasses.field(default_factory=dict)
    first: dict[int, Any] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)


def holds_probes(jaxpr: Any) -> bool:
    """True for a jaxpr with a probe in it, or in a function of a linear solve: those JAX hides."""
    if has_probes(jaxpr):
        return True
    opened, _ = open_jaxpr(jaxpr)
    return any(holds_probes(inner) for each in opened.eqns for _, inner in name_jaxprs(each.params))


def collect_probes(closed: Any) -> tuple[Any, tuple[ProbeSpec, ...]]:
    """Returns a closed jaxpr with the leaves of its probes as further results, and the probes.

    Args:
        closed: of a whole function.

    Raises:
        CaptureError: a name is used twice, or a probe is where no one value can be kept.
    """
    specs: list[ProbeSpec] = []

    def run(*leaves: Any) -> list[Any]:
        collector = _Collector(is_kept=True)
        results = collector.evaluate(closed, leaves)
        specs[:] = collector.specs
        collector.check_skipped()
        return [*results, *collector.values]

    jaxpr, _ = open_jaxpr(closed)
    types = [
        jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype, weak_type=each.aval.weak_type)
        for each in jaxpr.invars
    ]
    return jax.make_jaxpr(run)(*types), tuple(specs)


class _Collector:
    """Evaluates jaxprs in a trace, and collects what their probes pass on.

    Args:
        is_kept: False where probes are dropped.
        outer: of the function that a loop is in.
    """

    def __init__(self, *, is_kept: bool, outer: _Collector | None = None) -> None:
        self._is_kept = is_kept
        self._solves = _Solves() if outer is None else outer._solves
        # Names that a derivative's solve does not keep again.
        self._dropped: frozenset[str] = frozenset() if outer is None else outer._dropped
        self.specs: list[ProbeSpec] = []
        self.values: list[Any] = []

    def evaluate(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr, closed or open, on tracers."""
        opened, own = open_jaxpr(jaxpr)
        known = dict(zip(opened.constvars, own, strict=True))
        known.update(zip(opened.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else known[atom]

        for equation in opened.eqns:
            results = self._apply(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in opened.outvars]

    def _apply(self, equation: Any, operands: list[Any]) -> list[Any]:
        if equation.primitive is probe_p:
            self._keep(equation, operands)
            return operands
        held = [each for _, each in name_jaxprs(equation.params) if holds_probes(each)]
        if not held and not has_probes(equation):
            return bind_equation(equation, operands)
        name = equation.primitive.name
        with hold_equation(equation):
            if name in _CALLS:
                key = "call_jaxpr" if "call_jaxpr" in equation.params else "jaxpr"
                key = key if key in equation.params else "fun_jaxpr"
                return self.evaluate(equation.params[key], operands)
            if name == "scan":
                return self._scan(equation, operands)
            if name in _CHECKPOINTS:
                return self._recompute(equation, operands)
            if name == _SOLVE:
                return self._solve(equation, operands)
            expanded = expand_equation(equation, operands)
            if expanded is not None:
                return self.evaluate(expanded, operands)
        found = [probe for each in held for probe in _list_probes(each)]
        probe, line = found[0] if found else ("", _locate(equation))
        raise make_place_error(name, line, probe)

    def check_skipped(self) -> None:
        """Refuses a probe in a linear function that nothing calls.

        Raises:
            CaptureError: there is one.
        """
        kept = {spec.name for spec in self.specs}
        for name, source in self._solves.skipped.items():
            if name not in kept:
                raise make_unrun_error(name, source)

    def _keep(self, equation: Any, operands: list[Any]) -> None:
        if not self._is_kept or equation.params["name"] in self._dropped:
            return
        params = equation.params
        self._add(ProbeSpec(params["name"], params["tree"], _locate(equation)), operands)

    def _add(self, spec: ProbeSpec, values: Sequence[Any]) -> None:
        for other in self.specs:
            if other.name == spec.name:
                raise make_twice_error(spec.name, other.source, spec.source)
        self.specs.append(spec)
        self.values += values

    def _scan(self, equation: Any, operands: list[Any]) -> list[Any]:
        params = equation.params
        constant_count, carry_count = measure_scan(params)
        constants, rest = operands[:constant_count], operands[constant_count:]
        specs: list[ProbeSpec] = []

        def body(carry: Any, xs: Any) -> Any:
            inner = _Collector(is_kept=self._is_kept, outer=self)
            results = inner.evaluate(params["jaxpr"], [*constants, *carry, *xs])
            specs[:] = inner.specs
            return results[:carry_count], (results[carry_count:], inner.values)

        carry, (stacked, probed) = lax.scan(
            body,
            rest[:carry_count],
            rest[carry_count:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            _split_transpose=params.get("_split_transpose", False),
        )
        start = 0
        for spec in specs:
            self._add(spec, probed[start : start + spec.tree.num_leaves])
            start += spec.tree.num_leaves
        return [*carry, *stacked]

    def _solve(self, equation: Any, operands: list[Any]) -> list[Any]:
        """Inlines what solves; the linear functions beside it only make derivatives."""
        functions, lengths = equation.params["jaxprs"], equation.params["const_lengths"]
        solves = self._solves
        if self._is_kept:
            solves.skipped.update(_list_probes(functions.matvec))
        start = lengths.matvec + lengths.vecmat
        own = operands[start : start + lengths.solve]
        inputs = [*own, *operands[sum(lengths) :]]
        # The transposed solve has the same two functions, the other way round.
        both = (functions.solve, functions.transpose_solve)
        keys = [id(each) for each in both if each is not None]
        earlier = next((key for key in keys if key in solves.first), None)
        if earlier is None or solves.first[earlier] is equation:
            before = len(self.specs)
            results = self.evaluate(functions.solve, inputs)
            names = frozenset(spec.name for spec in self.specs[before:])
            solves.names.update(dict.fromkeys(keys, names))
            solves.first.update(dict.fromkeys(keys, equation))
            return results
        dropped = self._dropped
        self._dropped = dropped | solves.names[earlier]
        try:
            return self.evaluate(functions.solve, inputs)
        finally:
            self._dropped = dropped

    def _recompute(self, equation: Any, operands: list[Any]) -> list[Any]:
        """Inlines a checkpoint; one of a backward pass stays, since it computes again."""
        jaxpr = equation.params["jaxpr"]
        if not equation.params["differentiated"]:
            return self.evaluate(jaxpr, operands)
        plain = _Collector(is_kept=False)
        closed = jax.make_jaxpr(lambda *leaves: plain.evaluate(jaxpr, leaves))(*operands)
        bare = make_open(closed)
        params = {**equation.params, "jaxpr": bare}
        bare = equation.replace(params=params, effects=bare.effects)
        return bind_equation(bare, operands)


def _list_probes(jaxpr: Any) -> list[tuple[str, str]]:
    """Returns name and line of the probes in a jaxpr and in its functions."""
    found: list[tuple[str, str]] = []
    for equation in open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive is probe_p:
            found.append((equation.params["name"], _locate(equation)))
        for _, inner in name_jaxprs(equation.params):
            found += _list_probes(inner)
    return found


def _locate(equation: Any) -> str:
    return describe_source(equation_context(equation)) or "an unknown line"
