"""What surrounds a program: settings of compilers count, those of one process do not."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.kernel_caching import surroundings
from tracegraph.kernel_caching.program_key import make_key
from tracegraph.kernel_caching.surroundings import describe_surroundings


def describe(**options: Any) -> dict[str, Any]:
    lowered = tg.capture(lambda x: x + 1, **options).lower(jnp.ones(3))
    return describe_surroundings(lowered.prepared, lowered.device, shares_arguments=False)


def find_key(**options: Any) -> str:
    graph = tg.capture(lambda x: x + 1, name="f").trace(jnp.ones(3)).graph
    return make_key(graph, {}, describe(**options))


@pytest.mark.parametrize(
    "name",
    [
        "XLA_FLAGS",
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_WORKSPACE_CONFIG",
        "TF_CUDNN_WORKSPACE_LIMIT_IN_MB",
    ],
)
def test_settings_of_libraries_count(name: str, monkeypatch: pytest.MonkeyPatch):
    before = describe()
    monkeypatch.setenv(name, "1" if name.startswith("TF") else "")
    assert describe() != before


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_VAR_region",
    ],
)
def test_what_a_rank_or_another_tool_has_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch):
    before = describe()
    monkeypatch.setenv(name, "0.5")
    assert describe() == before


def test_settings_of_jax_count_unless_they_report():
    keys, before = {find_key()}, jax.config.values["jax_disable_most_optimizations"]
    with jax.default_matmul_precision("highest"):
        keys.add(find_key())
    with jax.log_compiles(False), jax.check_tracer_leaks(False):
        keys.add(find_key())
    try:
        jax.config.update("jax_disable_most_optimizations", not before)
        keys.add(find_key())
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert len(keys) == 3


def test_options_count():
    options = ({}, {"mode": "partial"}, {"outputs": "static"}, {"debug_nans": True})
    assert len({find_key(**each) for each in options}) == len(options)
    assert find_key(pool=tg.graph_pool_handle()) == find_key()


def test_the_gpu_and_its_driver_count(monkeypatch: pytest.MonkeyPatch):
    here = describe()["device"]
    capture_for_gpu(monkeypatch)
    kind = describe()["device"]
    assert kind != here
    assert kind[-1].platform == "cuda"
    assert kind[-1].driver > 0


def test_the_libraries_of_an_installed_cuda_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    def find() -> dict[str, str]:
        surroundings._find_system_libraries.cache_clear()
        return surroundings._find_system_libraries()

    packages: dict[str, str] = {}
    monkeypatch.setattr(surroundings, "_read_package_versions", lambda: packages)
    monkeypatch.setattr(surroundings, "_SYSTEM_FOLDERS", (str(tmp_path / "absent"),))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert set(find().values()) == {""}
    library = tmp_path / "libcublasLt.so.13.0.1.2"
    library.write_bytes(b"")
    (tmp_path / "libcublasLt.so.13").symlink_to(library)
    (tmp_path / "libcublasLt_static.a").write_bytes(b"")
    assert find()["libcublasLt"] == str(library)
    newer = library.rename(tmp_path / "libcublasLt.so.13.0.1.3")
    (tmp_path / "libcublasLt.so.13").unlink()
    assert find()["libcublasLt"] == str(newer)
    # Where a package has the library, its version counts, and not what else is installed.
    packages["nvidia-cublas-cu12"] = "12.9"
    assert "libcublasLt" not in find()
    surroundings._find_system_libraries.cache_clear()
