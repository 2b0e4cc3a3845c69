"""Records of plain values, written and read."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracegraph.runtime.definition import graph_nodes, library_nodes
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveNode,
    JointCollectiveNode,
    NumberNode,
)
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph import ArenaSize, BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Turn
from tracegraph.runtime.definition.library_nodes import (
    LibraryCallNode,
    Matmul,
    MatmulNode,
    MatrixLayout,
)
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CallNode,
    ConditionHandle,
    CopyNode,
    KernelCode,
    KernelNode,
    LaunchShape,
    Swizzle,
    TensorMap,
)
from tracegraph.runtime.saving.graph_records import GRAPH_TYPES
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec

CODEC = RecordCodec(GRAPH_TYPES)
USE, OTHER = BufferUse("a", 0, 64), BufferUse("b", 64, 64)
CODE = KernelCode("add", b"\x7fELF of add")
MAP = TensorMap(USE, 4, (8, 2), (32,), (8, 1), (1, 1), swizzle=Swizzle.BYTES_64)
KERNEL = KernelNode(
    "add", CODE, LaunchShape((2, 1, 1), (32, 1, 1)), (USE, MAP, b"\x01\0"), (False, False, False)
)
SETTER = KernelNode(
    "set", CODE, LaunchShape((1, 1, 1), (1, 1, 1)), (ConditionHandle.OWN,), (False,)
)
LAYOUT = MatrixLayout("bfloat16", 8, 8, 8)
MATMUL = Matmul(LAYOUT, LAYOUT, LAYOUT, LAYOUT, 1 + 2j, math.nan, "32F", "float32")
DEFINITION = GraphDefinition(
    "step",
    ArenaSize(256, 64),
    (
        BufferSlot("a", 0, (16,), np.dtype(np.float32), is_resident=True),
        BufferSlot("b", 256, (32,), np.dtype(ml_dtypes.bfloat16), content=b"\0" * 64),
        BufferSlot("c", 512, (32,), np.dtype(ml_dtypes.int4), weak_type=True, is_packed=True),
    ),
    (
        Stage(
            (
                KERNEL,
                CopyNode("copy", USE, OTHER),
                ConditionalNode(
                    "loop", Construct.WHILE, (Body((KERNEL,), ()),), SETTER, Turn(3, True)
                ),
                KERNEL,
            ),
            ((0, 1), (1, 2)),
            programmatic=frozenset({(0, 1)}),
        ),
    ),
    ("a",),
    ("b",),
)


def pass_through(value: Any, wanted: Any) -> Any:
    encoded = CODEC.encode(value)
    return CODEC.decode(json.loads(json.dumps(encoded.tree)), encoded.blobs, wanted)


def test_a_definition_comes_back_equal():
    assert pass_through(DEFINITION, GraphDefinition) == DEFINITION
    found = pass_through(DEFINITION, GraphDefinition)
    assert [slot.dtype for slot in found.slots] == [slot.dtype for slot in DEFINITION.slots]


def test_what_a_kernel_loads_early_comes_back():
    code = KernelCode("rows", b"\x7fELF of rows", (1, 2))
    node = KernelNode("call", code, KERNEL.shape, KERNEL.parameters, KERNEL.written, True)
    assert pass_through(node, KernelNode) == node


def test_nan_comes_back():
    found = pass_through(MatmulNode("m", MATMUL, (("a", USE),)), MatmulNode)
    assert math.isnan(found.matmul.beta)
    assert found.matmul.alpha == 1 + 2j


def test_equal_records_and_blobs_are_stored_once():
    again = dataclasses.replace(KERNEL, code=KernelCode("add", b"\x7fELF of " + b"add"))
    encoded = CODEC.encode((KERNEL, KERNEL, again))
    assert encoded.blobs == (CODE.cubin, b"\x01\0")
    kernels = [row for row in encoded.tree["rows"] if "add" in row]
    assert len(kernels) == 2  # the kernel and its code


def test_one_and_true_are_not_equal():
    values = (BufferUse("a", 1, 0), BufferUse("a", True, 0), BufferUse("a", 1, -0))
    tree = CODEC.encode(values).tree
    assert [row[2] for row in tree["rows"]] == [1, True]


@pytest.mark.parametrize("union", [graph_nodes.Node, library_nodes.LibraryCall])
def test_every_kind_of_node_is_in_the_list_or_refused(union: Any):
    refused = {CallNode, EventNode, CollectiveNode, JointCollectiveNode, NumberNode}
    assert set(typing.get_args(union)) - refused <= {*GRAPH_TYPES}
    assert refused.isdisjoint(GRAPH_TYPES)


def test_what_no_file_holds_is_named():
    node = CallNode("region", print, (), ())
    with pytest.raises(TypeError, match="the value is of type CallNode, which no file holds"):
        CODEC.encode(node)
    with pytest.raises(TypeError, match="written of KernelNode is of type list"):
        CODEC.encode(dataclasses.replace(KERNEL, written=[True]))


def edit(value: Any, change: Any) -> Any:
    encoded = CODEC.encode(value)
    tree = json.loads(json.dumps(encoded.tree))
    change(tree)
    with pytest.raises(ContentProblem) as caught:
        CODEC.decode(tree, encoded.blobs, type(value))
    return str(caught.value)


def set_value(index: int, value: Any, row: int = 0) -> Any:
    def change(tree: Any) -> None:
        tree["rows"][row][index] = value

    return change


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x", "field offset: a value of type str does not belong there"),
        (True, "field offset: a value of type bool does not belong there"),
        (["f", "0x1p+0"], "field offset: a value of type float does not belong there"),
        (["f", "one"], "'one' is not a number"),
        (["r", 0], "there is no record [0] before it"),
        (["r", -1], "there is no record [-1] before it"),
        (["b", 0], "there is no blob [0] before it"),
        (["e", 0, "X"], "stands for no value"),
        (["z"], "stands for no value"),
        ([], "stands for no value"),
        ({}, "stands for no value"),
        (1.5, "stands for no value"),
        (["y", "float1"], "there is no dtype 'float1'"),
        (["y", "finfo"], "there is no dtype 'finfo'"),
        (["d", [1]], "a pair of a dict has not two values"),
        (["d", [1, 2], [1, 3]], "a key is twice in a dict"),
        (["d", [["d"], 2]], "a key of a dict is not plain"),
        (["s", 1, 1], "an item is twice in a set"),
        (["s", ["d"]], "an item of a set is not plain"),
    ],
)
def test_values_that_do_not_belong(value: Any, problem: str):
    text = edit(USE, set_value(2, value))
    assert text.startswith("row 0 (BufferUse)")
    assert problem in text


def test_values_that_are_nested_without_end():
    value: Any = 1
    for _ in range(40):
        value = ["t", value]
    assert "nested more than 16 deep" in edit(USE, set_value(2, value))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tree: tree.pop("rows"), "it has not types, rows and a value"),
        (lambda tree: tree.update(rows=3), "its types or rows are not lists"),
        (lambda tree: tree["types"].append([]), "type 1: it has no name"),
        (lambda tree: tree["types"].append(["os"]), "type 1: 'os' is not known to this version"),
        (lambda tree: tree["types"][0].append("more"), "BufferUse has other fields than here"),
        (lambda tree: tree["rows"].append([]), "row 1: it is empty"),
        (lambda tree: tree["rows"].append([7]), "row 1: there is no type 7"),
        (lambda tree: tree["rows"].append([0, "a"]), "row 1 (BufferUse): it has 1 values"),
        (lambda tree: tree.update(value=3), "the value: it is of type int"),
    ],
)
def test_trees_that_do_not_hold_together(change: Any, problem: str):
    assert problem in edit(USE, change)


def test_two_types_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two types are called BufferUse"):
        RecordCodec([BufferUse, BufferUse])
    with pytest.raises(ValueError, match="int is not a dataclass"):
        RecordCodec([int])


def test_library_calls_are_records():
    assert LibraryCallNode in GRAPH_TYPES


def test_externals_are_written_as_numbers():
    call = CallNode("call", len, ("a",), ("b",))
    codec = RecordCodec([CallNode])
    encoded = codec.encode(call, externals=[print, len], blobs=[b"mine"])
    assert encoded.tree["rows"] == [[0, "call", ["x", 1], ["t", "a"], ["t", "b"], 0]]
    assert encoded.blobs == (b"mine",)
    found = codec.decode(encoded.tree, (), CallNode, externals=[print, repr])
    assert found == dataclasses.replace(call, executable=repr)
    with pytest.raises(ContentProblem, match="there is no external"):
        codec.decode(encoded.tree, (), CallNode, externals=[print])
    with pytest.raises(ContentProblem, match="does not belong there"):
        codec.decode(encoded.tree, (), CallNode, externals=[print, 3])
