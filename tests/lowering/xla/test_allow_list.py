"""The list of interpreted fields: right for the recorded schema, and nothing else may be set."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.fakes.xla_programs import make_copy, make_kernel, make_program, message_class
from tests.fakes.xla_recordings import PROGRAMS, read_recording, recorded_schema
from tracegraph.lowering.xla import allow_list
from tracegraph.lowering.xla.allow_list import (
    ALLOWED,
    Fields,
    check_listed,
    check_schema,
    find_unlisted,
)
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.errors import UnsupportedError

# In 0.12 only.
NEWER_MESSAGES = {"xla.gpu.DynamicSliceConfig.Linear"}
NEWER_FIELDS = {"linear", "gpu_topology", "memcpy_stream_id"}


@pytest.mark.parametrize("name", sorted(set(ALLOWED) - NEWER_MESSAGES))
def test_every_listed_field_exists(name: str):
    fields = ALLOWED[name]
    listed = fields.read | fields.newer | set(fields.ignored)
    assert listed - set(recorded_schema().fields_of(name)) <= NEWER_FIELDS
    assert not fields.read & set(fields.ignored)
    assert all(len(reason) > 5 for reason in fields.ignored.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorded_programs_set_nothing_else(name: str):
    assert find_unlisted(read_executable(read_recording(name), recorded_schema())) is None


def test_an_unlisted_field_is_found_where_it_stands():
    program = make_program(make_kernel())
    thunk = program.thunks[0].custom_kernel_thunk
    assert find_unlisted(thunk) is None
    tile = thunk.tma_metadata.arg_index_to_tma_info[0]
    assert find_unlisted(thunk) is None
    tile.global_dims.append(1)
    assert find_unlisted(thunk) is None
    thunk.custom_kernel.kernel_spec.in_process_symbol.persistent_name = "topk"
    assert find_unlisted(thunk) == "stream_executor.KernelLoaderSpecProto.in_process_symbol"


def test_what_is_passed_over_is_not_looked_into():
    program = make_program(make_copy((1, 0, 4), (3, 0, 4), 4))
    copy = program.thunks[0].device_to_device_copy_thunk
    copy.copy_thunk.source_buffer.shape.layout.memory_space = 3
    assert find_unlisted(copy) is None
    program.program_shape.result.layout.memory_space = 3
    assert find_unlisted(program) == "xla.LayoutProto.memory_space"


def test_a_message_that_is_not_listed():
    assert find_unlisted(message_class("xla.gpu.InfeedThunkProto")()) == "xla.gpu.InfeedThunkProto"


@pytest.mark.parametrize(
    ("name", "is_listed"),
    [
        ("xla.gpu.ThunkInfoProto", True),
        ("xla.ShapedSliceProto", True),  # but for its shape, which is passed over
        ("stream_executor.gpu.TmaMetadataProto", True),  # through a map
        ("xla.LayoutProto", False),
        ("xla.ShapeProto", False),
        ("xla.gpu.CustomKernelThunkProto", False),  # down in its kernel's spec
        ("xla.gpu.InfeedThunkProto", False),
    ],
)
def test_a_type_is_passed_only_when_all_of_it_is_listed(name: str, is_listed: bool):
    assert allow_list._is_listed(message_class(name).DESCRIPTOR) is is_listed


def test_a_field_that_is_new_in_the_schema_is_looked_for():
    file = descriptor_pb2.FileDescriptorProto(name="b.proto", package="xla", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    shape = file.message_type.add(name="ShapeIndexProto")
    for number, name in enumerate(("indexes", "added"), start=1):
        shape.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("xla.ShapeIndexProto")
    message: Any = message_factory.GetMessageClass(descriptor)(indexes=1)
    assert find_unlisted(message) is None
    message.added = 1
    assert find_unlisted(message) == "xla.ShapeIndexProto.added"


def test_the_recorded_schema_has_all_that_is_read():
    check_schema(message_class("xla.gpu.GpuExecutableProto").DESCRIPTOR)


def test_a_schema_that_lost_a_field():
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="xla", syntax="proto3")
    shape = file.message_type.add(name="ShapeProto")
    layout = file.message_type.add(name="LayoutProto")
    file.message_type.add(name="HloComputationProto")
    kinds = descriptor_pb2.FieldDescriptorProto
    names = ("element_type", "dimensions", "is_dynamic_dimension", "tuple_shapes")
    for number, name in enumerate((*names, "renamed"), start=1):
        shape.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    shape.field.add(
        name="layout",
        number=9,
        type=kinds.TYPE_MESSAGE,
        type_name=".xla.LayoutProto",
        label=kinds.LABEL_OPTIONAL,
    )
    layout.field.add(
        name="minor_to_major", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_REPEATED
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("xla.ShapeProto")
    with pytest.raises(Refusal, match=r"its format has no xla\.LayoutProto\.element_size_in_bits$"):
        check_schema(descriptor)


def test_a_program_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ALLOWED, "xla.ShapeIndexProto", Fields(frozenset(("indexes", "lost"))))
    check_schema.cache_clear()
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(make_program(make_kernel()), name="step")
    expected = "is of another version of XLA: its format has no xla.ShapeIndexProto.lost"
    assert expected in str(caught.value)


MATMUL = "xla.gpu.CublasLtMatmulThunkProto"


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("group_sizes", {}, f"{MATMUL}.group_sizes"),
        ("grouped_gemm_config", {}, f"{MATMUL}.grouped_gemm_config"),
        ("a", {"shape": {"dimensions": [4]}}, None),
        ("gemm_config", {"algorithm": 5, "grad_x": True, "grad_y": True}, None),
        ("gemm_config", {"lhs_layout": {"num_rows": 3}}, None),
        ("a", {"slice": {"size": 4}}, None),
        ("canonical_hlo", "text", None),
    ],
)
def test_the_fields_of_a_matmul(field: str, value: Any, found: str | None):
    message = message_class(MATMUL)(**{field: value})
    assert find_unlisted(message) == found


def test_a_refusal_names_the_field_and_where_it_is():
    message = message_class(MATMUL)(group_sizes={})
    expected = rf"^sets {MATMUL}\.group_sizes in `dot`, whose meaning is not known"
    with pytest.raises(Refusal, match=expected):
        check_listed(message, " in `dot`")
