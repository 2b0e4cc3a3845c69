"""Programs of XLA that are mutated, and how each is built."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tests.fakes.gpu_programs import make_frame, make_region
from tests.fakes.riegeli_writer import write_program
from tests.fakes.xla_programs import F32X8, make_copy, make_kernel, make_program, shaped
from tests.fakes.xla_recordings import PROGRAMS, read_recording, recorded_schema
from tests.fuzz import wire
from tests.fuzz.wire import Message
from tracegraph.lowering.assemble import XlaRegion, assemble
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.request import BufferSpec
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.lowering.xla.schema import EXECUTABLE
from tracegraph.runtime.definition.graph import GraphDefinition

# One of each thunk, a scatter that adds floats, a constant and a tensor map.
TEXT = f"""
buffer_allocations {{ values {{ index: 5 size: 8 is_constant: true }} }}
constants {{ symbol_name: "buffer_for_c_1" allocation_index: 5 }}
hlo_module_with_config {{ hlo_module {{ computations {{
  id: 2 root_id: 3
  instructions {{ name: "sum" id: 3 opcode: "add" shape {{ {F32X8} }} }}
  instructions {{ name: "s" id: 4 opcode: "scatter" shape {{ {F32X8} }} called_computation_ids: 2 }}
  instructions {{
    name: "c.1" id: 5 opcode: "constant"
    shape {{ element_type: F32 dimensions: 2 layout {{ minor_to_major: 0 }} }}
    literal {{
      shape {{ element_type: F32 dimensions: 2 layout {{ minor_to_major: 0 }} }}
      f32s: 1 f32s: 2
    }}
  }}
}} }} }}
"""
TENSOR_MAP = """
tma_metadata { arg_index_to_tma_info { key: 0 value {
  element_size: 4 global_dims: 8 box_dims: 8 element_strides: 1
} } }
"""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A sound program.

    Attributes:
        name: of it.
        serialized: as JAX gives it.
        schema: of its messages.
        program: what is read from it.
    """

    name: str
    serialized: bytes = dataclasses.field(repr=False)
    schema: Any = dataclasses.field(repr=False)
    program: XlaProgram = dataclasses.field(repr=False)

    @functools.cached_property
    def fields(self) -> Message:
        """The fields of its executable; to be copied before they are changed."""
        return wire.parse(self.encoded, self.schema.message_class(EXECUTABLE).DESCRIPTOR)

    @functools.cached_property
    def encoded(self) -> bytes:
        """Its executable as one message."""
        return read_executable(self.serialized, self.schema).SerializeToString()


def make_subjects() -> list[Subject]:
    """Returns the recorded programs, and one with all kinds of thunks."""
    schema = recorded_schema()
    constant = make_kernel(((5, 0, 8), (0, 0, 32)), (False, True))
    everything = make_program(
        make_kernel(text=f"zeroed_output_buffer_indices: 2 use_pdl: true {TENSOR_MAP}"),
        make_copy((1, 0, 32), (3, 0, 32), 32),
        f"memzero_thunk {{ {shaped('dest_buffer', (3, 0, 8))} }}",
        "memset32bit_value_thunk {"
        " dest_buffer { buffer_allocation_index: 3 offset: 8 size: 8 } value: 3 }",
        "replica_id_thunk { dest_buffer { buffer_allocation_index: 3 offset: 16 size: 4 } }",
        f"async_start_thunk {{ thunks {{ thunks {{ {constant} }} }} }}",
        "async_done_thunk { }",
        text=TEXT,
    )
    serialized = {name: read_recording(name) for name in PROGRAMS}
    serialized["everything"] = write_program(schema, [everything])
    return [make_subject(name, data, schema) for name, data in serialized.items()]


def make_subject(name: str, serialized: bytes, schema: Any) -> Subject:
    """Returns a program that is sound: it is read and built."""
    program = decode_executable(read_executable(serialized, schema), name=name)
    subject = Subject(name, serialized, schema, program)
    build(program, subject)
    return subject


def build(program: XlaProgram, subject: Subject) -> GraphDefinition:
    """Assembles a program for the arguments and results of the sound one, and builds its graph."""
    sizes = {each.name: each.nbytes for each in subject.program.allocations}
    parameters = {
        each.parameter: each for each in subject.program.allocations if each.parameter is not None
    }
    inputs = [_make_spec(f"in{i}", parameters[i].nbytes) for i in sorted(parameters)]
    outputs = [_make_spec(f"out{i}", sizes[n]) for i, n in enumerate(subject.program.outputs)]
    region = XlaRegion(make_region("r", inputs, outputs), program)
    frame: DeviceProgram = make_frame(inputs, outputs)
    assembled = assemble([region], (), into=frame)
    return build_graph(assembled, plan_memory("r", find_lifetimes(assembled)))


def _make_spec(name: str, nbytes: int) -> BufferSpec:
    return BufferSpec(name, (nbytes,), np.dtype(np.uint8))


def find_stray(definition: GraphDefinition) -> list[str]:
    """Returns every range of a graph's nodes that is not within its slot, and slots outside."""
    sizes = {slot.name: slot.nbytes for slot in definition.slots}
    nodes = [node for stage in definition.stages for node in stage.nodes]
    ranges = [use for node in nodes for use in node.ranges]
    stray = [
        f"{use}"
        for use in ranges
        if not 0 <= use.offset <= use.offset + use.nbytes <= sizes[use.buffer]
    ]
    ends = [slot.offset + slot.nbytes for slot in definition.slots]
    return stray + [f"end {end}" for end in ends if end > definition.arena_bytes]
