"""Handlers that are called with frames of ours see what XLA gives them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.ffi_handlers import (
    BytesScratch,
    aligning,
    make_capsule,
    make_handler,
    read_number,
    take_report,
)
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.ffi.c_api import DataType, ErrorCode, ExecutionStage
from tracegraph.runtime.ffi.call import (
    ArrayAttribute,
    ArrayType,
    CallAttribute,
    DictionaryAttribute,
    FfiCall,
    ScalarAttribute,
)
from tracegraph.runtime.ffi.context import CallContext, InterfaceError, count_living
from tracegraph.runtime.ffi.frames import Frame
from tracegraph.runtime.ffi.handler import Handler, is_readable, read_facts
from tracegraph.runtime.ffi.registrations import find_handler
from tracegraph.runtime.ffi.states import States

DTYPES = {
    "bool": DataType.PRED,
    "int8": DataType.S8,
    "int16": DataType.S16,
    "int32": DataType.S32,
    "int64": DataType.S64,
    "uint8": DataType.U8,
    "uint16": DataType.U16,
    "uint32": DataType.U32,
    "uint64": DataType.U64,
    "float16": DataType.F16,
    "float32": DataType.F32,
    "float64": DataType.F64,
    "bfloat16": DataType.BF16,
    "complex64": DataType.C64,
    "complex128": DataType.C128,
}
ATTRIBUTES: dict[str, Any] = {
    "yes": True,
    "no": np.bool_(False),
    "i8": np.int8(-7),
    "i16": np.int16(-700),
    "i32": np.int32(-70000),
    "i64": np.int64(-(1 << 40)),
    "u8": np.uint8(200),
    "u16": np.uint16(60000),
    "u32": np.uint32(1 << 30),
    "u64": np.uint64(1 << 60),
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "nan": np.float32("nan"),
    "text": "häuser",
    "empty": "",
    "many": np.array([1, -2, 3], np.int32),
    "wide": np.array([0.5, -0.25], np.float64),
    "none": np.array([], np.int64),
    "inner": {"b": np.int32(2), "a": "x"},
    "Upper": np.int32(1),
}
# Executables of XLA, until the process ends: what they delete is in the counts of later tests.
HELD: list[Any] = []
OPERANDS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(True),
    np.arange(4, dtype=np.int8).reshape(2, 1, 2),
    np.zeros((0, 3), np.float32),
    np.array([1 + 2j], np.complex64),
    np.array([1.5, -2], jnp.bfloat16),
]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    take_report()
    before = count_living()
    yield
    assert count_living() == before


def type_of(array: Any) -> ArrayType:
    return ArrayType(DTYPES[array.dtype.name], tuple(array.shape))


def attribute_of(value: Any) -> CallAttribute:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping):
        return dictionary_of(value)
    array = np.asarray(value)
    dtype = DTYPES[array.dtype.name]
    return (
        ArrayAttribute(dtype, tuple(array.tolist()))
        if array.ndim
        else ScalarAttribute(dtype, array.item())
    )


def dictionary_of(values: Mapping[str, Any]) -> DictionaryAttribute:
    return DictionaryAttribute(tuple((key, attribute_of(each)) for key, each in values.items()))


def run(
    handler: Handler,
    operands: list[np.ndarray],
    results: list[np.ndarray],
    attributes: Mapping[str, Any] | None = None,
    context: CallContext | None = None,
    stage: ExecutionStage = ExecutionStage.EXECUTE,
) -> None:
    call = FfiCall(
        handler.target,
        tuple(map(type_of, operands)),
        tuple(map(type_of, results)),
        dictionary_of(attributes or {}),
    )
    has_data = stage is not ExecutionStage.INSTANTIATE
    frame = Frame(
        call,
        [each.ctypes.data if has_data else 0 for each in operands],
        [each.ctypes.data if has_data else 0 for each in results],
    )
    handler.run(stage, frame, context or CallContext(States()))


def register(name: str, functions: Any) -> None:
    jax.ffi.register_ffi_target(name, functions, platform="cpu")


def test_frame_equals_that_of_jax() -> None:
    register("tracegraph_record", make_capsule("record_execute"))
    types = [jax.ShapeDtypeStruct((2, 2), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)]
    call = jax.ffi.ffi_call("tracegraph_record", types)
    with jax.enable_x64(True):
        jax.block_until_ready(jax.jit(lambda *a: call(*a, **ATTRIBUTES))(*OPERANDS))
    theirs = take_report()
    results = [np.zeros((2, 2), np.int32), np.zeros((), np.float32)]
    run(make_handler("record_execute"), OPERANDS, results, ATTRIBUTES)
    assert take_report() == theirs
    assert len(theirs.splitlines()) == 10
    assert "Upper" in theirs
    assert results[0].tobytes() == b"\7" * 16


def test_state_of_the_first_stage_reaches_the_last_and_is_deleted() -> None:
    jax.ffi.register_ffi_type(
        "tracegraph_state",
        {"type_id": make_capsule("state_type"), "type_info": make_capsule("state_info")},
        platform="cpu",
    )
    functions = {"instantiate": "record_instantiate", "execute": "record_with_state"}
    register("tracegraph_stateful", {k: make_capsule(each) for k, each in functions.items()})
    x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
    compiled = jax.jit(jax.ffi.ffi_call("tracegraph_stateful", x)).lower(x).compile()
    HELD.append(compiled)
    jax.block_until_ready(compiled(x))
    theirs = take_report()
    handler = find_handler("tracegraph_stateful", "cpu")
    assert handler is not None
    assert handler.has(ExecutionStage.INSTANTIATE)
    before = read_number("deleted_states")
    states = States()
    for stage in (ExecutionStage.INSTANTIATE, ExecutionStage.PREPARE, ExecutionStage.EXECUTE):
        run(handler, [x], [y], context=CallContext(states), stage=stage)
    # XLA's own first stage on a CPU has no operands.
    ours, theirs = take_report().splitlines(), theirs.splitlines()
    assert ours[-4:] == theirs[-4:]
    assert ours[-1] == " state 41"
    with pytest.raises(InterfaceError, match="is set twice"):
        run(handler, [x], [y], context=CallContext(states), stage=ExecutionStage.INSTANTIATE)
    assert states
    del states
    gc.collect()
    assert read_number("deleted_states") == before + 1


def test_state_without_registration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "_deleters", {})
    handler = make_handler("record_execute", instantiate="record_instantiate")
    with pytest.raises(InterfaceError, match="before tracegraph was imported"):
        run(handler, [], [], stage=ExecutionStage.INSTANTIATE)


def test_everything_that_a_handler_may_ask() -> None:
    scratch = BytesScratch()
    context = CallContext(States(), stream=0x5555, scratch=scratch, ordinal=3)
    run(make_handler("ask_everything"), [], [], context=context)
    lines = [line.split(" ")[:2] for line in take_report().splitlines()]
    failed = [line[0] for line in lines if line[1:] == ["error"] and line[0]]
    assert failed in (["handler", "extension"], [])
    assert ["5555"] in lines
    assert ["3"] in lines
    assert ["tasks", "1"] in lines
    assert ["numbered", "1"] in lines
    assert scratch.asked == [100, 100]
    assert not scratch.blocks


def test_what_a_stage_does_not_have_is_an_error_with_a_message() -> None:
    run(make_handler("ask_everything"), [], [])
    report = take_report()
    assert "this stage has no stream" in report
    assert "this stage has no device memory" in report


def test_error_of_a_handler_keeps_its_message() -> None:
    with pytest.raises(InterfaceError, match="planted: the matrix is odd") as caught:
        run(make_handler("fail_execute"), [], [])
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_error_of_a_function_of_ours_is_raised_as_it_is() -> None:
    error = OutOfMemoryError("planted", where="here", why="planted", fix="none", anchor="memory")
    scratch = BytesScratch(error)
    with pytest.raises(OutOfMemoryError, match="planted"):
        run(make_handler("enqueue"), [], [], context=CallContext(States(), 1, scratch))


@pytest.mark.parametrize("alignment", [0, 3, 24, 32, 256])
def test_alignment_that_xla_refuses_is_refused_in_its_words(alignment: int) -> None:
    scratch = BytesScratch()
    context = CallContext(States(), 1, scratch)
    with (
        aligning(alignment),
        pytest.raises(
            InterfaceError, match=f"^INVALID_ARGUMENT: Unsupported alignment: {alignment}$"
        ),
    ):
        run(make_handler("enqueue"), [], [], context=context)
    assert not scratch.asked


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_alignment_that_xla_offers_is_offered(alignment: int) -> None:
    scratch = BytesScratch()
    with aligning(alignment):
        run(make_handler("enqueue"), [], [], context=CallContext(States(), 1, scratch))
    assert scratch.asked == [100]
    assert not scratch.blocks


@pytest.mark.parametrize("fails", [False, True])
def test_future_is_waited_for(fails: bool) -> None:
    handler = make_handler("complete_later")
    if not fails:
        return run(handler, [], [])
    with pytest.raises(InterfaceError, match="ABORTED: planted later"):
        run(handler, [], [], {"fails": True})
    return None


def test_facts_are_read() -> None:
    facts = read_facts(make_handler("ask_everything"))
    assert facts.is_declared_capturable
    assert is_readable(facts)
    facts = read_facts(make_handler("newer_execute"))
    assert facts.version == (0, 99)
    assert not facts.is_declared_capturable
    assert not is_readable(facts)


def test_handlers_are_found_by_name_and_platform() -> None:
    register("tracegraph_found", make_capsule("record_execute"))
    assert find_handler("tracegraph_found", "cpu") is not None
    assert find_handler("tracegraph_found", "CUDA") is None
    assert find_handler("tracegraph_missing", "cpu") is None
    # It waits for a plugin that never comes.
    jax.ffi.register_ffi_target(
        "tracegraph_gpu", make_capsule("record_execute"), platform="tracegraph_platform"
    )
    assert find_handler("tracegraph_gpu", "tracegraph_platform") is None


def test_untyped_handlers_are_not_found() -> None:
    jax.ffi.register_ffi_target(
        "tracegraph_untyped", make_capsule("record_execute"), platform="cpu", api_version=0
    )
    assert find_handler("tracegraph_untyped", "cpu") is None


def test_lapack_handler_gives_the_bits_of_jax() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(5, 5)).astype(np.float32)
    spd = x @ x.T + 9 * np.eye(5, dtype=np.float32)
    wanted = np.asarray(jax.lax.linalg.cholesky(jnp.asarray(spd), symmetrize_input=False))
    # As jaxlib asks for it: columns first, so that its lower part is our upper one.
    handler = find_handler("lapack_spotrf_ffi", "cpu")
    assert handler is not None
    columns, info = np.ascontiguousarray(spd.T), np.zeros((), np.int32)
    run(handler, [columns], [columns, info], {"uplo": np.uint8(ord("L"))})
    np.testing.assert_array_equal(np.tril(columns.T), wanted)
    assert info == 0
    handler = find_handler("lapack_ssyevd_ffi", "cpu")
    assert handler is not None
    symmetric = x + x.T
    values = np.zeros(5, np.float32)
    columns = np.ascontiguousarray(symmetric.T)
    attributes = {"mode": np.uint8(ord("V")), "uplo": np.uint8(ord("L"))}
    run(handler, [columns], [columns, values, info], attributes)
    vectors, wanted_values = jax.lax.linalg.eigh(jnp.asarray(symmetric), symmetrize_input=False)
    np.testing.assert_array_equal(columns.T, vectors)
    np.testing.assert_array_equal(values, wanted_values)
    with pytest.raises(InterfaceError, match="Wrong number of attributes"):
        run(handler, [columns], [columns, values, info])
