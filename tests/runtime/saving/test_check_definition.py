"""Definitions of any origin: what is wrong with them is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.runtime.saving.test_record_codec import KERNEL, MAP, SETTER, USE
from tracegraph.runtime.definition.graph import ArenaSize, BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Turn
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CallNode,
    ConditionHandle,
    CopyNode,
    FillNode,
    KernelCode,
    LaunchShape,
)
from tracegraph.runtime.saving import check_definition
from tracegraph.runtime.saving.check_definition import MAX_DEPTH, find_definition_problem

F32 = np.dtype(np.float32)
SLOTS = (BufferSlot("a", 0, (16,), F32, is_resident=True), BufferSlot("b", 256, (32,), F32))
OTHER = BufferUse("b", 64, 64)
WAITS = dataclasses.replace(KERNEL, begins_with_wait=True)
LOADS = dataclasses.replace(WAITS, code=dataclasses.replace(KERNEL.code, early=(0,)))
COPY = CopyNode("copy", USE, OTHER)


def define(*nodes: Any, edges: Any = (), early: Any = (), **changes: Any) -> GraphDefinition:
    stage = Stage(tuple(nodes), tuple(edges), programmatic=frozenset(early))
    sound = GraphDefinition("f", ArenaSize(256, 128), SLOTS, (stage,), ("a",), ("b",))
    return dataclasses.replace(sound, **changes)


def loop(*nodes: Any, **changes: Any) -> ConditionalNode:
    sound = ConditionalNode("loop", Construct.WHILE, (Body(nodes, ()),), SETTER, Turn(2))
    return dataclasses.replace(sound, **changes)


def change(node: Any, **changes: Any) -> Any:
    return dataclasses.replace(node, **changes)


def nest(depth: int) -> ConditionalNode:
    node = loop(COPY)
    for _ in range(depth):
        node = loop(node)
    return node


def widen(levels: int) -> ConditionalNode:
    """Many nodes of few records."""
    node = loop(COPY)
    for _ in range(levels):
        node = loop(*(node for _ in range(64)))
    return node


def test_a_sound_definition_has_no_problem():
    nodes = (KERNEL, WAITS, COPY, FillNode("zero", USE, 7, 4), loop(KERNEL, SETTER))
    assert find_definition_problem(define(*nodes, edges=[(0, 1), (1, 4)], early=[(0, 1)])) == ""
    nodes = (KERNEL, LOADS, change(COPY, source=OTHER, target=BufferUse("b", 0, 64)))
    assert find_definition_problem(define(*nodes, edges=[(0, 1)], early=[(0, 1)])) == ""
    filled = define(FillNode("zero", USE), KERNEL, LOADS, edges=[(0, 1), (1, 2)], early=[(1, 2)])
    assert find_definition_problem(filled) == ""
    own = change(LOADS, written=(True, *LOADS.written[1:]))
    assert find_definition_problem(define(KERNEL, own, edges=[(0, 1)], early=[(0, 1)])) == ""
    call = CallNode("call", len, ("a",), ("b",), 1)
    assert find_definition_problem(define(call)) == ""
    assert (
        find_definition_problem(define(nest(3), change(KERNEL, parameters=(USE, MAP, b"1")))) == ""
    )


def slot(**changes: Any) -> Any:
    return {"slots": (SLOTS[0], change(SLOTS[1], **changes))}


LENT = BufferSlot("w", 384, (16,), F32, is_lent=True)
READS = change(KERNEL, parameters=(BufferUse("w", 0, 64), USE), written=(False, True))


def lend(*nodes: Any, **changes: Any) -> GraphDefinition:
    slots = (*SLOTS, change(LENT, **changes))
    return define(*nodes, slots=slots, inputs=("a", "w"))


def keep_on_host(*nodes: Any, inputs: Any = ("a",), **changes: Any) -> GraphDefinition:
    there = change(LENT, **{"is_lent": False, "is_host": True, **changes})
    return define(*nodes, slots=(*SLOTS, there), inputs=inputs)


def test_a_temporary_in_host_memory():
    assert find_definition_problem(keep_on_host(READS, COPY)) == ""


def test_an_input_that_is_lent():
    assert find_definition_problem(lend(READS, COPY)) == ""


PROBLEMS: dict[str, tuple[GraphDefinition, str]] = {
    "lent inside": (lend(READS, offset=128), "the buffer w is outside"),
    "lent far out": (lend(READS, offset=1 << 60), "the buffer w is outside"),
    "lent state": (lend(READS, is_resident=True, offset=0), "w is lent, and keeps a value"),
    "lent result": (change(lend(READS), outputs=("w",)), "w is lent, and keeps a value"),
    "lent temporary": (change(lend(READS), inputs=("a",)), "w is lent, and no input"),
    "lent to a memcpy": (
        lend(change(COPY, source=BufferUse("w", 0, 64))),
        "copy uses w, which is lent",
    ),
    "lent and written": (
        lend(change(READS, written=(True, True))),
        f"{KERNEL.name} uses w, which is lent",
    ),
    "host memory inside": (keep_on_host(READS, offset=128), "the buffer w is outside"),
    "input in host memory": (
        keep_on_host(READS, inputs=("a", "w")),
        "w is in host memory, and no temporary",
    ),
    "state in host memory": (keep_on_host(READS, is_resident=True, offset=0), "w is in host"),
    "lent in host memory": (keep_on_host(READS, is_lent=True, inputs=("a", "w")), "w is in host"),
    "negative arena": (define(arena_size=ArenaSize(-1, 512)), "the arena has -1"),
    "huge arena": (define(arena_size=ArenaSize(1 << 60)), "the arena has"),
    "same names": (define(**slot(name="a")), "two buffers have one name"),
    "negative shape": (define(**slot(shape=(-1, -4))), "the buffer b has shape (-1, -4)"),
    "objects": (define(**slot(dtype=np.dtype(object))), "the buffer b has shape"),
    "outside": (define(**slot(shape=(33,))), "the buffer b is outside"),
    "before": (define(**slot(offset=-4)), "the buffer b is outside"),
    "kept outside": (define(**slot(is_resident=True)), "the buffer b is outside"),
    "content": (define(**slot(content=b"12")), "the constant b has 2 of 128 bytes"),
    "input": (define(inputs=("c",)), "the static input c has no place"),
    "output": (define(outputs=("c",)), "the result c has no place"),
    "edge back": (define(COPY, COPY, edges=[(1, 0)]), "an edge goes from node 1 to node 0 of 2"),
    "edge out": (define(COPY, COPY, edges=[(0, 2)]), "an edge goes from node 0 to node 2 of 2"),
    "no edge": (define(KERNEL, WAITS, early=[(0, 1)]), "the early start (0, 1) is not an edge"),
    "early copy": (define(COPY, WAITS, edges=[(0, 1)], early=[(0, 1)]), "is not between kernels"),
    "early": (define(KERNEL, KERNEL, edges=[(0, 1)], early=[(0, 1)]), "and does not wait"),
    "early load": (
        define(FillNode("zero", USE), KERNEL, LOADS, edges=[(1, 2)], early=[(1, 2)]),
        "is started early and loads what a node ahead of it writes",
    ),
    "early load behind an early start": (
        define(
            change(KERNEL, written=(True, *KERNEL.written[1:])),
            WAITS,
            LOADS,
            edges=[(0, 1), (1, 2)],
            early=[(0, 1), (1, 2)],
        ),
        "is started early and loads what a node ahead of it writes",
    ),
    "early load inside": (
        define(
            loop(bodies=(Body((KERNEL, LOADS), ((0, 1),), frozenset({(0, 1)})),)),
            FillNode("zero", USE),
        ),
        "is started early and loads what a node ahead of it writes",
    ),
    "early load of the turn before": (
        define(
            loop(
                bodies=(
                    Body(
                        (KERNEL, change(LOADS, written=(True, *LOADS.written[1:]))),
                        ((0, 1),),
                        frozenset({(0, 1)}),
                    ),
                )
            ),
        ),
        "is started early and loads what a node ahead of it writes",
    ),
    "early parameter": (
        define(change(LOADS, code=KernelCode("k", b"code", (3,)))),
        "loads (3,) of its 3 parameters early",
    ),
    "no buffer": (define(change(COPY, source=BufferUse("c", 0, 64))), "names the buffer c"),
    "past the end": (define(change(COPY, source=BufferUse("a", 8, 64))), "names bytes 8 to 72"),
    "negative": (define(change(COPY, source=BufferUse("a", -8, 64))), "names bytes -8 to 56"),
    "copy": (define(change(COPY, source=BufferUse("a", 0, 8))), "copies 8 bytes to 64"),
    "fill": (define(FillNode("zero", USE, 256)), "sets 64 bytes in elements of 1 to 256"),
    "fill odd": (define(FillNode("zero", BufferUse("a", 0, 6), 0, 4)), "sets 6 bytes"),
    "no code": (define(change(KERNEL, code=KernelCode("k", b""))), "has no code"),
    "marks": (define(change(KERNEL, written=(False,))), "has 3 parameters and 1 marks"),
    "grid": (define(change(KERNEL, shape=LaunchShape((0, 1, 1), (1, 1, 1)))), "has a grid"),
    "threads": (
        define(change(KERNEL, shape=LaunchShape((1, 1, 1), (1024, 2, 1)))),
        "has a block of 2048 threads",
    ),
    "shared": (
        define(change(KERNEL, shape=LaunchShape((1, 1, 1), (32, 1, 1), shared_bytes=1 << 20))),
        "has 1048576 bytes of shared memory",
    ),
    "value": (define(change(KERNEL, written=(False, False, True))), "writes through a value"),
    "tile": (
        define(change(KERNEL, parameters=(USE, change(MAP, dims=(9, 2)), b""))),
        "describes a tiled array of 68 bytes in an argument of 64",
    ),
    "tile rank": (
        define(change(KERNEL, parameters=(USE, change(MAP, strides=()), b""))),
        "describes a tile of dims",
    ),
    "handle": (define(SETTER), "takes the handle of a conditional node that it is not in"),
    "setter": (
        define(loop(COPY, setter=change(SETTER, parameters=(b"12345678",)))),
        "has a kernel that does not set its handle",
    ),
    "bodies": (define(loop(COPY, bodies=())), "has 0 bodies"),
    "turn": (define(loop(COPY, turn=Turn(0))), "has a turn of 0 iterations"),
    "inside": (define(loop(change(COPY, source=BufferUse("c", 0, 64)))), "names the buffer c"),
    "depth": (define(nest(MAX_DEPTH)), "nested 16 deep"),
    "call": (define(CallNode("call", len, ("c",), ())), "names the buffer c"),
    "in place": (define(CallNode("call", len, ("a",), (), 1)), "updates 1 of its arguments"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_is_named(name: str):
    definition, problem = PROBLEMS[name]
    assert problem in find_definition_problem(definition)


def test_what_is_loaded_early_may_be_written_behind():
    sound = define(KERNEL, LOADS, FillNode("zero", USE), edges=[(0, 1), (1, 2)], early=[(0, 1)])
    assert find_definition_problem(sound) == ""


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch):
    assert check_definition.MAX_NODES == 1 << 20
    # To count so far takes seconds.
    monkeypatch.setattr(check_definition, "MAX_NODES", 1 << 13)
    assert "there are more than 8192 nodes" in find_definition_problem(define(widen(10)))


def test_the_handle_of_a_node_is_no_parameter_outside_of_it():
    assert ConditionHandle.OWN in SETTER.parameters
    assert find_definition_problem(define(loop(SETTER))) == ""
