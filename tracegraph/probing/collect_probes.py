"""Turns the probes of a traced function into further results of it, see Note [Probes].

What is called once is inlined where it holds a probe: `jit`, custom derivatives, `checkpoint`. A
scan gives the values of its iterations, stacked. What a backward pass computes again is not probed
again. While loops and branches are refused.
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
    hold_equation,
    is_literal,
    make_open,
    measure_scan,
    name_jaxprs,
    open_jaxpr,
)
from tracegraph.probing.probe import has_probes, probe_p
from tracegraph.probing.probe_errors import make_place_error, make_twice_error

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
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
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
        if not any(has_probes(each) for _, each in name_jaxprs(equation.params)):
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
        raise make_place_error(name, _locate(equation))

    def _keep(self, equation: Any, operands: list[Any]) -> None:
        if not self._is_kept:
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
            inner = _Collector(is_kept=self._is_kept)
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


def _locate(equation: Any) -> str:
    return describe_source(equation_context(equation)) or "an unknown line"
