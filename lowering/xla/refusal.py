"""Refusals: why a compiled program, or a piece of it, is not lowered.

Inside of the decoder every reason is a `Refusal`. What leaves it is an `UnsupportedError`, made
here: of work that no graph holds, or of a form that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracegraph.runtime.errors import RefusedWork, UnsupportedError


class Refusal(Exception):
    """A reason why one thunk, or one part of a program, is not lowered; reads on after ``it``.

    It stays inside the decoder, which reports every one of a program in one error.
    """


def make_refused_error(
    what: str,
    *,
    where: str,
    why: str,
    refused: Iterable[RefusedWork],
    fix: str = 'use mode="partial", or jax.jit for this function',
) -> UnsupportedError:
    """Returns the error that a region holds work that is not lowered."""
    return UnsupportedError(
        what,
        where=where,
        why=why,
        fix=fix,
        anchor="unsupported",
        refused=refused,
    )


def make_unreadable_error(problem: str, where: str) -> UnsupportedError:
    """Returns the error that a compiled program, or what describes it, is in an unknown form."""
    return UnsupportedError(
        f"the program that XLA compiled cannot be read: {problem}",
        where=where,
        why="tracegraph reads the form that XLA writes for JAX 0.10 to 0.12, and guesses nothing",
        fix='pip install "jax[cuda13]>=0.10,<0.13", or report this text',
        anchor="unsupported-jax",
    )
