"""What lowering depends on besides the program: device, versions, settings."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import time
from typing import Any

import jax

from tracegraph.lowering.tuning import Tuning
from tracegraph.runtime.device import Device
from tracegraph.runtime.installed_packages import (
    digest_sources,
    find_installed,
    find_libraries,
    list_packages,
)
from tracegraph.runtime.jax_interop import describe_xla_flags, is_default_device
from tracegraph.runtime.own_folders import OWN_FOLDERS
from tracegraph.tracing.prepared_call import PreparedCall

_IMPORTED = time.time()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# XLA reads some of its settings, and NVIDIA's libraries theirs, from the environment.
_VARIABLES = ("XLA_", "TF_XLA_", "TF_CUDNN_", "TF_CUBLAS", "TF_ENABLE_", "TF_DISABLE_", "CUDA_")
_VARIABLES += ("CUBLAS", "CUDNN", "CUFFT", "CUSOLVER", "NVIDIA_TF32_OVERRIDE")
# Those of them that choose a GPU, a share of its memory or a log: they differ between processes.
_UNRELATED = ("XLA_PYTHON_CLIENT_", "XLA_CLIENT_MEM", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_UNRELATED += ("CUDA_CACHE_", "CUDA_MPS_", "CUBLAS_LOG", "CUBLASLT_LOG", "CUDNN_LOG", "CUDNN_FRONT")
_SETTING = "jax_"
# Settings of JAX that change what is reported or kept, not what is compiled.
_REPORTING = (
    "cache",
    "log",
    "dump",
    "_dir",
    "timeout",
    "traceback",
    "distributed",
    "transfer_guard",
    "leak",
    "visible_devices",
)
# What a user's option changes in a graph; the others choose memory and checks.
_OPTIONS = ("mode", "outputs", "static_leaves", "control_flow", "debug_nans")
_SUFFIXES = ("", "-cu12", "-cu13")
# By the package that has it, the library whose algorithms and plans a graph calls.
_LIBRARIES = {
    "nvidia-cublas": "libcublasLt",
    "nvidia-cudnn": "libcudnn",
    "nvidia-cufft": "libcufft",
    "nvidia-cusolver": "libcusolver",
}
# Whose versions matter on a GPU: they compile, or their calls are in the graph.
_PACKAGES = frozenset(
    [
        *(f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("pjrt", "plugin")),
        *(
            f"nvidia-{library}{suffix}"
            for library in (
                "cublas",
                "cudnn",
                "cufft",
                "cusolver",
                "cusparse",
                "cuda-nvcc",
                "cuda-nvrtc",
                "nvjitlink",
            )
            for suffix in _SUFFIXES
        ),
    ]
)


def describe_surroundings(
    prepared: PreparedCall, device: Device, *, shares_arguments: bool, tuning: Tuning
) -> dict[str, Any]:
    """Returns what lowering a call's program depends on, by name, as plain values.

    Args:
        prepared: the call.
        device: that it is lowered for.
        shares_arguments: see `share_arguments`.
        tuning: how it is lowered.
    """
    options = {name: getattr(prepared.options, name) for name in _OPTIONS}
    return {
        "arguments": prepared.names,
        "device": _describe_device(device),
        "donated": prepared.donated,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_VARIABLES) and not name.startswith(_UNRELATED)
        },
        "form": (device.takes_kernels, device.updates_in_place, shares_arguments, repr(tuning)),
        "options": options,
        # The names of mapped axes are an object without a text; a captured call is in no map.
        "settings": _ADDRESS.sub("", repr(prepared.signature.settings)),
        "settings of JAX": _read_jax_settings(),
        "versions": read_versions(),
        "flags of XLA": describe_xla_flags(),
    }


def read_versions() -> dict[str, str]:
    """Returns the versions that a lowering is made by."""
    return {
        "jax": jax.__version__,
        "jaxlib": _read_jaxlib_version(),
        "tracegraph": find_own_version() or "",
        **_read_package_versions(),
        **_find_system_libraries(),
    }


def _describe_device(device: Device) -> tuple[Any, ...]:
    jax_device = device.jax_device
    kind = (jax_device.platform, jax_device.device_kind, jax_device.client.platform_version)
    if device.takes_kernels:
        return (*kind, device.target)
    # XLA's code is loaded for a device, and results of the default one are not committed to it.
    return (*kind, jax_device.id, is_default_device(jax_device), _describe_processor())


@functools.cache
def _describe_processor() -> str:
    """Returns the kind and the features of this machine's processor: code of XLA:CPU uses them."""
    features = ""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith(("flags", "Features", "model name")):
            features += line
        elif not line and features:
            break
    return f"{platform.machine()} {platform.processor()} {features}"


@functools.cache
def _read_jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _read_package_versions() -> dict[str, str]:
    """Returns the versions of NVIDIA's and JAX's packages, by their names."""
    return {name: each for name, each in list_packages().items() if name in _PACKAGES}


@functools.cache
def _find_system_libraries() -> dict[str, str]:
    """Returns the files of NVIDIA's libraries that no package has.

    XLA loads those of an installed CUDA where JAX was installed without its own.
    """
    packages = _read_package_versions()
    missing = {
        library
        for package, library in _LIBRARIES.items()
        if not any(f"{package}{suffix}" in packages for suffix in _SUFFIXES)
    }
    return find_libraries(missing) if missing else {}


@functools.cache
def find_own_version() -> str | None:
    """Returns a digest of our own sources, so that a change of one is another version.

    Returns:
        None where one has changed since it was imported: then it is not known which code runs here.
    """
    digest, latest = digest_sources(OWN_FOLDERS)
    return digest if latest < _IMPORTED else None


@functools.cache
def describe_package(name: str) -> str | None:
    """Returns a digest of an installed package's files and of the versions of all packages.

    Args:
        name: of the imported module, the topmost of the package.

    Returns:
        None where it is not installed, or was changed since tracegraph was imported.
    """
    digest, latest = digest_sources(find_installed(name))
    return f"{digest} {_digest_packages()}" if 0.0 < latest < _IMPORTED else None


@functools.cache
def _digest_packages() -> str:
    return hashlib.sha256(repr(sorted(list_packages().items())).encode()).hexdigest()


def _read_jax_settings() -> dict[str, str]:
    values: dict[str, Any] = jax.config.values
    return {
        name: repr(value)
        for name, value in values.items()
        if name.startswith(_SETTING) and not any(word in name for word in _REPORTING)
    }
