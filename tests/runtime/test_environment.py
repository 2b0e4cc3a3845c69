"""Environment variables: defaults, allowed values, and the refusal of others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tracegraph.runtime import environment
from tracegraph.runtime.environment import (
    read_alloc_conf,
    read_check_replay,
    read_cublas_workspace_bytes,
    read_kernel_cache_bytes,
    read_kernel_cache_path,
    read_launch_blocking,
    read_no_memory_caching,
    read_nvtx,
    read_progress,
)
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.config import AllocatorConfig

jax.config.update("jax_platforms", "cpu")


@pytest.mark.parametrize(
    ("name", "text", "read", "value"),
    [
        ("TRACEGRAPH_CHECK_REPLAY", None, read_check_replay, False),
        ("TRACEGRAPH_CHECK_REPLAY", "0", read_check_replay, False),
        ("TRACEGRAPH_CHECK_REPLAY", "1", read_check_replay, True),
        ("TRACEGRAPH_NVTX", None, read_nvtx, False),
        ("TRACEGRAPH_NVTX", "1", read_nvtx, True),
        ("TRACEGRAPH_LAUNCH_BLOCKING", None, read_launch_blocking, False),
        ("TRACEGRAPH_LAUNCH_BLOCKING", "1", read_launch_blocking, True),
        ("TRACEGRAPH_PROGRESS", None, read_progress, "auto"),
        ("TRACEGRAPH_PROGRESS", "auto", read_progress, "auto"),
        ("TRACEGRAPH_PROGRESS", "0", read_progress, "0"),
        ("TRACEGRAPH_PROGRESS", "1", read_progress, "1"),
        ("TRACEGRAPH_NO_MEMORY_CACHING", None, read_no_memory_caching, False),
        ("TRACEGRAPH_NO_MEMORY_CACHING", "1", read_no_memory_caching, True),
        ("TRACEGRAPH_ALLOC_CONF", None, read_alloc_conf, AllocatorConfig()),
        ("TRACEGRAPH_ALLOC_CONF", "", read_alloc_conf, AllocatorConfig()),
        (
            "TRACEGRAPH_ALLOC_CONF",
            "expandable_segments:True",
            read_alloc_conf,
            AllocatorConfig(expandable_segments=True),
        ),
        ("CUBLAS_WORKSPACE_CONFIG", None, read_cublas_workspace_bytes, None),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", read_cublas_workspace_bytes, 32 << 20),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", read_cublas_workspace_bytes, 8519680),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", read_cublas_workspace_bytes, 0),
        ("TRACEGRAPH_KERNEL_CACHE", "0", read_kernel_cache_path, None),
        ("TRACEGRAPH_KERNEL_CACHE_MB", None, read_kernel_cache_bytes, 4 << 30),
        ("TRACEGRAPH_KERNEL_CACHE_MB", "3", read_kernel_cache_bytes, 3 << 20),
    ],
)
def test_values(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str | None,
    read: Callable[[], Any],
    value: Any,
):
    monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(name, text)
    assert read() == value


@pytest.mark.parametrize("text", ["", "2", "yes", "TRUE"])
@pytest.mark.parametrize(
    ("name", "read", "allowed"),
    [
        ("TRACEGRAPH_CHECK_REPLAY", read_check_replay, "0, 1"),
        ("TRACEGRAPH_LAUNCH_BLOCKING", read_launch_blocking, "0, 1"),
        ("TRACEGRAPH_NVTX", read_nvtx, "0, 1"),
        ("TRACEGRAPH_PROGRESS", read_progress, "auto, 0, 1"),
        ("TRACEGRAPH_KERNEL_CACHE", read_kernel_cache_path, "1, 0"),
        ("TRACEGRAPH_NO_MEMORY_CACHING", read_no_memory_caching, "0, 1"),
    ],
)
def test_other_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], Any], allowed: str, text: str
):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as raised:
        read()
    assert raised.value.what == f"environment variable {name} has the value {text!r}"
    assert raised.value.why == f"the allowed values are {allowed}"
    assert raised.value.anchor == "config"


@pytest.mark.parametrize(
    "text",
    ["", "4096:8", ":4096", ":4096:", ":4096:8:", ":4096:8:16", ":-1:8", ": 4:8", ":4k:8", "0"]
    + [":4096:8\n", ":٤:8", ":1234567890:1"],
)
def test_other_workspaces_are_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    with pytest.raises(ConfigError) as raised:
        read_cublas_workspace_bytes()
    assert raised.value.what == (
        f"environment variable CUBLAS_WORKSPACE_CONFIG has the value {text!r}"
    )
    assert ":4096:2:16:8" in raised.value.why
    assert raised.value.anchor == "config"


@pytest.mark.parametrize("text", ["", "-1", "4 GB", "1e3", "1" * 10])
def test_other_limits_of_the_kernel_cache_are_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_MB", text)
    with pytest.raises(ConfigError, match="TRACEGRAPH_KERNEL_CACHE_MB has the value"):
        read_kernel_cache_bytes()


def test_where_the_kernel_cache_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("HOME", "/home/user")
    for name in ("XDG_CACHE_HOME", "TRACEGRAPH_KERNEL_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert str(read_kernel_cache_path()) == "/home/user/.cache/tracegraph/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(read_kernel_cache_path()) == "/home/user/.cache/tracegraph/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(read_kernel_cache_path()) == "/caches/tracegraph/kernels"
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", "/mine")
    assert str(read_kernel_cache_path()) == "/mine"


def test_a_wrong_option_names_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", "max_split_size_mb:2")
    with pytest.raises(ConfigError, match="`max_split_size_mb` has the value '2'") as raised:
        read_alloc_conf()
    assert raised.value.where == "TRACEGRAPH_ALLOC_CONF in the environment of this process"


def test_every_variable_is_in_the_table():
    assert environment.__doc__ is not None
    source = inspect.getsource(environment)
    names = set(re.findall(r"\b(?:TRACEGRAPH|CUBLAS|PJRT)_[A-Z_]+\b", source))
    assert len(names) >= 5
    for name in names:
        assert f"| ``{name}`` |" in environment.__doc__


def test_a_wrong_value_is_refused_by_the_capture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "maybe")
    with pytest.raises(ConfigError, match="TRACEGRAPH_CHECK_REPLAY"):
        tg.capture(lambda x: x + 1)(jnp.arange(3.0))


def test_a_user_without_a_home_has_no_kernel_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    for name in ("HOME", "XDG_CACHE_HOME", "TRACEGRAPH_KERNEL_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert read_kernel_cache_path() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(read_kernel_cache_path()) == "/caches/tracegraph/kernels"
