"""Compiled graphs of cuDNN: from what XLA has kept of one to the arguments of one execution.

XLA builds such a graph with cuDNN's front end, a C++ library, and keeps what that writes: the plan
that cuDNN has made of it, and how its tensors get their addresses. An argument's tensor has the
number of its place, from 1. If there is a workspace, it is the last argument, and has no number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.ubjson import read_ubjson
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph
from tracegraph.runtime.definition.library_nodes import CudnnNode
from tracegraph.runtime.definition.nodes import BufferUse

VERSION = "1.0"
READ = frozenset(
    ("json_version", "cudnn_backend_data", "variant_pack_uids", "pass_by_values", "tensors")
    + ("workspace_modifications", "variant_pack_replacements", "fe_workspace_size")
)
# What is passed over, with the reason.
IGNORED = {
    "behavior_notes": "the plan says what it is by what it does",
    "context": "the plan was made for it",
    "nodes": "the plan was made of them; they only say which results are written whole",
    "graph_uid": "a number of the writer's own",
    "gid": "a number of the writer's own",
    "cudnn_backend_version": "cuDNN itself refuses the plan of a version that it does not read",
    "cudnn_frontend_version": "`json_version` says how to read it",
    "tensors_to_dump": "lengths of sequences that the front end writes to its log, if told to",
    "aligned_operands": "arguments have the alignment that XLA gives them",
}
# How a tensor in the workspace gets its first content.
_ZEROED, _UNSET = 1, 2
_INTEGERS = {"INT32": "<i", "INT64": "<q"}
_FLOAT_DIGITS = 8
_ATTENTION = ("SDPA", "SDPA_BWD")


def decode_cudnn_graph(
    message: Any, name: str, use: Callable[[Any], BufferUse], serialized: bytes
) -> tuple[CudnnNode, tuple[BufferUse, ...]]:
    """Returns the call that a thunk describes, and the byte ranges that must be zero before it.

    Args:
        message: an ``xla.gpu.CudnnThunkProto`` with listed fields only.
        name: of the instruction that it computes.
        use: maps a shaped slice of the thunk to the byte range that it names.
        serialized: the compiled graph; empty where the program holds none.

    Raises:
        Refusal: the graph is not there, or has what is not known.
    """
    if message.HasField("sdpa_dropout_seed"):
        raise Refusal("draws a dropout mask from a state of XLA's own, another at each run")
    if not serialized:
        raise Refusal("has no compiled graph: the program was compiled without cuDNN")
    if len(message.args) != len(message.output_args):
        raise Refusal(
            f"says of {len(message.output_args)} of {len(message.args)} arguments whether it "
            "writes them"
        )
    graph = _read_graph(serialized)
    uses = [use(argument) for argument in message.args]
    named = len(_list_arguments(graph))
    if not named <= len(uses) <= named + 1:
        raise Refusal(f"has {len(uses)} arguments for a graph of {named} tensors")
    workspace = uses[named] if len(uses) > named and uses[named].nbytes else None
    call = _make_call(graph, 0 if workspace is None else workspace.nbytes)
    operands = tuple(enumerate(uses[:named], start=1))
    written = tuple(i for i, is_output in enumerate(message.output_args, start=1) if is_output)
    node = CudnnNode(name, call, operands, tuple(i for i in written if i <= named), workspace)
    zeroed = list(_list_zeroed(graph, workspace))
    if getattr(message, "should_memzero", False) and not _writes_all(graph):
        zeroed += [uses[i - 1] for i in written if uses[i - 1].nbytes]
    return node, tuple(dict.fromkeys(zeroed))


def _read_graph(serialized: bytes) -> dict[str, Any]:
    graph = read_ubjson(serialized)
    if not isinstance(graph, dict) or graph.get("json_version") != VERSION:
        raise Refusal(f"has a compiled graph that is not of version {VERSION}")
    if unknown := sorted(graph.keys() - READ - IGNORED.keys()):
        raise Refusal(f"has a compiled graph that says `{unknown[0]}`, which is not known")
    if missing := sorted(READ - graph.keys()):
        raise Refusal(f"has a compiled graph that does not say `{missing[0]}`")
    if graph["variant_pack_replacements"]:
        raise Refusal("has a compiled graph with `variant_pack_replacements`, which is not lowered")
    return graph


def _writes_all(graph: dict[str, Any]) -> bool:
    """True where no byte of a result is left out: attention without lengths of sequences.

    XLA sets the results of all attention to zero, for rows behind the end of a sequence. That is a
    memset for each result and one for the workspace; its own command buffers leave them out in
    JAX 0.11.
    """
    nodes = graph.get("nodes") or [{}]
    return all(
        node.get("tag") in _ATTENTION and node.get("padding_mask") is False for node in nodes
    )


def _list_arguments(graph: dict[str, Any]) -> list[int]:
    """Returns the numbers of the tensors that are arguments, which must be 1, 2, 3..."""
    inner = {
        int(uid) for key in ("pass_by_values", "workspace_modifications") for uid in graph[key]
    }
    found = sorted(set(graph["variant_pack_uids"]) - inner)
    if found != list(range(1, len(found) + 1)):
        raise Refusal(f"has a compiled graph whose arguments are {found}, not 1, 2, 3...")
    return found


def _make_call(graph: dict[str, Any], workspace_bytes: int) -> CompiledGraph:
    own_bytes = graph["fe_workspace_size"]
    places = {int(uid): entry[1] for uid, entry in graph["workspace_modifications"].items()}
    if not 0 <= own_bytes <= workspace_bytes or any(
        not 0 <= offset < own_bytes for offset in places.values()
    ):
        raise Refusal(
            f"has a compiled graph with tensors in {own_bytes} bytes of a workspace of "
            f"{workspace_bytes}"
        )
    values = {int(uid): _read_value(graph, uid) for uid in graph["pass_by_values"]}
    return CompiledGraph(
        plan=graph["cudnn_backend_data"].encode(),
        uids=tuple(sorted(graph["variant_pack_uids"])),
        values=tuple(sorted(values.items())),
        places=tuple(sorted(places.items())),
        own_bytes=own_bytes,
        workspace_bytes=workspace_bytes,
    )


def _read_value(graph: dict[str, Any], uid: str) -> bytes:
    """Returns the bytes of a tensor that is one value."""
    dtype = graph["tensors"].get(uid, {}).get("data_type")
    value = graph["pass_by_values"][uid]["value"]
    try:
        if isinstance(value, str) and len(value) == _FLOAT_DIGITS and dtype in (None, "FLOAT"):
            # The bits of a float32, the highest first.
            return struct.pack("<I", int(value, 16))
        return struct.pack(_INTEGERS[dtype], value)
    except (KeyError, ValueError, struct.error):
        raise Refusal(
            f"has a compiled graph with the value {value!r} of {dtype}, which is not known"
        ) from None


def _list_zeroed(graph: dict[str, Any], workspace: BufferUse | None) -> list[BufferUse]:
    """Returns the parts of the workspace that are set to zero before each execution."""
    zeroed = []
    for kind, offset, parameters in graph["workspace_modifications"].values():
        if kind == _UNSET:
            continue
        if kind != _ZEROED or workspace is None:
            raise Refusal("has a compiled graph that copies a table from the host before each run")
        nbytes = int(parameters[0])
        if not 0 < nbytes <= graph["fe_workspace_size"] - offset:
            raise Refusal(f"has a compiled graph that zeroes {nbytes} bytes at {offset}")
        zeroed.append(BufferUse(workspace.buffer, workspace.offset + offset, nbytes))
    return zeroed
