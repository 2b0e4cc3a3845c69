"""The records of a graph that a file holds."""

from __future__ import annotations

from tracegraph.runtime.definition import (
    cudnn_calls,
    graph,
    graph_nodes,
    library_calls,
    library_nodes,
    nodes,
)
from tracegraph.runtime.ffi import c_api, call

# Not `CallNode`, whose executable is no plain value, nor `EventNode`: an event is the user's. Nor
# `CollectiveNode`, `JointCollectiveNode` and `NumberNode`: graphs over several devices stay here.
GRAPH_TYPES: tuple[type, ...] = (
    nodes.BufferUse,
    nodes.CopyNode,
    nodes.FillNode,
    nodes.KernelCode,
    nodes.LaunchShape,
    nodes.Swizzle,
    nodes.TensorMap,
    nodes.ConditionHandle,
    nodes.KernelNode,
    graph_nodes.Construct,
    graph_nodes.Turn,
    graph_nodes.Body,
    graph_nodes.ConditionalNode,
    library_nodes.MatrixLayout,
    library_nodes.Matmul,
    library_nodes.MatmulNode,
    library_nodes.FfiCallNode,
    library_nodes.LibraryCallNode,
    library_nodes.CudnnNode,
    library_calls.Transform,
    library_calls.Scale,
    library_calls.TriangularSolve,
    cudnn_calls.Direction,
    cudnn_calls.Activation,
    cudnn_calls.Tensor,
    cudnn_calls.Window,
    cudnn_calls.Algorithm,
    cudnn_calls.Epilogue,
    cudnn_calls.Convolution,
    cudnn_calls.CompiledGraph,
    call.ArrayType,
    call.ScalarAttribute,
    call.ArrayAttribute,
    call.DictionaryAttribute,
    call.FfiCall,
    c_api.DataType,
    graph.BufferSlot,
    graph.Stage,
    graph.ArenaSize,
    graph.GraphDefinition,
)
