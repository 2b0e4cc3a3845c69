"""Runs a program under its reference and captured, four calls each, and says what came out."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tests.conformance import compare
from tests.ecosystem.program import Program, Setup
from tracegraph.error_sections import read_sections
from tracegraph.runtime.errors import TracegraphError
from tracegraph.verification.difference import measure_difference
from tracegraph.verification.report import VerificationReport

CALLS = 4
EQUAL = "equal"
DIFFERS = "differs"
# Sections of docs/errors.md that name a bug of tracegraph, not what a program may not do.
FAULTS = {"internal", "verification", "unsupported-jax"}
REFUSALS = set(read_sections()) - FAULTS
# Each file of programs, with the libraries that it needs besides JAX.
FILES = {
    "arrays": (),
    "transforms": (),
    "control": (),
    "training": (),
    "inference": (),
    "science": (),
    "flax_linen": ("flax", "optax"),
    "flax_nnx": ("flax", "optax"),
    "optax_chains": ("optax",),
    "equinox_modules": ("equinox", "optax"),
    "diffrax_solvers": ("diffrax",),
    "probabilistic": ("numpyro", "blackjax"),
    "haiku_modules": ("haiku", "optax"),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program in one mode.

    Attributes:
        word: ``equal``, ``differs``, the section of docs/errors.md that refused it, or the type of
            another error.
        reason: first line of the error, or of the difference, one that is left to chance included.
        seconds: of all processors, that its capture and its calls took.
    """

    word: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_equal_or_refused(self) -> bool:
        """True unless the results differ, or an error is not one of tracegraph's refusals."""
        return self.word == EQUAL or self.word in REFUSALS


def find_missing(file: str) -> list[str]:
    """Returns the libraries that a file of programs needs and that are not installed."""
    return [name for name in FILES[file] if importlib.util.find_spec(name) is None]


def load_programs(file: str) -> dict[str, Program]:
    """Returns the programs of a file by their full names, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"tests.ecosystem.{file}")
    found = [each for each in vars(module).values() if isinstance(each, Program)]
    return {f"{file}.{each.name}": each for each in found}


def run_program(program: Program) -> tuple[Outcome, ...]:
    """Returns what becomes of a program, in each of its modes."""
    with warnings.catch_warnings():
        # Of libraries that are older than the JAX here, and about donated arrays.
        warnings.simplefilter("ignore")
        setup = program.make()
        expected = [*_call(setup, setup.reference)]
        return tuple(_run_mode(setup, mode, expected) for mode in program.modes)


def _run_mode(setup: Setup, mode: str, expected: list[Any]) -> Outcome:
    captured: list[Any] = []

    def capture(function: Callable[..., Any], **options: Any) -> Any:
        options["mode"] = mode
        captured.append(tg.capture(function, **options))
        return captured[-1]

    start = time.process_time()
    try:
        actual = [*_call(setup, capture)]
    except TracegraphError as error:
        return Outcome(error.anchor, _first_line(error), time.process_time() - start)
    except Exception as error:  # noqa: BLE001 - any other error is an outcome, and a defect
        return Outcome(type(error).__name__, _first_line(error), time.process_time() - start)
    seconds = time.process_time() - start
    wanted, got = _split_arrays(expected), _split_arrays(actual)
    both = wanted[0], got[0]
    difference = compare.find_difference(*both, lambda _: 0.0)
    if wanted[1] != got[1]:
        return Outcome(DIFFERS, f"wanted {wanted[1]}, got {got[1]}", seconds)
    if difference is None:
        return Outcome(EQUAL, seconds=seconds)
    report = find_chance(captured)
    is_equal = _is_left_to_chance(*both, report)
    reason = f"{difference}; {report.reason}" if is_equal else str(difference)
    return Outcome(EQUAL if is_equal else DIFFERS, reason, seconds)


def find_chance(captured: Sequence[Any]) -> VerificationReport:
    """Returns the report of a graph on a GPU that adds floats in an order left to chance.

    Two runs of `jax.jit` differ there as well. The report names the sums and a tolerance; without
    such a graph it has none.

    Args:
        captured: captured functions, each of which was called.
    """
    captures = [each for function in captured for each in function._cache.list_latest()]
    reports = [each.verification for each in captures]
    is_gpu = jax.devices()[0].platform == "gpu"
    chance = [each for each in reports if is_gpu and "float atomics" in each.reason]
    return chance[0] if chance else VerificationReport()


def _is_left_to_chance(expected: list[Any], actual: list[Any], report: VerificationReport) -> bool:
    """True where leaves of floats are within the tolerance, and all others equal bit for bit."""
    for wanted, got in zip(expected, actual, strict=True):
        difference = compare.find_difference(wanted, got, lambda _: 0.0)
        if difference is None:
            continue
        # Without a distance they are of two types.
        is_float = jnp.issubdtype(wanted.dtype, jnp.inexact) and difference.max_absolute is not None
        if not is_float or not measure_difference(got, wanted) <= report.tolerance:
            return False
    return True


def _call(setup: Setup, wrap: Callable[..., Any]) -> Iterator[Any]:
    """Yields the results of each call, and at the end the state.

    Results are read at the end only, so one that a later call overwrote would differ.
    """
    has_state = setup.state is not None
    donates = has_state and setup.adapt is None
    function = wrap(setup.function, donate_argnums=(0,) if donates else (), **setup.options)
    function = setup.adapt(function) if setup.adapt else function
    rng = np.random.default_rng(7)
    state, kept = _copy_state(setup), []
    for _ in range(CALLS):
        batch = setup.make_batch(rng)
        if has_state:
            state, results = function(state, *batch)
        else:
            results = function(*batch)
        kept.append(results)
    yield from kept
    if donates:
        yield state


def _split_arrays(tree: Any) -> tuple[list[Any], list[Any]]:
    """Returns the leaves that are arrays, and the tree with the others, as functions."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return arrays, [structure, *others]


def _copy_state(setup: Setup) -> Any:
    if setup.adapt is not None:
        return copy.deepcopy(setup.state)
    return jax.tree.map(_copy_leaf, setup.state)


def _copy_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.clone(leaf)
    # By NumPy, which compiles nothing.
    return jax.device_put(np.array(leaf))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
