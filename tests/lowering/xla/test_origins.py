"""Where a thunk comes from: the user's line behind an HLO instruction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.xla_programs import edit_computation, make_program
from tests.paths import ROOT
from tracegraph.lowering.xla.origins import index_origins


def read_module() -> Any:
    return make_program().hlo_module_with_config.hlo_module


def test_the_user_s_innermost_line():
    origins = index_origins(read_module())
    assert origins.locate("add") == "/home/me/train.py:7 in step, jit(step)/add, HLO `add`"
    assert origins.locate("square") == "HLO `square`"
    assert origins.locate("unknown") == "HLO `unknown`"


def test_frames_of_our_own_are_skipped():
    module = read_module()
    module.stack_frame_index.file_names[2] = f"{ROOT}/lowering/compile.py"
    assert index_origins(module).locate("add").startswith("/home/me/train.py:7 in step")
    module.stack_frame_index.file_names[2] = f"{ROOT}/examples/train_digits.py"
    assert index_origins(module).locate("add").startswith("examples/train_digits.py:5 in sort")


@pytest.mark.parametrize("frame_id", [-1, 0, 5])
def test_a_frame_that_is_not_there(frame_id: int):
    program = make_program()
    with edit_computation(program) as computation:
        computation.instructions[2].metadata.stack_frame_id = frame_id
    module = program.hlo_module_with_config.hlo_module
    assert index_origins(module).locate("add") == "jit(step)/add, HLO `add`"


def test_frames_in_a_circle_end():
    module = read_module()
    index = module.stack_frame_index
    for frame in index.stack_frames:
        frame.file_location_id = 3
    index.stack_frames[0].parent_frame_id = 4
    assert index_origins(module).locate("add") == "jit(step)/add, HLO `add`"


def test_names_and_places_that_are_not_there():
    module = read_module()
    index = module.stack_frame_index
    index.stack_frames[3].file_location_id = 9
    index.file_locations[1].function_name_id = 9
    del index.file_names[1:]
    assert index_origins(module).locate("add") == "?:99 in sort, jit(step)/add, HLO `add`"


def test_an_instruction_of_xla_s_own_comes_from_where_its_value_is_used():
    program = make_program()
    module = program.hlo_module_with_config.hlo_module
    with edit_computation(program) as computation:
        own = computation.instructions.add(name="custom-call.0", id=70)
        between = computation.instructions.add(name="tuple", id=71)
        between.operand_ids.extend([own.id, own.id])
        (add,) = [each for each in computation.instructions if each.name == "add"]
        add.operand_ids.append(between.id)
    line = "/home/me/train.py:7 in step, jit(step)/add"
    assert index_origins(module).locate("custom-call.0") == f"{line}, HLO `custom-call.0`"
    # A value that circles among instructions without an origin has none.
    with edit_computation(program) as computation:
        (add, own) = (computation.instructions[index] for index in (2, 4))
        del add.operand_ids[-1]
        own.operand_ids.append(71)
    assert index_origins(module).locate("custom-call.0") == "HLO `custom-call.0`"
