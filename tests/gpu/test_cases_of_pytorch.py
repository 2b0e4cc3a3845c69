"""The cases of PyTorch's own tests, as tests/public has them for the host device, on a GPU.

Their names begin with the number of the case: ``test_g08_...``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.public.functions import test_optimizers, test_random, test_random_errors
from tests.public.graphed_callables import test_graphed_callables
from tests.public.precision import test_grad_scaler
from tests.public.raw_graph import (
    test_cases,
    test_errors,
    test_files,
    test_hooks,
    test_object,
    test_raw_graph,
    test_state,
    test_streams,
)
from tests.public.raw_graph import test_random as test_random_in_raw_graphs

pytestmark = pytest.mark.usefixtures("gpu")
MODULES: tuple[ModuleType, ...] = (
    test_grad_scaler,
    test_graphed_callables,
    test_optimizers,
    test_random,
    test_random_errors,
    test_raw_graph,
    test_cases,
    test_errors,
    test_files,
    test_hooks,
    test_object,
    test_random_in_raw_graphs,
    test_state,
    test_streams,
)
# Those of one process on a GPU without others, or with handles of the driver, are in a file of
# their own: test_raw_graph.py. The twin of another was compiled in other parts, which may round
# otherwise: test_amp.py.
ELSEWHERE = (
    "test_g08_many_captures_of_a_matmul_take_little_memory",
    "test_g33_the_scale_changes_between_replays_and_infinities_are_found",
    "test_g36_the_nodes_of_a_kept_graph_can_be_listed",
    "test_g37_the_executable_handle_is_there_once_the_graph_is_executable",
)
CASE = re.compile(r"test_g\d+_")

everywhere = test_hooks.everywhere


@pytest.fixture(autouse=True)
def device() -> None:
    """The GPU that JAX computes on: no fake takes its place."""


def find_cases() -> dict[str, Callable[..., None]]:
    """Returns the cases of all modules by name."""
    found: dict[str, Callable[..., None]] = {}
    for module in MODULES:
        names = [name for name in vars(module) if CASE.match(name) and name not in ELSEWHERE]
        assert found.keys().isdisjoint(names), f"a case of {module.__name__} is in two modules"
        found |= {name: getattr(module, name) for name in names}
    return found


globals().update(find_cases())
