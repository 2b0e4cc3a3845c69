"""An H200 that is only described: JAX compiles for it on a machine without a GPU.

Needs Python 3.12 and, beside jax, the wheels that `make deviceless` installs: the CUDA plugin, its
PJRT library and nvcc, which are 1.2 GB and need no driver.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
from typing import Any

import jax
from jax.experimental import topologies

from tests.paths import DATA

TARGET = DATA / "h200_target_config.txt"
# Set where a missing wheel is a failure, not a reason to skip.
REQUIRED_BY = "TRACEGRAPH_REQUIRE_DEVICELESS"
OLDEST_JAX = (0, 11)
PLUGINS = {
    "jax_plugins.xla_cuda12": "nvidia.cuda_nvcc",
    "jax_plugins.xla_cuda13": "nvidia.cu13",
}
_COMPILERS = ("jax-cuda", "nvidia-cuda-nvcc", "nvidia-nvjitlink")


def is_required() -> bool:
    """True when tests that need the wheels must run."""
    return os.environ.get(REQUIRED_BY, "") == "1"


def find_obstacle() -> str | None:
    """Returns why nothing can be compiled for a GPU here, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < OLDEST_JAX:
        return f"jax {jax.__version__} compiles for a GPU only where one is; needs 0.11 or later"
    found = [plugin for plugin in PLUGINS if _has_module(plugin)]
    if not found:
        return "no CUDA plugin of jax is installed; run make deviceless"
    if not any(_has_module(PLUGINS[plugin]) for plugin in found):
        return "the CUDA plugin has no nvcc beside it; run make deviceless"
    try:
        find_h200()
    except NotImplementedError:
        return "jax takes the CUDA plugin without a GPU's libraries only under JAX_PLATFORMS=cpu"
    return None


def find_wheels() -> list[str]:
    """Returns the names of the installed packages that compiling for a GPU takes."""
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return sorted(name for name in names if name.startswith(_COMPILERS))


def find_assembler() -> str | None:
    """Returns the path of the assembler of PTX, None where its wheel is not installed."""
    for plugin in PLUGINS.values():
        found = importlib.util.find_spec(plugin) if _has_module(plugin) else None
        for folder in (found and found.submodule_search_locations) or ():
            if (path := pathlib.Path(folder, "bin", "ptxas")).exists():
                return str(path)
    return None


@functools.cache
def find_h200() -> Any:
    """Returns the described device; `find_obstacle` says whether there is one."""
    return find_h200s(1)[0]


@functools.cache
def find_h200s(count: int, hosts: int = 1) -> list[Any]:
    """Returns so many described devices of each of some hosts, with one process each."""
    description = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGET.read_text(),
        # Slices, hosts in a slice, devices of a host.
        topology=f"1x{hosts}x{count}",
    )
    return list(description.devices)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
