"""Environment variables: all are read here, typed, with their allowed values.

| Variable | Values (default first) | Meaning |
|---|---|---|
| ``TRACEGRAPH_CHECK_REPLAY`` | 0, 1 | host device: poison dead memory, vary the order of streams |
| ``TRACEGRAPH_LAUNCH_BLOCKING`` | 0, 1 | each replay waits for its work and raises its errors |
| ``TRACEGRAPH_NVTX`` | 0, 1 | ranges around captures and replays of new graphs, for profilers |
| ``TRACEGRAPH_PROGRESS`` | auto, 0, 1 | progress of captures over one second; 1: also in a file |
| ``TRACEGRAPH_EXPLAIN_RECAPTURES`` | 0, 1 | log why a function is captured anew |
| ``TRACEGRAPH_KERNEL_CACHE`` | 1, 0 | keep what was compiled in files, for other processes |
| ``TRACEGRAPH_KERNEL_CACHE_PATH`` | not set, a folder | where they are, instead of below ~/.cache |
| ``TRACEGRAPH_KERNEL_CACHE_MB`` | 4096, a number | how much they may take together |
| ``TRACEGRAPH_ALLOC_CONF`` | not set, ``option:value``,... | see ``runtime/memory/config.py`` |
| ``TRACEGRAPH_NO_MEMORY_CACHING`` | 0, 1 | every allocation and free goes to the device at once |
| ``CUBLAS_WORKSPACE_CONFIG`` | not set, ``:SIZE:COUNT``... | most workspace of a matmul or solve |
| ``PJRT_GPU_ENABLE_ASYNC_DISPATCH`` | not set | XLA's; with 1 no graph can be captured on a GPU |
| ``CUDA_VISIBLE_DEVICES`` | not set, indices or UUIDs | the GPUs that CUDA sees |

``CUBLAS_WORKSPACE_CONFIG`` is spelled as for cuBLAS: buffers of SIZE KiB, COUNT of each, as in
``:4096:2:16:8``. A matmul, or a solve, may use as many bytes as all of them together.
"""

from __future__ import annotations

import os
import pathlib
import re

from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf

KIB = 1024


def read_check_replay() -> bool:
    """Returns True when replays on the host device run in checking mode."""
    return _read_choice("TRACEGRAPH_CHECK_REPLAY", ("0", "1")) == "1"


def read_launch_blocking() -> bool:
    """Returns True when replays of new graphs wait until their work is done."""
    return _read_choice("TRACEGRAPH_LAUNCH_BLOCKING", ("0", "1")) == "1"


def read_nvtx() -> bool:
    """Returns True when captures, and replays of new graphs, are ranges for profilers."""
    return _read_choice("TRACEGRAPH_NVTX", ("0", "1")) == "1"


def read_progress() -> str:
    """Returns when the progress of a capture is shown: ``auto``, ``0`` or ``1``."""
    return _read_choice("TRACEGRAPH_PROGRESS", ("auto", "0", "1"))


def read_explain_recaptures() -> bool:
    """Returns True when it is logged why a function is captured anew."""
    return _read_choice("TRACEGRAPH_EXPLAIN_RECAPTURES", ("0", "1")) == "1"


def read_kernel_cache_path() -> pathlib.Path | None:
    """Returns the folder of the kernel cache, or None where there is none."""
    if _read_choice("TRACEGRAPH_KERNEL_CACHE", ("1", "0")) == "0":
        return None
    if path := os.environ.get("TRACEGRAPH_KERNEL_CACHE_PATH"):
        return pathlib.Path(path)
    # As the specification says, a relative one is none.
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        # A user without a home, as in containers, leaves the ``~``.
        base = pathlib.Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 the other one raises
    return base / "tracegraph" / "kernels" if base.is_absolute() else None


def read_kernel_cache_bytes() -> int:
    """Returns how many bytes the kernel cache may take.

    Raises:
        ConfigError: the value is no number.
    """
    name = "TRACEGRAPH_KERNEL_CACHE_MB"
    value = os.environ.get(name, "4096")
    if re.fullmatch("[0-9]{1,9}", value):
        return int(value) * KIB * KIB
    raise _make_value_error(
        name, why="it is a number of MiB: 2**20 bytes each", fix=f"export {name}=4096, or unset it"
    )


def read_alloc_conf() -> AllocatorConfig:
    """Returns the settings of the allocators.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed.

    Example:
        >>> os.environ["TRACEGRAPH_ALLOC_CONF"] = "max_split_size_mb:64"
        >>> read_alloc_conf().max_split_bytes
        67108864
    """
    name = "TRACEGRAPH_ALLOC_CONF"
    source = f"{name} in the environment of this process"
    return parse_alloc_conf(os.environ.get(name, ""), source=source)


def read_no_memory_caching() -> bool:
    """Returns True when allocators keep nothing for reuse."""
    return _read_choice("TRACEGRAPH_NO_MEMORY_CACHING", ("0", "1")) == "1"


def read_cublas_workspace_bytes() -> int | None:
    """Returns the most bytes of workspace that one matmul may use; None for no limit.

    Raises:
        ConfigError: the value is not a row of ``:SIZE:COUNT``.

    Example:
        >>> os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2:16:8"
        >>> read_cublas_workspace_bytes()
        8519680
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    value = os.environ.get(name)
    if value is None:
        return None
    # Nine digits are a million GiB: more is a typo.
    if re.fullmatch(r"(:[0-9]{1,9}:[0-9]{1,9})+", value):
        pairs = re.findall(r":([0-9]+):([0-9]+)", value)
        return sum(int(size) * int(count) * KIB for size, count in pairs)
    raise _make_value_error(
        name,
        why="the allowed values are pairs of KiB and count, each after a colon, as :4096:2:16:8",
        fix=f"export {name}=:4096:8, or unset it",
    )


def check_dispatch() -> None:
    """Refuses a setting of XLA's under which its work is enqueued after its calls have returned.

    Raises:
        ConfigError: graphs would overtake that work.
    """
    name = "PJRT_GPU_ENABLE_ASYNC_DISPATCH"
    # XLA takes no other value for yes.
    if os.environ.get(name) == "1":
        raise _make_value_error(
            name,
            why="XLA then enqueues work after its calls have returned: a graph would overtake it",
            fix=f"unset {name} before the process starts",
        )


def read_visible_gpus() -> str | None:
    """Returns which GPUs CUDA is to see, as CUDA spells it; None for all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _read_choice(name: str, choices: tuple[str, ...]) -> str:
    """Returns the variable's value, or the first choice when it is not set."""
    value = os.environ.get(name, choices[0])
    if value in choices:
        return value
    raise _make_value_error(
        name,
        why=f"the allowed values are {', '.join(choices)}",
        fix=f"export {name}={choices[-1]}, or unset it",
    )


def _make_value_error(name: str, *, why: str, fix: str) -> ConfigError:
    """Returns the error of a variable that is set to what it may not be."""
    return ConfigError(
        f"environment variable {name} has the value {os.environ[name]!r}",
        where=f"{name} in the environment of this process",
        why=why,
        fix=fix,
        anchor="config",
    )
