"""What a user sees first: the names, their help, and the examples in it."""

from __future__ import annotations

import doctest
import inspect
import pathlib
import pickle
import pydoc
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

# The whole surface. A name that is not built yet is absent.
NAMES = {
    "tracegraph": """
        BucketedFunction BucketInfo bucket_size
        capture GraphedFunction CacheInfo CUDAGraph graph static_input graph_pool_handle PoolId
        make_graphed_callables GraphedCallable GraphedModule
        Array
        Stream Event stream current_stream default_stream set_stream synchronize
        is_available device_count current_device set_device device device_of
        get_device_properties get_device_name get_device_capability can_device_access_peer
        get_arch_list
        utilization memory_usage temperature power_draw clock_rate list_gpu_processes probe
        amp backends comm kernel_cache memory random
        ExternalStream is_current_stream_capturing
        register_graph_capture_start_hook register_graph_capture_end_hook
        register_graph_instantiate_hook register_graph_replay_start_hook
        register_graph_replay_end_hook RemovableHandle export_dot export_graph_data
        export_to_cuda_core import_from_cuda_core ExportedGraph
        TracegraphError CaptureError UnsupportedError VerificationError ReplayError
        InvalidFloatError StaleOutputError OutOfMemoryError CudaError ConfigError InternalError
        RecaptureWarning
        load LoadedFunction LoadedBucketedFunction SavedFileError
    """,
    "tracegraph.memory": """
        memory_allocated max_memory_allocated memory_reserved max_memory_reserved
        memory_stats memory_stats_as_nested_dict memory_summary
        reset_peak_memory_stats reset_accumulated_memory_stats
        memory_snapshot record_memory_history dump_snapshot
        empty_cache mem_get_info
        set_per_process_memory_fraction get_per_process_memory_fraction
        MemPool use_mem_pool
        PluggableAllocator change_current_allocator get_allocator_backend
        caching_allocator_alloc caching_allocator_delete
        pin_memory is_pinned synchronize_copies empty_host_cache
        host_memory_stats reset_peak_host_memory_stats reset_accumulated_host_memory_stats
    """,
    "tracegraph.amp": "GradScaler autocast",
    "tracegraph.backends": "cudnn cufft_plan_cache matmul",
    "tracegraph.comm": """
        broadcast broadcast_coalesced reduce_add reduce_add_coalesced scatter gather
    """,
    "tracegraph.kernel_cache": "KernelCacheInfo clear info",
    "tracegraph.random": """
        Generator default_generator fork_rng next_key
        get_rng_state get_rng_state_all initial_seed manual_seed manual_seed_all
        seed seed_all set_rng_state set_rng_state_all
    """,
}
FACES = {
    "tracegraph": tg,
    "tracegraph.memory": tg.memory,
    "tracegraph.amp": tg.amp,
    "tracegraph.backends": tg.backends,
    "tracegraph.comm": tg.comm,
    "tracegraph.kernel_cache": tg.kernel_cache,
    "tracegraph.random": tg.random,
}
PUBLIC = {
    f"{face}.{name}": getattr(FACES[face], name)
    for face, names in NAMES.items()
    for name in names.split()
    if f"tracegraph.{name}" not in FACES
}


@tg.capture(donate_argnums=0)
def advance(state: jax.Array, x: jax.Array, *, rate: float = 0.5) -> jax.Array:
    """Adds a part of x to the state.

    Args:
        state: what was added so far.
    """
    return state + rate * x


def read_help(thing: object) -> str:
    """Returns what `help` prints."""
    return pydoc.plain(pydoc.render_doc(thing))


@pytest.mark.parametrize("face", NAMES)
def test_dir_shows_the_public_names_only(face: str) -> None:
    shown = [name for name in dir(FACES[face]) if not name.startswith("__")]
    assert shown == sorted(NAMES[face].split())


