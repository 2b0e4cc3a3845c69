"""The precision flags in XLA's programs for an H200: cuBLAS, XLA's own kernels, convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.fakes.compilers import make_compiler
from tracegraph.capturing.capture_lowering import lower_checked
from tracegraph.lowering.compiler import Compiler
from tracegraph.runtime.definition.cudnn_calls import Convolution
from tracegraph.runtime.definition.library_nodes import CudnnNode, MatmulNode
from tracegraph.runtime.definition.nodes import KernelNode
from tracegraph.tracing.checked_graph import check_trace, trace_call
from tracegraph.tracing.prepared_call import prepare_call

SQUARE = np.ones((256, 256), np.float32)


@pytest.fixture
def cublas(monkeypatch: Any) -> None:
    """Lets XLA call cuBLAS, which it may choose on a GPU, where it would write a kernel here."""
    compile_region = Compiler.compile

    def compile_with_cublas(self: Any, *args: Any, **keywords: Any) -> Any:
        options = (*keywords.pop("options", ()), ("xla_gpu_enable_triton_gemm", False))
        return compile_region(self, *args, **keywords, options=options)

    monkeypatch.setattr(Compiler, "compile", compile_with_cublas)


def lower(function: Any, *args: Any, device: Any) -> Any:
    captured: Any = tg.capture(function, name="step")
    prepared = prepare_call(function, captured._options, args, {}, device=None, has_values=False)
    first = check_trace(prepared, trace_call(prepared))
    return lower_checked(prepared, first, make_compiler(device, takes_kernels=True))[1]


def list_nodes(function: Any, *args: Any, device: Any) -> Iterator[Any]:
    for stage in lower(function, *args, device=device).definition.stages:
        yield from stage.nodes


def multiply(x: Any) -> Any:
    return x @ x


def find_matmul(dtype: Any, device: Any) -> Any:
    nodes = list_nodes(multiply, SQUARE.astype(dtype), device=device)
    (matmul,) = [node.matmul for node in nodes if isinstance(node, MatmulNode)]
    return matmul


@pytest.mark.usefixtures("cublas")
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_cublas_computes_in_tf32_unless_it_is_forbidden(dtype: str, h200: Any) -> None:
    assert find_matmul(dtype, h200).compute_type == "32F_FAST_TF32"
    with tg.backends.matmul.flags(allow_tf32=True):
        assert find_matmul(dtype, h200).compute_type == "32F_FAST_TF32"
    with tg.backends.matmul.flags(allow_tf32=False):
        assert find_matmul(dtype, h200).compute_type == "32F"
    with tg.backends.cudnn.flags(allow_tf32=False):
        assert find_matmul(dtype, h200).compute_type == "32F_FAST_TF32"


@pytest.mark.usefixtures("cublas")
@pytest.mark.parametrize(("dtype", "name"), [("float16", "fp16"), (jnp.bfloat16, "bf16")])
def test_cublas_adds_16_bits_in_the_type_of_the_result(dtype: Any, name: str, h200: Any) -> None:
    flag = f"allow_{name}_reduced_precision_reduction"
    assert find_matmul(dtype, h200).d.dtype == np.dtype(dtype).name
    with tg.backends.matmul.flags(**{flag: False}):
        matmul = find_matmul(dtype, h200)
    assert (matmul.compute_type, matmul.d.dtype) == ("32F", "float32")


def read_code(device: Any) -> list[bytes]:
    nodes = list_nodes(multiply, SQUARE, device=device)
    return [node.code.cubin for node in nodes if isinstance(node, KernelNode)]


def test_the_kernels_of_xla_change_with_the_flag(h200: Any) -> None:
    usual = read_code(h200)
    with tg.backends.matmul.flags(allow_tf32=True):
        assert read_code(h200) == usual
    with tg.backends.matmul.flags(allow_tf32=False):
        assert read_code(h200) != usual


def test_cudnn_computes_in_tf32_unless_it_is_forbidden(h200: Any) -> None:
    images, filters = np.ones((8, 16, 16, 16), np.float32), np.ones((16, 16, 3, 3), np.float32)

    def convolve(i: Any, f: Any) -> Any:
        return lax.conv(i, f, (1, 1), "SAME")

    def allows_tf32() -> bool:
        nodes = list_nodes(convolve, images, filters, device=h200)
        (call,) = [node.call for node in nodes if isinstance(node, CudnnNode)]
        assert isinstance(call, Convolution)
        return call.algorithm.allows_tf32

    assert allows_tf32()
    with tg.backends.cudnn.flags(allow_tf32=False):
        assert not allows_tf32()
    with tg.backends.matmul.flags(allow_tf32=False):
        assert allows_tf32()
