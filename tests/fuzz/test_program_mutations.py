"""Mutated programs of XLA end in a graph within its buffers or in an error of ours, seeds fixed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fuzz import program_mutations, wire
from tests.fuzz.program_mutations import MUTATIONS, Subject, find_stray, make_subjects, run_mutation
from tests.fuzz.wire import VARINT, Field
from tracegraph.lowering import assemble, build_graph
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.schema import EXECUTABLE
from tracegraph.runtime.errors import UnsupportedError

RUNS = 15


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    return make_subjects()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_programs_are_read_or_refused(mutation: str, subjects: list[Subject]):
    for subject in subjects:
        for seed in range(RUNS):
            run_mutation(subject, mutation, random.Random(f"{subject.name}.{seed}"))


def test_both_ends_occur(subjects: list[Subject]):
    ends = {
        run_mutation(subjects[-1], name, random.Random(seed)).end
        for name in ("change_number", "flip_byte", "swap_fields")
        for seed in range(RUNS)
    }
    assert {"built", "UnsupportedError"} <= ends


@pytest.mark.parametrize("hidden", [5, 7, 8])
def test_an_unknown_field_is_found_where_the_sizes_agree(hidden: int, subjects: list[Subject]):
    """An argument's type of -1 takes 5 bytes less than protobuf writes."""
    subject = subjects[-1]
    schema = subject.schema.message_class(EXECUTABLE)
    fields = wire.parse(subject.encoded, schema.DESCRIPTOR, opens_computations=False)
    types = [field for _, field in wire.walk(fields) if _is_element_type(field)]
    unknown = Field(1023, VARINT, 1 << (7 * (hidden - 3)))
    fields.append(unknown)
    types[0].value = types[1].value = 2**32 - 1
    # Two of them save 10 bytes; the rest goes into lengths that are longer than they need be.
    lists = [field for _, field in wire.walk(fields) if isinstance(field.value, list)]
    lists[0].padding, lists[1].padding = 2, 8 - hidden
    written = wire.write(fields)
    message: Any = schema.FromString(written)
    message.DiscardUnknownFields()
    assert message.ByteSize() == len(written)
    serialized = program_mutations._write(subject, written, random.Random(0))
    with pytest.raises(UnsupportedError, match="field 1023 is not in the schema"):
        read_executable(serialized, subject.schema)


def _is_element_type(field: Field) -> bool:
    return field.descriptor is not None and field.descriptor.name == "element_type"


def test_a_range_that_nothing_holds_against_its_buffer_is_found(
    subjects: list[Subject], monkeypatch: pytest.MonkeyPatch
):
    """The fuzz sees what the two checks see."""
    monkeypatch.setattr(assemble, "check_ranges", lambda region, program: None)
    monkeypatch.setattr(build_graph, "verify_ranges", lambda definition: None)
    mul2 = subjects[0]
    executable: Any = read_executable(mul2.serialized, mul2.schema)
    for each in executable.buffer_allocations.values:
        each.size = 4096
    for piece in executable.thunks[0].custom_kernel_thunk.args:
        piece.slice.size = 4096
    larger = program_mutations.decode_executable(executable, name="mul2")
    assert find_stray(program_mutations.build(larger, mul2))


def test_the_command_counts_how_programs_end(capsys: pytest.CaptureFixture[str]):
    assert program_mutations.main(["--count", "48", "--seed", "3"]) == 0
    assert "0 wrong ends of 48; the slowest took" in capsys.readouterr().out
