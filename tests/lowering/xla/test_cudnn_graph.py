"""Compiled graphs of cuDNN: what XLA keeps becomes the call, its zeros and its workspace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.ubjson_writer import write_ubjson
from tests.fakes.xla_programs import make_program, name_thunk, shaped
from tests.paths import DATA
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph
from tracegraph.runtime.definition.library_nodes import CudnnNode
from tracegraph.runtime.definition.nodes import BufferUse, FillNode
from tracegraph.runtime.errors import UnsupportedError

FLOAT = {"data_type": "FLOAT"}
GRAPH: dict[str, Any] = {
    "json_version": "1.0",
    "cudnn_backend_data": "the plan",
    "variant_pack_uids": [3, 1, 10, 2, 7, 8],
    "pass_by_values": {"10": {"index": 3, "value": "3E000000"}},
    "tensors": {"10": FLOAT, "1": {"data_type": "BFLOAT16"}},
    "workspace_modifications": {"7": [2, 64, []], "8": [1, 0, [48.0]]},
    "variant_pack_replacements": [],
    "fe_workspace_size": 128,
    "tensors_to_dump": [],
    "nodes": [{"tag": "SDPA"}],
    "graph_uid": 3,
}
X, W, Y = BufferUse("#1", 0, 32), BufferUse("#2", 0, 32), BufferUse("#0", 0, 32)
WORKSPACE = BufferUse("#3", 0, 512)
PLACES = ((1, 0, 32), (2, 0, 32), (0, 0, 32), (3, 0, 512))
OUTPUTS = (False, False, True, True)


def make_thunk(places: Any = PLACES, outputs: tuple[bool, ...] = OUTPUTS, text: str = "") -> str:
    flags = " ".join(f"output_args: {str(flag).lower()}" for flag in outputs)
    arguments = " ".join(shaped("args", place) for place in places)
    body = f'fingerprint: "key" {arguments} {flags} {text}'
    return f"{name_thunk('attention')} cudnn_thunk {{ {body} }}"


def decode(graph: Any = GRAPH, thunk: str = "", check: Any = None) -> list[DeviceStep]:
    program = make_program(thunk or make_thunk())
    if graph is not None:
        data = graph if isinstance(graph, bytes) else write_ubjson(graph)
        program.dnn_compiled_graphs["key"] = data
    decoded = decode_executable(program, name="step", check_call=check)
    return list(list_device_steps(decoded.steps))


def test_call_has_tensors_by_their_place_and_a_workspace() -> None:
    *fills, step = decode()
    assert step.node == CudnnNode(
        "attention",
        CompiledGraph(
            plan=b"the plan",
            uids=(1, 2, 3, 7, 8, 10),
            values=((10, b"\0\0\0\x3e"),),
            places=((7, 64), (8, 0)),
            own_bytes=128,
            workspace_bytes=512,
        ),
        ((1, X), (2, W), (3, Y)),
        written=(3,),
        workspace=WORKSPACE,
    )
    zeroed = BufferUse("#3", 0, 48)
    assert [fill.node for fill in fills] == [FillNode("attention", zeroed, 0, 4)]
    assert step.reads == (X, W, zeroed)
    assert step.writes == (Y, WORKSPACE)


def test_outputs_are_zero_before_the_call_where_xla_says_so() -> None:
    *fills, step = decode(thunk=make_thunk(text="should_memzero: true"))
    targets = [fill.writes[0] for fill in fills]
    assert targets == [BufferUse("#3", 0, 48), Y, WORKSPACE]
    # So that no plan takes the zeros for a value that nothing reads.
    assert step.reads == (X, W, *targets)


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        ([{"tag": "SDPA", "padding_mask": False}], 1),
        ([{"tag": "SDPA_BWD", "padding_mask": False}], 1),
        ([{"tag": "SDPA", "padding_mask": True}], 3),
        ([{"tag": "SDPA", "padding_mask": False}, {"tag": "POINTWISE"}], 3),
        ([], 3),
    ],
)
def test_results_that_are_written_whole_are_not_zeroed(nodes: Any, count: int) -> None:
    # The front end's own tensor is zeroed either way.
    *fills, _ = decode(GRAPH | {"nodes": nodes}, make_thunk(text="should_memzero: true"))
    assert len(fills) == count


def test_a_graph_without_workspace_has_no_last_argument() -> None:
    graph = GRAPH | {
        "variant_pack_uids": [1, 2, 3],
        "pass_by_values": {},
        "workspace_modifications": {},
        "fe_workspace_size": 0,
    }
    (step,) = decode(graph, make_thunk(PLACES[:3], OUTPUTS[:3]))
    assert isinstance(step.node, CudnnNode)
    assert step.node.workspace is None
    assert step.writes == (Y,)


def test_what_the_front_end_may_log_changes_nothing() -> None:
    # As it is written for attention with lengths of sequences: number of a tensor, and "d".
    logged = decode(GRAPH | {"tensors_to_dump": [[1, ord("d")], [2, ord("d")]]})
    unsaid = decode({key: GRAPH[key] for key in GRAPH if key != "tensors_to_dump"})
    assert logged == unsaid == decode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"json_version": "2.0"}, "is not of version 1.0"),
        ({"novelty": 1}, "says `novelty`, which is not known"),
        ({"variant_pack_replacements": [[1, [2, 3]]]}, "with `variant_pack_replacements`"),
        ({"variant_pack_uids": [1, 2, 4, 7, 8, 10]}, "arguments are [1, 2, 4], not 1, 2, 3..."),
        ({"variant_pack_uids": [1, 7, 8, 10]}, "has 4 arguments for a graph of 1 tensors"),
        ({"fe_workspace_size": 1024}, "1024 bytes of a workspace of 512"),
        ({"workspace_modifications": {"7": [2, 128, []], "8": [2, 0, []]}}, "in 128 bytes of"),
        ({"workspace_modifications": {"7": [0, 0, [1.0]], "8": [2, 0, []]}}, "table from the host"),
        ({"workspace_modifications": {"7": [1, 0, [999.0]], "8": [2, 0, []]}}, "zeroes 999 bytes"),
        ({"tensors": {"10": {"data_type": "HALF"}}}, "the value '3E000000' of HALF"),
        ({"pass_by_values": {"10": {"index": 3, "value": "3E00"}}}, "the value '3E00' of FLOAT"),
    ],
)
def test_what_is_not_known_is_refused_with_the_thunk(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match="work that cannot be lowered: cudnn") as raised:
        decode(GRAPH | changes)
    assert reason in raised.value.why


@pytest.mark.parametrize(
    ("graph", "thunk", "reason"),
    [
        (None, "", "has no compiled graph: the program was compiled without cuDNN"),
        (b"[", "", "has a compiled graph that cannot be read"),
        ({key: GRAPH[key] for key in GRAPH if key != "tensors"}, "", "does not say `tensors`"),
        (GRAPH, make_thunk(outputs=OUTPUTS[:3]), "says of 3 of 4 arguments"),
        (GRAPH, make_thunk(text="sdpa_dropout_seed: 7"), "draws a dropout mask"),
    ],
)
def test_a_thunk_that_says_too_little_is_refused(graph: Any, thunk: str, reason: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        decode(graph, thunk)
    assert reason in raised.value.why


def test_the_device_is_asked_for_each_call() -> None:
    asked = []

    def check(call: Any) -> str:
        asked.append(call)
        return "is refused by the device"

    with pytest.raises(UnsupportedError, match="cudnn is refused by the device"):
        decode(check=check)
    assert [type(call) for call in asked] == [CompiledGraph]


@pytest.mark.parametrize(
    ("name", "places", "own_bytes"),
    [("attention_forward", (), 0), ("attention_backward", ((14, 262144), (26, 0)), 266240)],
)
def test_graphs_that_xla_has_written_are_read(
    name: str, places: tuple[tuple[int, int], ...], own_bytes: int
) -> None:
    serialized = (DATA / "cudnn" / f"{name}.bin").read_bytes()
    count = 9 if places else 4
    thunk = make_thunk([(3, 0, 8)] * count + [(4, 0, 266496)], (False,) * count + (True,))
    text = "buffer_allocations { values { index: 5 size: 266496 } }"
    program = make_program(
        thunk.replace("buffer_allocation_index: 4", "buffer_allocation_index: 5"), text=text
    )
    program.dnn_compiled_graphs["key"] = serialized
    (step,) = list_device_steps(decode_executable(program, name="step").steps)
    assert isinstance(step.node, CudnnNode)
    call = step.node.call
    assert isinstance(call, CompiledGraph)
    assert (call.places, call.own_bytes) == (places, own_bytes)
    # One eighth: the scale of heads of 64 features.
    assert b"\0\0\0\x3e" in dict(call.values).values()
    assert call.plan.startswith(b'{"cudnnVersion":')
