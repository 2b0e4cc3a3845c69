"""The structures equal those of the header that comes with the installed jaxlib."""

from __future__ import annotations

import ctypes
import enum
import pathlib
import re
from typing import Any

import jax.ffi
import pytest

from tracegraph.runtime.ffi import c_api

HEADER = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
CODE = re.sub(r"//[^\n]*|/\*.*?\*/", "", HEADER, flags=re.S)
MINOR = int(re.findall(r"#define XLA_FFI_API_MINOR (\d+)", HEADER)[0])
# Older name: newer name.
RENAMED = {
    "ErrorGetMessageArgs": "ErrorGetDetailsArgs",
    "ExecutionContextGetArgs": "InvokeContextGetArgs",
    "ExtensionBase": "InternalExtension",
}
# Not used by a call.
LEFT_OUT = {"Extension", "ExtensionId", "HandlerBundle", "HandlerRegisterArgs"}
# Added by a minor version.
ADDED = {(4, "ErrorGetDetailsArgs", "errc"), (4, "Api", "InvokeContext_FindExtension")}
ADDED |= {(5, "Api", "CustomOptions_Get")}
SIMPLE: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "XLA_FFI_Handler_Traits": ctypes.c_uint32,
}


def name_class(name: str) -> str:
    """Returns our name of a structure: XLA_FFI_Error_Create_Args is ErrorCreateArgs."""
    joined = name.removeprefix("XLA_FFI_").replace("_", "")
    return RENAMED.get(joined, joined)


def read_structures() -> dict[str, list[tuple[str, str]]]:
    """Returns for each structure of the header its fields, each with its C type."""
    found = {}
    for name, body in re.findall(r"struct (XLA_FFI_\w+) \{(.*?)\n\}", CODE, re.S):
        if name == "XLA_FFI_Api":
            body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", r"void* \1", body)
        fields = []
        for line in body.split(";"):
            line = line.strip()
            pointer = re.fullmatch(r"void \(\*(\w+)\)\(.*\)", line)
            if pointer:
                fields.append((pointer[1], "*"))
            elif line:
                (kind, field) = re.findall(r"^(.*[\s*])(\w+)$", line, re.S)[0]
                fields.append((field, kind.strip()))
        found[name_class(name)] = fields
    return found


STRUCTURES = read_structures()


def read_enum(name: str) -> dict[str, int]:
    prefix = f"XLA_FFI_{name}_"
    body = re.findall(rf"typedef enum \{{([^}}]*)\}} XLA_FFI_{name};", CODE)[0]
    return {key: int(value) for key, value in re.findall(rf"{prefix}(\w+) = (\d+)", body)}


def size_type(kind: str) -> int:
    if kind.endswith("*"):
        return ctypes.sizeof(ctypes.c_void_p)
    kind = kind.removeprefix("struct ")
    if kind in SIMPLE:
        return ctypes.sizeof(SIMPLE[kind])
    ours = getattr(c_api, name_class(kind), ctypes.c_int)
    return ctypes.sizeof(ctypes.c_int if issubclass(ours, enum.Enum) else ours)


def test_header_is_one_that_is_known() -> None:
    assert 3 <= MINOR <= c_api.NEWEST
    assert int(re.findall(r"#define XLA_FFI_API_MAJOR (\d+)", HEADER)[0]) == c_api.MAJOR


def test_every_structure_is_here_or_left_out() -> None:
    assert len(STRUCTURES) >= 30
    assert {name for name in STRUCTURES if not hasattr(c_api, name)} <= LEFT_OUT


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - LEFT_OUT))
def test_structure_equals_the_header(name: str) -> None:
    ours = getattr(c_api, name)
    renamed = {"Error_GetMessage": "Error_GetDetails", "ExecutionContext_Get": "InvokeContext_Get"}
    theirs = [(renamed.get(field, field), size_type(kind)) for field, kind in STRUCTURES[name]]
    expected = [field for field, *_ in ours._fields_]
    newer = {field for minor, owner, field in ADDED if owner == name and minor > MINOR}
    assert [field for field, _ in theirs] == [each for each in expected if each not in newer]
    assert {field: getattr(ours, field).size for field, _ in theirs} == dict(theirs)
    # What a newer version adds is at the end.
    assert newer == set(expected[len(theirs) :])


def test_counted_sizes_equal_the_header() -> None:
    last = dict(re.findall(r"XLA_FFI_DEFINE_STRUCT_TRAITS\((\w+),\s*(\w+)\)", CODE))
    assert len(last) >= 25
    for name, field in last.items():
        ours = getattr(c_api, name_class(name), None)
        if ours is None or any(m > MINOR and each == name_class(name) for m, each, _ in ADDED):
            continue
        described = getattr(ours, field.removeprefix("XLA_FFI_"))
        assert ours.full_size() == described.offset + described.size, name


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("Error_Code", c_api.ErrorCode),
        ("DataType", c_api.DataType),
        ("AttrType", c_api.AttrType),
        ("ExecutionStage", c_api.ExecutionStage),
    ],
)
def test_enum_equals_the_header(name: str, ours: Any) -> None:
    theirs = read_enum(name)
    expected = {each.name: int(each) for each in ours}
    if MINOR < 4 and name == "ExecutionStage":
        del expected["RECORD"]
    assert theirs == expected


def test_constants_equal_the_header() -> None:
    assert "XLA_FFI_Extension_Metadata = 1" in CODE
    assert "TRAITS_COMMAND_BUFFER_COMPATIBLE = 1u << 0" in CODE
    assert "XLA_FFI_ArgType_BUFFER = 1" in CODE
    assert "XLA_FFI_RetType_BUFFER = 1" in CODE


def test_another_order_of_fields_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_api, "Args", c_api.Attrs)
    with pytest.raises(AssertionError):
        test_structure_equals_the_header("Args")
