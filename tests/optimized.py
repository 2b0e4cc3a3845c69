"""Tests whose programs XLA must compile itself, optimized as for users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compile_as_for_users() -> Iterator[None]:
    """Lets XLA optimize, and takes no program that was compiled before."""
    is_unoptimized = jax.config.read("jax_disable_most_optimizations")
    is_shared = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    _set(is_unoptimized=False, is_shared=False)
    try:
        yield
    finally:
        _set(is_unoptimized=is_unoptimized, is_shared=is_shared)


@pytest.fixture(scope="module", autouse=True)
def optimized() -> Iterator[None]:
    """Compiles as for users while the tests of a module run; their folder imports this."""
    with compile_as_for_users():
        yield


def _set(*, is_unoptimized: bool, is_shared: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", is_unoptimized)
    jax.config.update("jax_enable_compilation_cache", is_shared)
    # JAX asks only once in a process whether programs are shared.
    compilation_cache.reset_cache()
