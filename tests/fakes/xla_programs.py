"""Small compiled programs, written as text in the recorded schema and parsed into messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass

from tests.fakes.xla_recordings import described_types, recorded_schema
from tracegraph.lowering.xla.schema import COMPUTATION, EXECUTABLE

F32X8 = (
    "element_type: F32 dimensions: 8 is_dynamic_dimension: false"
    " layout { minor_to_major: 0 tail_padding_alignment_in_elements: 1 }"
)

# `train.py:7 in step` called a function of JAX; the inner frames are JAX's and our own.
STACK = """
stack_frame_index {
  file_names: "/home/me/train.py" file_names: "/venv/site-packages/jax/numpy.py"
  file_names: "<frozen x>"
  function_names: "fit" function_names: "make.<locals>.step" function_names: "sort"
  file_locations { file_name_id: 1 function_name_id: 1 line: 3 }
  file_locations { file_name_id: 1 function_name_id: 2 line: 7 }
  file_locations { file_name_id: 2 function_name_id: 3 line: 99 }
  file_locations { file_name_id: 3 function_name_id: 3 line: 5 }
  stack_frames { file_location_id: 1 }
  stack_frames { file_location_id: 2 parent_frame_id: 1 }
  stack_frames { file_location_id: 3 parent_frame_id: 2 }
  stack_frames { file_location_id: 4 parent_frame_id: 3 }
}
"""

PROGRAM = f"""
module_name: "jit_step"
program_shape {{ parameters {{ {F32X8} }} parameters {{ {F32X8} }} result {{ {F32X8} }} }}
buffer_allocations {{
  values {{ index: 0 size: 32 maybe_live_out: true }}
  values {{ index: 1 size: 32 is_entry_computation_parameter: true }}
  values {{ index: 2 size: 32 is_entry_computation_parameter: true parameter_number: 1 }}
  values {{ index: 3 size: 512 }}
  values {{ index: 4 size: 4 is_thread_local: true }}
}}
output_info_map {{ shape_index {{ }} output_info {{ allocation_index: 0 }} }}
hlo_module_with_config {{
  config {{ replica_count: 1 num_partitions: 1 }}
  hlo_module {{
    entry_computation_id: 1
    computations {{
      id: 1
      instructions {{ name: "p0" id: 10 opcode: "parameter" shape {{ {F32X8} }} }}
      instructions {{ name: "p1" id: 11 opcode: "parameter" shape {{ {F32X8} }} }}
      instructions {{
        name: "add" id: 12 opcode: "fusion" shape {{ {F32X8} }} operand_ids: 10 operand_ids: 11
        metadata {{ op_name: "jit(step)/add" stack_frame_id: 4 }}
      }}
      instructions {{
        name: "square" id: 13 opcode: "fusion" shape {{ {F32X8} }} operand_ids: 10 operand_ids: 10
      }}
    }}
    {STACK}
  }}
}}
"""

# A fused computation that adds 1 to an integer.
ADDITION = """
    instructions { name: "n" opcode: "parameter" id: 1 shape { element_type: S32 } }
    instructions {
      name: "c" opcode: "constant" id: 2 shape { element_type: S32 }
      literal { shape { element_type: S32 } s32s: 1 }
    }
    instructions {
      name: "a" opcode: "add" id: 3 operand_ids: 1 operand_ids: 2 shape { element_type: S32 }
    }
"""

Place = tuple[int, int, int]


def message_class(name: str) -> Any:
    """Returns the class of a message of the recorded schema."""
    return recorded_schema().message_class(name)


def merge_text(program: Any, *texts: str) -> None:
    """Merges texts into a program; computations are messages in them, as XLA describes them."""
    described = GetMessageClass(described_types().FindMessageTypeByName(EXECUTABLE))
    merged: Any = described.FromString(program.SerializeToString())
    for text in texts:
        text_format.Merge(text, merged)
    program.ParseFromString(merged.SerializeToString())


def read_computation(text: str) -> dict[str, Any]:
    """Returns the instructions of an ``HloComputationProto`` by name."""
    computation = text_format.Parse(text, message_class(COMPUTATION)())
    return {each.name: each for each in computation.instructions}


@contextlib.contextmanager
def edit_computation(program: Any, place: int = 0) -> Iterator[Any]:
    """Yields a computation of a program, which then has what it was made into."""
    computations = program.hlo_module_with_config.hlo_module.computations
    computation = message_class(COMPUTATION).FromString(computations[place])
    yield computation
    computations[place] = computation.SerializeToString()


def make_program(*thunks: str, text: str = "") -> Any:
    """Returns a program of two float32[8] parameters and one result.

    Its allocations: #0 the result, #1 and #2 the parameters, #3 scratch of 512 bytes, #4 none.

    Args:
        thunks: the body of each ``ThunkProto``.
        text: merged into the program.
    """
    program = message_class(EXECUTABLE)()
    merge_text(program, PROGRAM, text, *(f"thunks {{ {thunk} }}" for thunk in thunks))
    return program


def name_thunk(name: str) -> str:
    """Returns the text of a thunk's name."""
    return f'thunk_info {{ profile_annotation: "{name}" thunk_id: 1 }}'


def piece(place: Place) -> str:
    """Returns the text of a slice: allocation, offset, size."""
    index, offset, size = place
    return f"buffer_allocation_index: {index} offset: {offset} size: {size}"


def shaped(field: str, place: Place) -> str:
    """Returns the text of a field that holds a shaped slice."""
    return f"{field} {{ slice {{ {piece(place)} }} shape {{ {F32X8} }} }}"


def make_kernel(
    places: Sequence[Place] = ((1, 0, 32), (2, 0, 32), (0, 0, 32)),
    written: Sequence[bool] = (False, False, True),
    *,
    name: str = "add",
    text: str = "",
) -> str:
    """Returns the text of a kernel thunk: one parameter per argument, 4 blocks of 8 threads.

    Args:
        places: bytes of each argument.
        written: for each whether it is written.
        name: of the instruction that it computes.
        text: merged into the ``CustomKernelThunkProto``.
    """
    flags = " ".join(f"written: {str(flag).lower()}" for flag in written)
    packing = " ".join(
        f"kernel_arguments {{ relocations {{ kind: KIND_BITS64_ABSOLUTE argument_index: {i} }} }}"
        for i in range(len(places))
    )
    return f"""{name_thunk(name)} custom_kernel_thunk {{
      {" ".join(shaped("args", place) for place in places)} {flags}
      custom_kernel {{
        name: "label"
        block_dims {{ coordinates {{ x: 4 y: 1 z: 1 }} }}
        thread_dims {{ coordinates {{ x: 8 y: 1 z: 1 }} }}
        kernel_spec {{
          kernel_name: "{name}_kernel" cubin {{ data: "code of {name}" }} arity: {len(places)}
          kernel_args_packing_spec {{ {packing} }}
        }}
      }}
      {text}
    }}"""


def make_copy(source: Place, target: Place, size: int, *, name: str = "copy") -> str:
    """Returns the text of a thunk that copies bytes on the device."""
    body = f"{shaped('source_buffer', source)} {shaped('destination_buffer', target)}"
    body += f" mem_size: {size}"
    return f"{name_thunk(name)} device_to_device_copy_thunk {{ copy_thunk {{ {body} }} }}"
