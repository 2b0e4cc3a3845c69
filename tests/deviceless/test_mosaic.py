"""A kernel of Mosaic GPU, compiled for a described H200: what its call asks of a device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.deviceless.pipeline import make_capture_request
from tests.fakes.compilers import make_compiler
from tests.mosaic_kernels import double_exp
from tracegraph.lowering.lower import lower_request
from tracegraph.runtime.cuda.libraries.mosaic import (
    TARGET,
    VERSIONS,
    MosaicHandler,
    find_library,
    find_mosaic,
)
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.ffi.call import FfiCall

X = np.ones((128, 128), np.float32)


def test_its_attributes_are_those_of_a_kernel_of_one_gpu(
    h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[FfiCall] = []
    compiler = make_compiler(h200, takes_kernels=True)

    def accept(_: Any, call: Any) -> str:
        calls.append(call)
        return ""

    monkeypatch.setattr(type(compiler.target), "find_call_problem", accept)
    lowered = lower_request(make_capture_request(double_exp, (X,)), compiler)
    (stage,) = lowered.definition.stages
    assert [node.call for node in stage.nodes if isinstance(node, FfiCallNode)] == calls
    assert [call.target for call in calls] == [TARGET]
    monkeypatch.setattr(jax, "__version__", VERSIONS[-1])
    library = find_library()
    assert library is not None
    assert find_mosaic(calls[0], 0xC0) == MosaicHandler(0xC0, library)
