"""The options that are set for XLA, against those that it has."""

from __future__ import annotations

import pytest

from tracegraph.lowering.compile_gpu import FIRST_OPTIONS, PLAIN_KERNELS
from tracegraph.lowering.xla.schema import legal_compile_options
from tracegraph.runtime.cuda.memory.jax_arrays import OPTIONS

NAMES = [*dict(FIRST_OPTIONS), *(name for _, (name, _) in PLAIN_KERNELS), *OPTIONS]


@pytest.mark.parametrize("name", dict.fromkeys(NAMES))
@pytest.mark.usefixtures("h200")
def test_xla_knows_an_option(name: str) -> None:
    # One that it does not know is left out of a capture, and what it was for is lost.
    assert name in legal_compile_options()
