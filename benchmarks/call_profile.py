"""Counts what one call of a captured function does in tracegraph's own code."""

from __future__ import annotations

import collections
import cProfile
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import tracegraph
from tracegraph.lowering import request
from tracegraph.runtime import errors

_LAYERS = (tracegraph, request, errors)
OUR_FOLDERS = tuple(f"{pathlib.Path(str(layer.__file__)).resolve().parent}/" for layer in _LAYERS)
# The XLA call, waiting for it, and the copies between buffers.
EXCLUDED_NAMES = (
    "stages.py:__call__",
    "block_until_ready",
    "unsafe_buffer_pointer",
    "memmove",
    "copyto",
    "'copy' of 'numpy.ndarray'",
)


class Counts(NamedTuple):
    """The work of one call.

    Attributes:
        ours: calls of our functions, and calls that these make into anything else.
        bytecodes: Python instructions executed in our functions.
        excluded: calls that our functions make to XLA, to wait for it, and to copy.
        by_name: the calls in ``ours``, by file and function.
    """

    ours: int
    bytecodes: int
    excluded: int
    by_name: dict[str, int]


def count_calls(call: Callable[[], Any]) -> Counts:
    """Runs a call under the profiler, then again counting instructions.

    Args:
        call: runs one captured call, already warm.

    Returns:
        The counts.
    """
    profile = cProfile.Profile()
    profile.enable()
    call()
    profile.disable()
    by_name: collections.Counter[str] = collections.Counter()
    excluded = 0
    for entry in profile.getstats():
        if not _is_ours(entry.code):
            continue
        by_name[_describe(entry.code)] += entry.callcount
        for callee in entry.calls or ():
            name = _describe(callee.code)
            if any(text in name for text in EXCLUDED_NAMES):
                excluded += callee.callcount
            elif not _is_ours(callee.code):
                by_name[name] += callee.callcount
    return Counts(sum(by_name.values()), count_bytecodes(call), excluded, dict(by_name))


def count_bytecodes(call: Callable[[], Any]) -> int:
    """Returns how many Python instructions a call executes in our functions.

    A loop over the leaves inside one function makes no calls and shows only here.
    """
    count = 0

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not _is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        # Python 3.12 and later report instructions only after a frame has enabled it.
        count = 0
        call()
    finally:
        sys.settrace(previous)
    return count


def _is_ours(code: types.CodeType | str) -> bool:
    return isinstance(code, types.CodeType) and code.co_filename.startswith(OUR_FOLDERS)


def _describe(code: types.CodeType | str) -> str:
    if isinstance(code, str):
        return code
    return f"{pathlib.Path(code.co_filename).name}:{code.co_name}"
