"""The differential run: a program captured, three calls, each against `jax.jit`."""

from __future__ import annotations

import enum
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tests.fuzz.programs import Program
from tests.fuzz.steps import is_key

# Of several regions, relative to the largest magnitude: a last bit, grown by a few steps.
TOLERANCES = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-4, "complex64": 1e-4}
CALLS = 3


class Outcome(enum.Enum):
    """How a captured program compares with `jax.jit`."""

    EQUAL = "equal bit for bit"
    CLOSE = "several regions, equal within the tolerance"
    REFUSED = "refused, with control flow or a callback in it"


def compare_with_jit(program: Program, mode: Literal["whole", "partial"]) -> Outcome:
    """Captures a program, calls it three times and compares all results with those of `jax.jit`.

    Args:
        program: what to run.
        mode: of `tg.capture`.

    Raises:
        AssertionError: a tree, type or value differs.
        tg.TracegraphError: it is refused, but for no reason that the program gives.
    """
    donated = (0,) if program.is_donated else ()
    function = functools.partial(program.run, has_streams=True)
    captured = tg.capture(
        function,
        mode=mode,
        # Else a loser of the comparison of times would be compared with itself.
        prefer="graph",
        donate_argnums=donated,
        name=f"fuzz{program.seed}",
        control_flow=program.control_flow,
    )
    jitted = jax.jit(program.run)
    outcome = Outcome.EQUAL
    state, given = program.make_arguments(0)
    wanted_state, _ = program.make_arguments(0)
    for turn in range(CALLS):
        _, given = program.make_arguments(turn)
        wanted = jitted(wanted_state, given)
        try:
            got = captured(state, given)
        except tg.CaptureError:
            if program.is_capturable or mode == "partial":
                raise
            return Outcome.REFUSED
        capture = next(iter(captured._cache.list_latest()))
        is_cut = len(capture.graph.lowered.regions) > 1
        if compare_trees(got, wanted, is_cut=is_cut):
            outcome = Outcome.CLOSE
            # A difference must not grow from call to call.
            (state, _), (wanted_state, _) = (program.make_arguments(turn) for _ in range(2))
        else:
            state, wanted_state = got[0], wanted[0]
    return outcome


def compare_trees(got: Any, wanted: Any, *, is_cut: bool) -> list[str]:
    """Compares results leaf by leaf.

    Args:
        got: of the captured function.
        wanted: of `jax.jit`.
        is_cut: True for several regions, whose floats may differ in the last bits.

    Returns:
        The leaves that are equal within the tolerance only.

    Raises:
        AssertionError: a tree, type or value differs.
    """
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    leaves = zip(paths, jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return [path for path, one, other in leaves if not compare_leaves(path, one, other, is_cut)]


def compare_leaves(path: str, got: Any, wanted: Any, is_cut: bool) -> bool:
    """Returns whether two results have the same bits; types must be the same in any case."""
    assert isinstance(got, jax.Array), f"{path}: {type(got)}"
    assert jax.typeof(got) == jax.typeof(wanted), f"{path}: {jax.typeof(got)}, {jax.typeof(wanted)}"
    weak = [jax.typeof(each).weak_type for each in (got, wanted)]
    assert weak[0] == weak[1], f"{path}: weak types {weak}"
    assert got.committed == wanted.committed, f"{path}: committed {got.committed}"
    assert got.sharding == wanted.sharding, f"{path}: {got.sharding}"
    if is_key(got):
        got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    one, other = np.asarray(got), np.asarray(wanted)
    if one.tobytes() == other.tobytes():
        return True
    tolerance = TOLERANCES.get(one.dtype.name, 0.0) if is_cut else 0.0
    kind = complex if jnp.iscomplexobj(one) else float
    one, other = one.astype(kind), other.astype(kind)
    difference = np.max(np.abs(one - other)) / (np.max(np.abs(other)) or 1.0)
    is_close = np.array_equal(np.isnan(one), np.isnan(other)) and (
        np.isnan(difference) or difference <= tolerance
    )
    assert tolerance, f"{path}: relative difference {difference:.1e}"
    assert is_close, f"{path}: relative difference {difference:.1e} of several regions"
    return False