@pytest.mark.parametrize("face", NAMES)
def test_a_star_imports_the_public_names(face: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"from {face} import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(NAMES[face].split())


@pytest.mark.parametrize(
    "face", ["tracegraph.amp", "tracegraph.memory", "tracegraph.comm", "tracegraph.random"]
)
def test_nothing_has_to_be_hidden(face: str) -> None:
    names = {name for name in vars(FACES[face]) if not name.startswith("__")}
    assert names == set(NAMES[face].split())


def test_modules_are_reached_by_name_all_the_same() -> None:
    for name in ("runtime", "lowering", "ir", "user_memory"):
        assert isinstance(getattr(tg, name), types.ModuleType)
    assert "__version__" in dir(tg)


# What is pickled of a generator is its state.
@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"tracegraph.random.default_generator"}))
def test_public_names_can_be_pickled(name: str) -> None:
    assert pickle.loads(pickle.dumps(PUBLIC[name])) is PUBLIC[name]


def test_public_records_can_be_pickled() -> None:
    for record in (tg.PoolId(3), tg.CacheInfo(1, 2, 3, 4)):
        copy = pickle.loads(pickle.dumps(record))
        assert copy == record
        assert type(copy) is type(record)


def find_examples(thing: Any, name: str) -> list[doctest.DocTest]:
    """Returns the examples of a docstring, and of those of a class's methods."""
    names = {"tg": tg, "jax": jax, "jnp": jnp, "np": np}
    # With a module, the examples of methods that another file defines would be left out.
    found = doctest.DocTestFinder(exclude_empty=True).find(thing, name, module=False, globs=names)  # pyright: ignore[reportArgumentType]
    return [each for each in found if each.examples]


EXAMPLES = [
    pytest.param(example, id=example.name)
    for name, thing in {**FACES, **PUBLIC}.items()
    if thing is not tg.Array
    for example in find_examples(thing, name)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: doctest.DocTest, tmp_path: pathlib.Path) -> None:
    report: list[str] = []
    example.globs["path"] = tmp_path / "memory.pickle"
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_a_wrong_example_is_noticed() -> None:
    def wrong() -> None:
        """Returns nothing.

        Example:
            >>> 1 + 1
            3
        """

    (example,) = find_examples(wrong, "wrong")
    with pytest.raises(AssertionError, match=r"Expected:\n +3"):
        test_examples_run(example, pathlib.Path())


def find_undescribed(thing: Any) -> list[str]:
    """Returns the parameters that a docstring says nothing of."""
    text = inspect.getdoc(thing) or ""
    parameters = [name for name in inspect.signature(thing).parameters if name != "self"]
    return [name for name in parameters if not re.search(rf"^ +\**{name}: ", text, re.MULTILINE)]


FUNCTIONS = {
    name: thing for name, thing in PUBLIC.items() if isinstance(thing, types.FunctionType)
} | {
    f"{name}.{method}": function
    for name, thing in PUBLIC.items()
    if thing in (tg.GraphedFunction, tg.LoadedFunction, tg.Stream, tg.Event, tg.memory.MemPool)
    for method, function in vars(thing).items()
    if isinstance(function, types.FunctionType) and not method.startswith("_")
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_described(name: str) -> None:
    assert find_undescribed(FUNCTIONS[name]) == []


def test_an_undescribed_parameter_is_noticed() -> None:
    def wrong(first: int, second: int) -> None:
        """Does nothing.

        Args:
            second: a number.
        """

    assert find_undescribed(wrong) == ["first"]


def test_help_of_a_captured_function_is_that_of_the_function() -> None:
    text = read_help(advance)
    assert "advance(state: 'jax.Array', x: 'jax.Array', *, rate: 'float' = 0.5)" in text
    assert "Adds a part of x to the state." in text
    assert str(inspect.signature(advance)) == str(inspect.signature(advance.__wrapped__))
    assert (advance.__name__, advance.__module__) == ("advance", __name__)


@pytest.mark.parametrize("face", NAMES)
def test_help_lists_the_public_names(face: str) -> None:
    text = read_help(FACES[face])
    unlisted = [
        n for n in NAMES[face].split() if not re.search(rf"^    (class )?{n}\b", text, re.M)
    ]
    assert unlisted == []
    assert "_house" not in text


def test_a_generic_can_be_subscripted() -> None:
    assert tg.GraphedFunction[[jax.Array], jax.Array] is not None
    assert isinstance(advance, tg.GraphedFunction)
