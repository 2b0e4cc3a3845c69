"""The rules that a trace itself breaks: JAX's errors in our four lines, at the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.constraints.frames import locate_error, locate_function
from tracegraph.constraints.leaks import find_leak_violation
from tracegraph.constraints.violation import Violation, make_capture_error
from tracegraph.runtime.errors import CaptureError, shorten_list

_DYNAMIC_SHAPE = re.compile(
    r"size argument|jnp\.unique\(\)|setdiff1d|total_repeat_length|jnp\.arange|jnp\.linspace"
    r"|jnp\.bincount|jnp\.pad|jax\.numpy\.split|num_classes|Shapes must be 1D"
    r"|must have static start/stop/step|Slice entries must be static"
)
_RESULT = re.compile(
    r"returned a value of type <class '(?P<kind>[^']+)'>"
    r"(?: at output component (?P<path>.+?))?, which is not a valid JAX type"
)
_ARGUMENT = re.compile(
    r"problematic value is of type <class '(?P<kind>[^']+)'>"
    r" and was passed to the function at path (?P<path>.+?)\.(?:\n|$)"
)
_READERS = (
    (re.compile(r"with the `(float|int|complex)` function"), "`{}()`"),
    (re.compile(r"(item)\(\) method"), "`.{}()`"),
    (re.compile(r"The (\w+)\(\) method was called"), "`.{}()`"),
    (re.compile(r"passed to \w+\.(__format__)"), "a format string"),
    (re.compile(r"unhashable type: '\w*(Tracer)'"), "a look-up in a dict or set"),
)
_CARRY = re.compile(
    r"(?P<loop>\w+) body function carry input and carry output must have (?:equal types|the same "
    r"pytree structure), but they differ:\n\n(?P<differences>.*?)\n\n",
    re.DOTALL,
)
_READING_TYPE_ERRORS = re.compile(
    r"passed to \w*Tracer\.__format__|unhashable type: '\w*Tracer'"
    r"|(?:memoryview|convert|interpreted).*'\w*Tracer'"
)


def translate_trace_error(
    error: Exception, *, function: Callable[..., Any], name: str
) -> CaptureError | None:
    """Turns an error that JAX raised while tracing into ours.

    Args:
        error: the error, with its traceback.
        function: the user's function.
        name: its name in the message.

    Returns:
        The error to raise instead, or None for an exception of the user's own.
    """
    for find in _FINDERS:
        violation = find(error, function, name)
        if violation is not None:
            return make_capture_error([violation], graph_name=name)
    return None


def _find_branch_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    if not isinstance(error, jax.errors.TracerBoolConversionError):
        return None
    return Violation(
        "python-branch",
        f"`{name}` decides in Python on the value of an array (`if`, `while`, `and`, `not`)",
        locate_error(error, function),
        "the function is traced without values, so Python cannot take a branch on one",
        'select with jnp.where, branch with jax.lax.cond, or let mode="partial" decide between '
        "graphs (outside of jit and loops)",
    )


def _find_shape_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    is_mask = isinstance(error, jax.errors.NonConcreteBooleanIndexError)
    is_candidate = isinstance(error, TypeError | IndexError)
    if not is_mask and not (is_candidate and _DYNAMIC_SHAPE.search(str(error))):
        return None
    subject = "indexes with a boolean mask" if is_mask else "needs a shape that depends on data"
    return Violation(
        "dynamic-shape",
        f"`{name}` {subject}",
        locate_error(error, function),
        "a CUDA graph replays fixed addresses and sizes; the size of this result is known only "
        "when the values are",
        "keep the size and select with jnp.where, give size= (jnp.nonzero, jnp.unique), or pass "
        "the number as a static argument (static_argnums)",
    )


def _find_read_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    is_read = isinstance(
        error,
        jax.errors.ConcretizationTypeError
        | jax.errors.TracerArrayConversionError
        | jax.errors.TracerIntegerConversionError,
    )
    is_other_read = isinstance(error, TypeError) and _READING_TYPE_ERRORS.search(str(error))
    if not is_read and not is_other_read:
        return None
    return Violation(
        "host-read",
        f"`{name}` reads the value of an array on the host with {_name_reader(error)}",
        locate_error(error, function),
        "the function is traced without values; a CUDA graph never comes back to the host",
        "return the array and read it outside `capture`, use jnp instead of np or math, or pass "
        "a Python number as a static argument (static_argnums)",
    )


def _name_reader(error: Exception) -> str:
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "`np.asarray` or another NumPy function"
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return "`range()`, an index or another use as a Python int"
    for pattern, text in _READERS:
        found = pattern.search(str(error))
        if found is not None:
            return text.format(found.group(1))
    return "Python"


def _find_result_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    found = _RESULT.search(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return None
    return make_result_violation(function, name, found.group("kind"), found.group("path") or "")


def make_result_violation(
    function: Callable[..., Any], name: str, kind: str, path: str
) -> Violation:
    """Returns the violation of a function that returns what is neither an array nor static.

    Args:
        function: the user's function.
        name: its name in the message.
        kind: the name of the result's type, with its module.
        path: of the result in the tree, as ``[1]``.
    """
    return Violation(
        "non-array-output",
        f"`{name}` returns a {kind} (`result{path}`), not an array",
        locate_function(function),
        "a replay returns arrays of the graph's pool; it runs no Python that could make others",
        "return arrays, numbers or None in tuples, lists and dicts, and make the rest outside",
    )


def _find_argument_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    found = _ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return None
    return Violation(
        "non-array-argument",
        f"`{name}` passes a {found.group('kind')} as the array `{found.group('path')}`",
        locate_error(error, function),
        "only arrays and numbers can be traced; anything else is a static argument",
        "pass it as a static argument: static_argnums=... or static_argnames=...",
    )


def _find_carry_violation(
    error: Exception, function: Callable[..., Any], name: str
) -> Violation | None:
    found = _CARRY.search(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return None
    parts = [each.strip(" *;.") for each in found.group("differences").split("\n")]
    return Violation(
        "loop-carry",
        f"`{name}` has a `{found.group('loop')}` whose body changes what the loop carries",
        locate_error(error, function),
        "; ".join(each.replace("The input", "the input", 1) for each in shorten_list(parts)),
        "return from the body what it was given, with the same shapes, dtypes and structure: cast "
        "with .astype, or begin with what the body returns",
    )


# In this order: JAX's error of a Python branch is also one of reading a value.
_FINDERS = (
    _find_branch_violation,
    _find_shape_violation,
    _find_read_violation,
    find_leak_violation,
    _find_result_violation,
    _find_argument_violation,
    _find_carry_violation,
)
