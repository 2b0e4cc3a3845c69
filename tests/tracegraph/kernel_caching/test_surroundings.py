"""What surrounds a program: settings of compilers count, those of one process do not."""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.processes import run_copy
from tracegraph.kernel_caching import cached_lowering, surroundings
from tracegraph.kernel_caching.program_key import make_key
from tracegraph.kernel_caching.surroundings import describe_surroundings
from tracegraph.lowering.tuning import Tuning
from tracegraph.runtime import installed_packages
from tracegraph.runtime.jax_interop import describe_xla_flags


def describe(**options: Any) -> dict[str, Any]:
    lowered = tg.capture(lambda x: x + 1, **options).lower(jnp.ones(3))
    return describe_surroundings(
        lowered.prepared, lowered.device, shares_arguments=False, tuning=Tuning()
    )


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


FAST = "--xla_cpu_enable_fast_math=true"
SHOW_FLAGS = f"""
import os
import jax
from tracegraph.lowering.tuning import Tuning
from tracegraph.runtime.jax_interop import describe_xla_flags

jax.devices()
print(describe_xla_flags())
os.environ["XLA_FLAGS"] = "{FAST}"
print(describe_xla_flags())
"""


def test_flags_count_as_xla_has_read_them():
    plain, late = show_flags("")
    early, _ = show_flags(FAST)
    assert plain == late != early
    assert describe()["flags of XLA"] == describe_xla_flags()


def show_flags(flags: str) -> list[str]:
    ran = run_copy(["-c", SHOW_FLAGS], variables={"XLA_FLAGS": flags})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_files_of_ours_that_change_in_a_running_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    def count() -> tuple[int, ...]:
        surroundings.find_own_version.cache_clear()
        cached_lowering._warn_of_changed_files.cache_clear()
        before = cached_lowering.read_counts()
        tg.capture(lambda x: x - 1, name="subtract")(jnp.ones(3))
        return tuple(value - before[name] for name, value in cached_lowering.read_counts().items())

    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "rule.py").write_text("FACTOR = 2")
    monkeypatch.setattr(surroundings, "OWN_FOLDERS", (f"{tmp_path}/ours/",))
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    assert count() == (0, 0, 0)
    assert "files of tracegraph have changed since" in caplog.text
    monkeypatch.setattr(surroundings, "_IMPORTED", time.time() + 1)
    assert [count(), count()] == [(0, 1, 1), (1, 0, 0)]
    (tmp_path / "ours" / "rule.py").write_text("FACTOR = 3")
    assert count() == (0, 1, 1)
    surroundings.find_own_version.cache_clear()


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
    monkeypatch.setattr(installed_packages, "SYSTEM_FOLDERS", (str(tmp_path / "absent"),))
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


def test_versions_of_packages_are_those_that_python_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    def read() -> dict[str, str]:
        installed_packages.list_packages.cache_clear()
        return surroundings._read_package_versions()

    for place, name in (
        ("first", "nvidia_cublas_cu12-12.9.1.4"),
        ("second", "nvidia_cublas_cu12-13.0"),
        ("second", "jax_cuda13_pjrt-0.12.0.1"),
        ("second", "unrelated-1.0"),
    ):
        folder = tmp_path / place / f"{name}.dist-info"
        folder.mkdir(parents=True)
        package, _, version = name.partition("-")
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    (tmp_path / "file").write_text("")
    places = ("absent", "file", "first", "second")
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / each) for each in places), *sys.path])
    found = read()
    assert found["nvidia-cublas-cu12"] == "12.9.1.4"
    assert found["jax-cuda13-pjrt"] == "0.12.0.1"
    known = {each.name.lower() for each in importlib.metadata.distributions()}
    wanted = surroundings._PACKAGES & {name.replace("_", "-") for name in known}
    assert found == {name: importlib.metadata.version(name) for name in wanted}


def test_links_in_our_own_folders_are_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    (tmp_path / "rule.py").write_text("FACTOR = 2")
    monkeypatch.setattr(surroundings, "OWN_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(surroundings, "_IMPORTED", time.time() + 1)
    read = surroundings.find_own_version.__wrapped__
    before = read()
    (tmp_path / "again").symlink_to(tmp_path)
    assert read() == before is not None
