"""The way of a function to a graph definition, step by step and without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tests.deviceless.programs import Program
from tests.fakes.compilers import make_compiler
from tracegraph.capturing.capture_lowering import make_request
from tracegraph.capturing.fastest_variant import _open, _replace
from tracegraph.decorator import capture
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.lower import Lowered, lower_request
from tracegraph.lowering.request import CaptureRequest
from tracegraph.lowering.tuning import UNTUNED, Tuning
from tracegraph.replacements.match import Machine, Rule
from tracegraph.replacements.rules import find_matches
from tracegraph.runtime.definition.code_target import CompileKernel
from tracegraph.tracing.checked_graph import check_trace, finish_checks, trace_call
from tracegraph.tracing.prepared_call import prepare_call


@contextlib.contextmanager
def setting_for(program: Program) -> Iterator[None]:
    """Turns 64-bit types on for a program that needs them."""
    with jax.enable_x64(program.needs_x64 or bool(jax.config.read("jax_enable_x64"))):
        yield


def make_capture_request(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate_argnums: Sequence[int] = (),
) -> CaptureRequest:
    """Traces, checks and partitions a call as `tracegraph.capture` does at its first one.

    Args:
        function: takes and returns trees of arrays.
        arguments: positional arguments; only their types are read.
        donate_argnums: positions of the arguments that are given up.

    Raises:
        CaptureError: the function cannot be captured.
    """
    options = capture(function, donate_argnums=tuple(donate_argnums))._options
    prepared = prepare_call(function, options, tuple(arguments), {}, device=None, has_values=False)
    first = check_trace(prepared, trace_call(prepared))
    finish_checks(prepared, first)
    return make_request(prepared, first.checked, bind=first.traced.bind)


def make_replaced_request(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rules: Sequence[Rule],
    machine: Machine,
    donate_argnums: Sequence[int] = (),
) -> CaptureRequest:
    """Does what `make_capture_request` does, with all that rules find replaced."""
    options = capture(function, donate_argnums=tuple(donate_argnums))._options
    prepared = prepare_call(function, options, tuple(arguments), {}, device=None, has_values=False)
    first = check_trace(prepared, trace_call(prepared))
    finish_checks(prepared, first)
    first = _open(first)
    for rule in rules:
        first = _replace(first, rule, find_matches(rule, first.checked.graph, machine))
    return make_request(prepared, first.checked, bind=first.traced.bind)


def lower_for_gpu(request: CaptureRequest, device: Any) -> Lowered:
    """Compiles a request for a GPU, decodes, plans and builds it."""
    return lower_request(request, make_compiler(device, takes_kernels=True))


def lower_with_own_kernels(
    request: CaptureRequest,
    device: Any,
    compile_kernel: CompileKernel,
    tuning: Tuning = UNTUNED,
) -> Lowered:
    """Does what `lower_for_gpu` does, and compiles our own kernels.

    Args:
        request: with or without kernels of ours.
        device: of a topology.
        compile_kernel: for the architecture of that device.
        tuning: how the program is made.
    """
    compiler = make_compiler(device, takes_kernels=True)
    target: Any = dataclasses.replace(compiler.target, compile_kernel=compile_kernel)  # pyright: ignore[reportArgumentType]
    return lower_request(request, Compiler(target, compiler._progress, tuning=tuning))


def compile_whole(program: Program, device: Any) -> bytes:
    """Returns what XLA makes of a program as one compilation, as bytes.

    Args:
        program: captured without its donation being arranged by us.
        device: what it is compiled for; may be one that is only described.
    """
    arguments = program.make_arguments(np.random.default_rng(0))
    sharding = jax.sharding.SingleDeviceSharding(device)
    types = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    jitted = jax.jit(
        program.function,
        donate_argnums=program.donate_argnums,
        keep_unused=True,
        out_shardings=sharding,
    )
    with jax.default_device(device), warnings.catch_warnings():
        # The Triton form of Pallas is deprecated in 0.12, and works.
        warnings.simplefilter("ignore", DeprecationWarning)
        executable: Any = jitted.lower(*types).compile().runtime_executable()
    return executable.serialize()
