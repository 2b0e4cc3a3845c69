"""Calls that reach the CUDA driver, recorded on their way, and what they say of a graph's nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

CHANGES = (
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
)
_RECORDED = (
    *CHANGES,
    "cuGraphAddKernelNode",
    "cuGraphInstantiateWithParams",
    "cuGraphUpload",
    "cuGraphLaunch",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: its name, the handles that it got and gave, and the launch of a kernel in it."""

    name: str
    handle: int
    node: int = 0
    launch: tuple[int, ...] = ()


class RecordedBindings:
    """The module ``cuda.bindings.driver``, with the calls on graphs in a list.

    Args:
        api: the module.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        return self._wrap(name, found) if name in _RECORDED else found

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            results = function(*arguments)
            handle, node, launch = int(arguments[0]), 0, ()
            if name == "cuGraphInstantiateWithParams":
                handle = int(results[1])
            if name == "cuGraphAddKernelNode":
                node, launch = int(results[1]), read_launch(arguments[3])
            if name in CHANGES:
                node = int(arguments[1])
            if name == CHANGES[0]:
                launch = read_launch(arguments[2])
            self.calls.append(Call(name, handle, node, launch))
            return results

        return call


def read_launch(parameters: Any) -> tuple[int, ...]:
    """Returns function, grid, block and shared bytes of the parameters of a kernel node."""
    names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
    sizes = [int(getattr(parameters, name)) for name in (*names, "sharedMemBytes")]
    return (int(parameters.func), *sizes)


def find_slow_nodes(calls: list[Call]) -> list[str]:
    """Returns which changes make a node slower for ever, of calls in their order.

    A change before the first upload does, and one of a kernel's function, sizes or shared memory.
    """
    uploaded: set[int] = set()
    launches: dict[int, tuple[int, ...]] = {}
    found = []
    for call in calls:
        if call.name == "cuGraphAddKernelNode":
            launches[call.node] = call.launch
        if call.name in ("cuGraphUpload", "cuGraphLaunch"):
            uploaded.add(call.handle)
        if call.name not in CHANGES:
            continue
        if call.handle not in uploaded:
            found.append(f"node {call.node:#x} changed before the first upload")
        if call.launch and call.launch != launches.get(call.node, call.launch):
            found.append(f"node {call.node:#x} got another kernel or size")
    return found
