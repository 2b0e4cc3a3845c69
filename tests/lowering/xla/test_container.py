"""The container of XLA's programs: read whole, or refused with the layer, byte and record."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.riegeli_writer import (
    SIGNATURE,
    make_manifest,
    record_chunk,
    varint,
    write_chunks,
    write_header,
    write_program,
    write_split,
)
from tests.fakes.xla_recordings import PROGRAMS, read_recording, recorded_schema
from tests.oracles.error_lines import match
from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.container import read_executable, read_message
from tracegraph.lowering.xla.schema import EXECUTABLE, OPTIONS
from tracegraph.runtime.errors import UnsupportedError

SCHEMA = recorded_schema()
# Numbers of fields of GpuExecutableProto in the recorded schema.
ASM_TEXT, BINARY, MODULE_NAME, THUNKS = 3, 4, 8, 13


def executable(**fields: Any) -> Any:
    return SCHEMA.message_class(EXECUTABLE)(**fields)


def thunk(name: str) -> Any:
    return SCHEMA.message_class("xla.gpu.ThunkProto")(thunk_info={"profile_annotation": name})


def catch_refusal(serialized: bytes) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        read_executable(serialized, SCHEMA)
    return caught.value


def try_reading(serialized: bytes) -> tuple[Any, UnsupportedError | None]:
    try:
        return read_executable(serialized, SCHEMA), None
    except UnsupportedError as error:
        return None, error


def read_or_catch(serialized: bytes) -> Any:
    """Returns the program, or None; any other end of the decoder fails the test."""
    program, error = try_reading(serialized)
    if error is not None:
        assert error.what.startswith("the program that XLA compiled cannot be read: ")
        assert error.where
    return program


def write_outer(inner: bytes) -> bytes:
    """Returns a program whose inner file is given, for faults in it."""
    return write_header() + write_split(SCHEMA, OPTIONS, [(1, inner)], "s")


def write_inner(manifest: Any, records: Sequence[bytes]) -> bytes:
    return write_outer(write_chunks(record_chunk([manifest.SerializeToString(), *records])))


class TestRead:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_a_recorded_program_is_read(self, name: str) -> None:
        program: Any = read_executable(read_recording(name), SCHEMA)
        assert program.module_name == "jit__lambda"
        kind = {"mul2": "custom_kernel_thunk", "mm_f64": "cublas_lt_matmul_thunk"}[name]
        assert [each.WhichOneof("impl") for each in program.thunks] == [kind]
        assert program.hlo_module_with_config.hlo_module.name == "jit__lambda"
        assert len(program.buffer_allocations.values) > 0

    @pytest.mark.parametrize("compression", ["", "s"])
    def test_pieces_are_put_together(self, compression: str) -> None:
        pieces = [
            (ASM_TEXT, "naïve".encode()),
            executable(thunks=[thunk("a")], module_name="first"),
            (BINARY, b"\x00\xff" * 70000),
            executable(thunks=[thunk("b")], module_name="last"),
        ]
        program: Any = read_executable(write_program(SCHEMA, pieces, compression), SCHEMA)
        assert program.asm_text == "naïve"
        assert program.binary == b"\x00\xff" * 70000
        assert program.module_name == "last"
        names = [each.thunk_info.profile_annotation for each in program.thunks]
        assert names == ["a", "b"]

    def test_pieces_may_stand_in_any_order(self) -> None:
        pieces = [
            (ASM_TEXT, b"ptx"),
            (BINARY, b"cubin"),
            executable(module_name="m"),
            executable(thunks=[thunk("a")]),
        ]
        orders = itertools.permutations(pieces)
        found = {
            read_executable(write_program(SCHEMA, order), SCHEMA).SerializeToString(
                deterministic=True
            )
            for order in orders
        }
        assert len(found) == 1

    def test_one_file_may_have_several_chunks(self) -> None:
        pieces = [(BINARY, b"cubin"), executable(module_name="m")]
        manifest = make_manifest(SCHEMA, EXECUTABLE, pieces).SerializeToString()
        module = executable(module_name="m").SerializeToString()
        chunks = [record_chunk([manifest]), record_chunk([b"cubin"], ""), record_chunk([module])]
        program: Any = read_executable(write_outer(write_chunks(*chunks)), SCHEMA)
        assert (program.binary, program.module_name) == (b"cubin", "m")

    def test_the_outer_message_may_be_whole(self) -> None:
        """JAX 0.10 writes no split proto around the executable."""
        inner = write_split(SCHEMA, EXECUTABLE, [executable(module_name="m")], "s")
        options: Any = SCHEMA.message_class(OPTIONS)(serialized_executable=inner)
        program: Any = read_executable(write_header() + options.SerializeToString(), SCHEMA)
        assert program.module_name == "m"

    def test_a_header_may_have_more_fields(self) -> None:
        rest = b"\x2a\x01x" + b"\x59" + b"8bytes.." + b"\x5d" + b"4byt" + b"\x30\x07"
        pieces = [executable(module_name="m")]
        program: Any = read_executable(
            write_program(SCHEMA, pieces, header=write_header(rest=rest)), SCHEMA
        )
        assert program.module_name == "m"


class TestHeader:
    @pytest.mark.parametrize(
        ("header", "problem", "where"),
        [
            (b"", "no number ends after byte 0", "IFRT header, byte 0"),
            (b"\xff" * 12, "no number ends after byte 0", "IFRT header, byte 0"),
            (b"\x05\x08", "the header ends at byte 6 of 2", "IFRT header, byte 1"),
            (varint((1 << 64) - 1), "the header ends at byte 1844674407370955", "IFRT header, "),
            (write_header(version=2), "version 2 of b'pjrt_ifrt', not version 3", "IFRT header"),
            (write_header(kind=b"proxy"), "version 3 of b'proxy', not version", "IFRT header"),
            (b"\x00", "version None of None, not version 3", "IFRT header, byte 1"),
            (write_header(rest=b"\x08\x03"), "field 1 occurs twice", "IFRT header, byte 14"),
            (write_header(rest=b"\x0b"), "wire type 3 is not known", "IFRT header, byte 14"),
            (write_header(rest=b"\x2a\x09x"), "field 5 of 9 bytes has 1 bytes left", "IFRT"),
            (write_header(rest=b"\x29abc"), "field 5 of 8 bytes has 3 bytes left", "IFRT"),
            (write_header(rest=b"\x2d"), "field 5 of 4 bytes has 0 bytes left", "IFRT"),
            (write_header(rest=b"\x2a"), "no number ends after byte 14", "IFRT header, byte 14"),
        ],
    )  # fmt: skip
    def test_a_false_header_is_refused(self, header: bytes, problem: str, where: str) -> None:
        error = catch_refusal(header)
        assert problem in error.what
        assert error.where.startswith(where)

    def test_a_program_for_another_device_is_refused(self) -> None:
        options: Any = SCHEMA.message_class(OPTIONS)(serialized_executable=b"of a CPU")
        for data in (b"", options.SerializeToString()):
            match(
                catch_refusal(write_header() + data),
                "the program that XLA compiled cannot be read: it holds no GPU program",
                "xla.ExecutableAndOptionsProto, field serialized_executable",
                "tracegraph reads the form",
                "pip install",
            )

    def test_noise_behind_the_header_is_refused(self) -> None:
        error = catch_refusal(write_header() + b"\xff\xff\xff")
        assert "it is no xla.ExecutableAndOptionsProto" in error.what
        assert error.where == "byte 14, behind the IFRT header"


class TestSplitProto:
    def test_there_must_be_a_manifest(self) -> None:
        error = catch_refusal(write_outer(SIGNATURE))
        assert "there is no manifest" in error.what
        assert error.where == f"{EXECUTABLE}, record 0"

    def test_the_manifest_must_be_one(self) -> None:
        error = catch_refusal(write_outer(write_chunks(record_chunk([b"\xff"]))))
        assert "it is no xla.SplitProtoManifest" in error.what
        assert error.where == f"{EXECUTABLE}, record 0 (manifest)"

    def test_the_type_name_must_be_right(self) -> None:
        error = catch_refusal(write_inner(make_manifest(SCHEMA, "xla.HloProto", []), []))
        assert "the manifest is of 'xla.HloProto', not 'xla.gpu.GpuExecutableProto'" in error.what

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_the_number_of_records_must_be_right(self, count: int) -> None:
        manifest = make_manifest(SCHEMA, EXECUTABLE, [(ASM_TEXT, b""), (BINARY, b"")])
        error = catch_refusal(write_inner(manifest, [b""] * count))
        assert f"{count} records where 2 are declared" in error.what

    def test_a_record_of_another_type_is_refused(self) -> None:
        pieces = [executable(module_name="m"), (BINARY, b"")]
        error = catch_refusal(
            write_inner(make_manifest(SCHEMA, EXECUTABLE, pieces), [b"\x0b", b""])
        )
        assert "it is no xla.gpu.GpuExecutableProto" in error.what
        assert error.where == f"{EXECUTABLE}, record 1"

    def test_exchanged_records_are_refused(self) -> None:
        pieces = [(BINARY, b"\xff cubin"), executable(module_name="m")]
        manifest = make_manifest(SCHEMA, EXECUTABLE, pieces)
        module = pieces[1].SerializeToString()
        error = catch_refusal(write_inner(manifest, [module, b"\xff cubin"]))
        assert error.where == f"{EXECUTABLE}, record 2"

    def test_a_record_without_a_kind_is_refused(self) -> None:
        manifest = make_manifest(SCHEMA, EXECUTABLE, [])
        manifest.records.add()
        error = catch_refusal(write_inner(manifest, [b""]))
        assert "the manifest gives it the kind None" in error.what
        assert error.where == f"{EXECUTABLE}, record 1"

    def test_a_record_of_an_unknown_kind_is_refused(self) -> None:
        manifest = make_manifest(SCHEMA, EXECUTABLE, [])
        manifest.records.add().MergeFromString(b"\x22\x00")  # field 4 of the oneof to come
        error = catch_refusal(write_inner(manifest, [b""]))
        assert "field 4 is not in the schema" in error.what
        assert error.where == f"{EXECUTABLE}, record 0 (manifest).records[0]"

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"field_path": []}, "it replaces a part inside a field"),
            ({"field_path": [{"field_number": 4}] * 2}, "it replaces a part inside a field"),
            (
                {"field_path": [{"field_number": 4, "repeated_field_index": 0}]},
                "it replaces a part inside a field",
            ),
            (
                {"field_path": [{"field_number": 4, "string_map_key": ""}]},
                "it replaces a part inside a field",
            ),
            ({"field_path": [{"field_number": 999}]}, "it replaces field 999, which xla.gpu."),
            ({"field_path": [{}]}, "it replaces field 0, which xla.gpu."),
            ({"field_path": [{"field_number": -1}]}, "it replaces field -1, which xla.gpu."),
            ({"field_path": [{"field_number": THUNKS}]}, "it replaces 'thunks', which is neither"),
            ({"field_path": [{"field_number": 1}]}, "'hlo_module_with_config', which is neither"),
            ({"field_type": 0}, "it replaces 'binary', which is neither text nor bytes"),
            ({"field_type": 7}, "it replaces 'binary', which is neither text nor bytes"),
            ({"field_path": [{"field_number": ASM_TEXT}]}, "'asm_text' is no UTF-8 text"),
        ],
    )
    def test_a_false_replacement_is_refused(self, changes: dict[str, Any], problem: str) -> None:
        override = {"field_path": [{"field_number": BINARY}], "field_type": 1} | changes
        manifest = make_manifest(SCHEMA, EXECUTABLE, [])
        manifest.records.add(field_override_record=override)
        error = catch_refusal(write_inner(manifest, [b"\xff"]))
        assert problem in error.what
        assert error.where == f"{EXECUTABLE}, record 1"


class TestUnknownFields:
    def test_a_program_with_one_is_refused(self) -> None:
        program = executable(thunks=[thunk("a"), thunk("b")])
        program.thunks[1].thunk_info.MergeFromString(b"\xf8\x3f\x01")  # number 1023
        error = catch_refusal(write_program(SCHEMA, [program]))
        assert "field 1023 is not in the schema" in error.what
        assert error.where == f"{EXECUTABLE}.thunks[1].thunk_info[0]"

    def test_the_outer_message_is_searched_too(self) -> None:
        inner = write_split(SCHEMA, EXECUTABLE, [executable()], "s")
        options: Any = SCHEMA.message_class(OPTIONS)(serialized_executable=inner)
        options.compile_options.MergeFromString(b"\xf8\x3f\x01")
        for data in (
            options.SerializeToString(),
            write_split(SCHEMA, OPTIONS, [options], "s"),
        ):
            assert catch_refusal(write_header() + data).where == f"{OPTIONS}.compile_options[0]"

    def test_pieces_of_one_field_are_searched_too(self) -> None:
        one, other = executable(), executable()
        one.hlo_module_with_config.hlo_module.name = "step"
        other.hlo_module_with_config.hlo_module.id = 3
        module = read_executable(write_program(SCHEMA, [one, other]), SCHEMA)
        assert module.hlo_module_with_config.hlo_module.name == "step"  # type: ignore[attr-defined]
        other.hlo_module_with_config.hlo_module.MergeFromString(b"\xf8\x3f\x01")
        error = catch_refusal(write_program(SCHEMA, [one, other]))
        assert "field 1023 is not in the schema" in error.what

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_recorded_programs_have_none(self, name: str) -> None:
        program: Any = read_executable(read_recording(name), SCHEMA)
        assert read_message(type(program), program.SerializeToString(), "here") == program
        module = program.hlo_module_with_config.hlo_module
        assert len([*Computations(module).values()]) == len(module.computations) > 0

    def test_one_in_a_map_is_found(self) -> None:
        metadata: Any = SCHEMA.message_class("stream_executor.gpu.TmaMetadataProto")()
        metadata.arg_index_to_tma_info[3].SetInParent()
        read_message(type(metadata), metadata.SerializeToString(), "here")
        metadata.arg_index_to_tma_info[3].MergeFromString(b"\xf8\x3f\x01")
        with pytest.raises(UnsupportedError, match="field 1023 is not in the schema") as caught:
            read_message(type(metadata), metadata.SerializeToString(), "here")
        assert caught.value.where == "here.arg_index_to_tma_info[0]"


class TestDamage:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_every_shortened_program_is_refused(self, name: str) -> None:
        serialized = read_recording(name)
        for size in range(len(serialized)):
            assert read_or_catch(serialized[:size]) is None, size

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_a_lengthened_program_is_refused(self, name: str) -> None:
        serialized = read_recording(name)
        for more in (b"\0", b"\0" * 40, b"\xff" * 99, serialized):
            assert read_or_catch(serialized + more) is None

    @pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
    def test_a_program_with_any_byte_changed_is_read_or_catchd(self, flip: int) -> None:
        serialized = read_recording("mm_f64")
        refused = 0
        for index in range(len(serialized)):
            damaged = bytearray(serialized)
            damaged[index] ^= flip
            refused += read_or_catch(bytes(damaged)) is None
        assert refused > 100

    @given(st.data())
    @settings(max_examples=200)
    def test_a_damaged_inner_file_is_read_or_catchd(self, data: st.DataObject) -> None:
        """Without compression outside, so that the faults arrive in the layers behind it."""
        pieces = [
            (ASM_TEXT, b"text"),
            executable(module_name="m", thunks=[thunk("a")]),
            (BINARY, b"cubin"),
        ]
        order = data.draw(st.permutations(pieces))
        serialized = bytearray(write_program(SCHEMA, order, data.draw(st.sampled_from(["", "s"]))))
        for _ in range(data.draw(st.integers(1, 5))):
            index = data.draw(st.integers(0, len(serialized) - 1))
            serialized[index : index + data.draw(st.integers(0, 9))] = data.draw(
                st.binary(max_size=9)
            )
            serialized += b"\0" if not serialized else b""
        program = read_or_catch(bytes(serialized))
        assert program is None or program.DESCRIPTOR.full_name == EXECUTABLE

    @given(st.lists(st.binary(max_size=60), max_size=6))
    @settings(max_examples=200)
    def test_noise_as_records_is_read_or_catchd(self, records: list[bytes]) -> None:
        manifest = make_manifest(SCHEMA, EXECUTABLE, [(MODULE_NAME, b"")] * len(records))
        for entry, _ in zip(manifest.records, records[::2], strict=False):
            entry.proto_merge_record.SetInParent()
        program = read_or_catch(write_inner(manifest, records))
        assert program is None or program.DESCRIPTOR.full_name == EXECUTABLE

    @given(st.binary(max_size=300))
    @settings(max_examples=300)
    def test_noise_is_refused(self, noise: bytes) -> None:
        assert read_or_catch(noise) is None
        assert read_or_catch(write_header() + SIGNATURE + noise) is None
        assert read_or_catch(write_outer(noise)) is None

    def test_deep_nesting_is_refused(self) -> None:
        """A message in a message a thousand times would overflow a stack."""
        sequence = b""
        for _ in range(1000):
            sequence = b"\x0a" + varint(len(sequence)) + sequence
        manifest = make_manifest(SCHEMA, EXECUTABLE, [executable()])
        number = varint(THUNKS << 3 | 2)
        nested = SCHEMA.fields_of("xla.gpu.ThunkProto")["sequential_thunk"].number
        inner = b""
        for _ in range(300):
            body = b"\x0a" + varint(len(inner)) + inner
            inner = varint(nested << 3 | 2) + varint(len(body)) + body
        for record in (sequence, number + varint(len(inner)) + inner):
            assert read_or_catch(write_inner(manifest, [record])) is None
