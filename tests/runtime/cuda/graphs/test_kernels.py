"""KernelLoader: one library per image, limits raised before use, unloaded with the last user."""

from __future__ import annotations

import gc
import threading

import pytest

from tests.fakes.fake_driver import FakeDriver
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader, LoadedKernel
from tracegraph.runtime.definition.nodes import KernelCode, LaunchShape
from tracegraph.runtime.errors import CudaError

ADD = KernelCode("add", b"first image")
MUL = KernelCode("mul", b"first image")
OTHER = KernelCode("add", b"second image")


def shape(shared_bytes: int = 0, cluster: tuple[int, int, int] = (1, 1, 1)) -> LaunchShape:
    return LaunchShape((16, 1, 1), (32, 1, 1), cluster, shared_bytes)


def make_loader() -> tuple[FakeDriver, KernelLoader]:
    driver = FakeDriver()
    return driver, KernelLoader(driver, driver.retain_primary_context(0))


def test_an_image_is_loaded_once() -> None:
    driver, loader = make_loader()
    first, again = (
        loader.load(ADD, shape()),
        loader.load(KernelCode("add", b"first image"), shape()),
    )
    second, third = loader.load(MUL, shape()), loader.load(OTHER, shape())
    assert first == again
    assert len({first.function, second.function, third.function}) == 3
    assert first.library is second.library is not third.library
    assert (loader.library_count, driver.count_calls("load_library")) == (2, 2)
    assert driver.count_calls("get_function") == 3


def test_a_library_is_unloaded_with_its_last_user() -> None:
    driver, loader = make_loader()
    first, second = loader.load(ADD, shape()), loader.load(MUL, shape())
    del first
    gc.collect()
    assert loader.library_count == 1
    del second
    gc.collect()
    assert loader.library_count == 0
    assert list(driver.live_handles().values()) == ["context"]
    again = loader.load(ADD, shape())
    assert driver.functions[again.function] == "add"


def test_shared_memory_is_raised_to_the_most_that_was_asked_for() -> None:
    driver, loader = make_loader()
    kernels = [loader.load(ADD, shape(size)) for size in (0, 1000, 500, 200_000, 1000)]
    raised = [call.arguments for call in driver.calls if call.name == "set_shared_bytes"]
    function = kernels[0].function
    assert raised == [(function, 1000), (function, 200_000)]
    other = loader.load(MUL, shape(10))
    assert driver.calls[-2].arguments == (other.function, 10)


@pytest.mark.parametrize(
    ("cluster", "count"), [((1, 1, 1), 0), ((8, 1, 1), 0), ((2, 2, 2), 0), ((16, 1, 1), 1)]
)
def test_large_clusters_are_allowed_once(cluster: tuple[int, int, int], count: int) -> None:
    driver, loader = make_loader()
    kernels = [loader.load(ADD, shape(0, cluster)) for _ in range(2)]
    assert len({kernel.function for kernel in kernels}) == 1
    assert driver.count_calls("allow_large_clusters") == count


@pytest.mark.parametrize("name", ["load_library", "get_function", "set_shared_bytes"])
def test_a_failure_leaves_nothing(name: str) -> None:
    driver, loader = make_loader()
    driver.fail_on = name
    with pytest.raises(CudaError, match=name) as caught:
        loader.load(ADD, shape(100))
    del caught
    gc.collect()
    assert (loader.library_count, set(driver.live_handles().values())) == (0, {"context"})
    kernel = loader.load(ADD, shape(100))
    assert driver.calls[-2].arguments == (kernel.function, 100)


def test_what_is_kept_outlives_the_graphs_that_use_it() -> None:
    driver, loader = make_loader()
    loader.keep((ADD, MUL, OTHER))
    loader.keep((MUL,))
    loader.load(ADD, shape())
    gc.collect()
    assert (loader.library_count, driver.count_calls("load_library")) == (2, 2)
    del loader
    gc.collect()
    assert list(driver.live_handles().values()) == ["context"]


def test_what_the_driver_refuses_to_keep_is_an_error_of_the_graph_that_needs_it() -> None:
    driver, loader = make_loader()
    driver.fail_on = "load_library"
    loader.keep((ADD, OTHER))
    # The fault is in one call only.
    assert loader.library_count == 1
    driver.fail_on = "load_library"
    with pytest.raises(CudaError, match="load_library"):
        loader.load(ADD, shape())


def test_threads_load_one_library() -> None:
    driver, loader = make_loader()
    start = threading.Barrier(8)
    kernels: list[LoadedKernel] = []

    def load() -> None:
        start.wait()
        kernels.append(loader.load(ADD, shape(100)))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({kernel.function for kernel in kernels}) == 1
    assert driver.count_calls("load_library") == driver.count_calls("set_shared_bytes") == 1
