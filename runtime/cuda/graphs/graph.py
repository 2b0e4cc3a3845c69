"""CudaGraph: one stage of a graph definition as an executable CUDA graph."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange, KernelLaunch
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.parameters import KernelPatch
from tracegraph.runtime.cuda.graphs.builder import (
    ErrorPlace,
    GraphBuilder,
    Held,
    Library,
    label_node,
)
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.cuda.graphs.library_moves import Move
from tracegraph.runtime.cuda.graphs.node_actions import (
    Action,
    Child,
    Empty,
    EventPass,
    LibraryNode,
    is_patchable,
    make_action,
    move_action,
)
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode, Locate, TensorMap
from tracegraph.runtime.errors import InternalError


class _Executable:
    """Owns the handles of a graph; destroys them when graph and launchers are gone."""

    def __init__(
        self,
        driver: CudaDriver,
        graph: int,
        executable: int,
        held: list[Held],
    ):
        self.graph, self.executable = graph, executable
        # Kernels and libraries are held until after the graph that uses them.
        weakref.finalize(self, _destroy, driver, graph, executable, held).atexit = False


class CudaGraph:
    """An instantiated stage, bound to addresses.

    Args:
        driver: the CUDA driver.
        stage: nodes in an order that respects its edges.
        locate: returns the address of a byte range.
        kernels: loads the code of kernels, and knows the context.
        libraries: by kind of node, as ``matmul``.
        name: of the captured function, for errors.
        movable: names of the buffers that are to get other addresses, also in library calls.

    Raises:
        CudaError: the driver refuses a node; nothing is left of the graph.
        OutOfMemoryError: the device has no memory for it.
    """

    def __init__(
        self,
        driver: CudaDriver,
        stage: Stage,
        locate: Locate,
        kernels: KernelLoader,
        libraries: Mapping[str, Library],
        name: str,
        movable: Collection[str] = (),
    ) -> None:
        self.name = name
        self.stage = stage
        self._driver = driver
        self._context = kernels.context
        self._lock = threading.RLock()
        self._launchers: dict[int, Callable[[], None]] = {}
        builder = GraphBuilder(driver, stage, locate, kernels, name, movable)
        with driver.use_context(self._context):
            # Owned at once: making the thread's old context current again can fail too.
            self._executable = _Executable(driver, *builder.build(libraries), builder.loaded)
        self._actions = builder.actions
        self._handles = builder.handles
        self._patches: dict[int, KernelPatch] = {}
        self._moves = {
            index: builder.moves[handle]
            for index, handle in enumerate(builder.handles)
            if handle in builder.moves
        }
        # Of the kernels inside of library calls, by their handles.
        self._inner_patches: dict[int, KernelPatch] = {}

    @property
    def handles(self) -> tuple[int, int]:
        """The driver's handles of the graph and of the executable graph."""
        return self._executable.graph, self._executable.executable

    @property
    def node_count(self) -> int:
        """How many nodes the graph has; a library call is one."""
        return len(self._handles)

    @property
    def node_handles(self) -> tuple[int, ...]:
        """The driver's handle of each node of the stage."""
        return tuple(self._handles)

    def upload(self, stream: int) -> None:
        """Places the executable graph on the device, so that the first launch is a fast one."""
        with self._driver.use_context(self._context):
            self._driver.upload(self._executable.executable, stream)

    def launcher(self, stream: int) -> Callable[[], None]:
        """Returns the function that enqueues every node once on a stream, the same each time.

        The function keeps the executable graph alive, but not the buffers that it works on.
        """
        with self._lock:
            launch = self._launchers.get(stream)
            if launch is None:
                executable = self._executable
                launch = self._driver.make_launcher(
                    executable.executable, stream, self._context, executable
                )
                self._launchers[stream] = launch
            return launch

    def can_rebind(self, buffer: str, *, kernels_only: bool = False) -> bool:
        """True when `update` can give a buffer another address.

        Args:
            buffer: its name.
            kernels_only: the address is of memory of another origin, which the driver refuses for
                memcpys and memsets.
        """
        return all(
            self._can_patch(index, buffer, kernels_only=kernels_only)
            for index in self.stage.users.get(buffer, ())
        )

    def _can_patch(self, index: int, buffer: str, *, kernels_only: bool = False) -> bool:
        node = self.stage.nodes[index]
        if isinstance(node, LibraryNode):
            moves = self._moves.get(index, {}).get(buffer, ())
            has_others = any(move.parameter is None for move in moves)
            return bool(moves) and not (kernels_only and has_others)
        if kernels_only and not isinstance(node, KernelNode):
            return False
        return is_patchable(node, self._actions[index])

    def update(self, locate: Locate, buffers: Collection[str] | None = None) -> int:
        """Changes the addresses of nodes for all launches from now on, without rebuilding.

        Args:
            locate: returns the new address of a byte range.
            buffers: names of those that may have moved; all of them if None.

        Returns:
            How many nodes were changed.

        Raises:
            InternalError: a node that would have to change cannot be; none is changed.
            CudaError: the driver refuses; the nodes that were changed are changed back.
        """
        with self._lock:
            changes = self._find_changes(locate, buffers)
            if not changes:
                return 0
            with self._driver.use_context(self._context):
                self._apply(changes)
            return len(changes)

    def make_patcher(self, buffer: str) -> Callable[[int], None]:
        """Returns the fast way to give one buffer another address, again and again.

        The function takes the new address of the buffer's first byte; it counts for all launches
        from then on. One thread calls it at a time, and none while `update` runs.

        Raises:
            InternalError: a node cannot be changed, see `can_rebind`.
        """
        indices = self.stage.users.get(buffer, ())
        for index in indices:
            if not self._can_patch(index, buffer):
                raise _make_update_error(label_node(self.name, index, self.stage.nodes[index]))
        words: list[tuple[Any, int, int]] = []
        patches: list[tuple[Callable[[], Any], Callable[[], None]]] = []
        others: list[Callable[[int], None]] = []
        for index in indices:
            if isinstance(self.stage.nodes[index], LibraryNode):
                for move in self._moves[index][buffer]:
                    self._add_move(move, words, patches, others)
                continue
            pointers = self._find_pointers(index, buffer)
            if pointers:
                patch_node = self._find_patch(index)
                words += [(patch_node.packed.words, *pointer) for pointer in pointers]
                patches.append((patch_node.attempt, patch_node.report))
            else:
                others.append(self._make_node_patcher(index, buffer))

        def patch(address: int) -> None:
            for memory, place, offset in words:
                memory[place] = address + offset
            for attempt, report in patches:
                if attempt()[0]:
                    report()
            for each in others:
                each(address)

        # The executable graph lives as long as it can be changed.
        patch.__dict__["owner"] = self._executable
        return patch

    def _add_move(
        self,
        move: Move,
        words: list[tuple[Any, int, int]],
        patches: list[tuple[Callable[[], Any], Callable[[], None]]],
        others: list[Callable[[int], None]],
    ) -> None:
        """Adds what moves one address inside of a library call to the parts of a patcher."""
        action, handle = move.node.action, move.node.handle
        driver, context = self._driver, self._context
        executable = self._executable.executable
        if isinstance(action, FillRange):
            fill = action

            def patch(address: int) -> None:
                moved = dataclasses.replace(fill, target_address=address + move.offset)
                with driver.use_context(context):
                    driver.set_fill_node(executable, handle, moved, context)

            others.append(patch)
            return
        assert isinstance(action, KernelLaunch)
        assert move.parameter is not None
        if handle not in self._inner_patches:
            self._inner_patches[handle] = driver.patch_kernel_node(executable, handle, action)
        kernel = self._inner_patches[handle]
        start = kernel.packed.starts[move.parameter] + move.word
        words.append((kernel.packed.words, start, move.offset))
        send = (kernel.attempt, kernel.report)
        if send not in patches:
            patches.append(send)

    def write_dot(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph as DOT text."""
        self._driver.write_dot(self._executable.graph, path)

    def _find_changes(
        self, locate: Locate, buffers: Collection[str] | None
    ) -> list[tuple[int, Action]]:
        indices: Collection[int] = range(len(self._handles))
        if buffers is not None:
            indices = sorted({i for each in buffers for i in self.stage.users.get(each, ())})
        changes = []
        for index in indices:
            node, before = self.stage.nodes[index], self._read_action(index)
            function = before.function if isinstance(before, KernelLaunch) else 0
            after = make_action(self._driver, node, function, locate)
            if after == before:
                continue
            if type(after) is not type(before) or isinstance(after, (Child, Empty, EventPass)):
                raise _make_update_error(label_node(self.name, index, node))
            changes.append((index, after))
        return changes

    def _read_action(self, index: int) -> Action:
        """Returns what a node does now; a patch may have changed it since it was built."""
        action, patch = self._actions[index], self._patches.get(index)
        if patch is None or not isinstance(action, KernelLaunch):
            return action
        return dataclasses.replace(action, parameters=patch.packed.read())

    def _find_pointers(self, index: int, buffer: str) -> list[tuple[int, int]]:
        """Returns the words of a kernel's parameters that point into a buffer, with their offsets.

        Empty where words are not all that changes with the buffer's address.
        """
        node = self.stage.nodes[index]
        if not isinstance(node, KernelNode):
            return []
        maps = [each.use.buffer for each in node.parameters if isinstance(each, TensorMap)]
        if buffer in maps:
            return []
        starts = zip(self._find_patch(index).packed.starts, node.parameters, strict=True)
        return [
            (start, each.offset)
            for start, each in starts
            if isinstance(each, BufferUse) and each.buffer == buffer
        ]

    def _find_patch(self, index: int) -> KernelPatch:
        """Returns the one patch of a kernel node: buffers that it uses change it together."""
        action = self._actions[index]
        if index not in self._patches and isinstance(action, KernelLaunch):
            executable, handle = self._executable.executable, self._handles[index]
            self._patches[index] = self._driver.patch_kernel_node(executable, handle, action)
        return self._patches[index]

    def _make_node_patcher(self, index: int, buffer: str) -> Callable[[int], None]:
        """Returns the way to change a node that is no kernel, or one with tensor maps."""
        node = self.stage.nodes[index]
        if isinstance(node, KernelNode):
            return self._make_map_patcher(index, node, buffer)

        def patch(address: int) -> None:
            with self._driver.use_context(self._context):
                self._set(index, move_action(node, self._actions[index], buffer, address))

        return patch

    def _make_map_patcher(self, index: int, node: KernelNode, buffer: str) -> Callable[[int], None]:
        driver, kernel = self._driver, self._find_patch(index)
        parameters = tuple(zip(kernel.packed.starts, node.parameters, strict=True))

        def patch(address: int) -> None:
            for start, parameter in parameters:
                if isinstance(parameter, BufferUse) and parameter.buffer == buffer:
                    kernel.packed.words[start] = address + parameter.offset
                if isinstance(parameter, TensorMap) and parameter.use.buffer == buffer:
                    encoded = driver.encode_tensor_map(parameter, address + parameter.use.offset)
                    kernel.packed.words.cast("B")[8 * start : 8 * start + len(encoded)] = encoded
            kernel.send()

        return patch

    def _apply(self, changes: list[tuple[int, Action]]) -> None:
        with contextlib.ExitStack() as undo:
            for index, action in changes:
                before = self._read_action(index)
                with ErrorPlace(label_node(self.name, index, self.stage.nodes[index])):
                    self._set(index, action)
                undo.callback(self._set, index, before)
            undo.pop_all()

    def _set(self, index: int, action: Action) -> None:
        executable, node = self._executable.executable, self._handles[index]
        if isinstance(action, KernelLaunch):
            self._driver.set_kernel_node(executable, node, action)
            if index in self._patches:
                self._patches[index].packed.write(action.parameters)
        if isinstance(action, CopyRange):
            self._driver.set_copy_node(executable, node, action, self._context)
        if isinstance(action, FillRange):
            self._driver.set_fill_node(executable, node, action, self._context)
        self._actions[index] = action


def _destroy(driver: CudaDriver, graph: int, executable: int, held: list[Held]) -> None:
    try:
        driver.destroy_executable(executable)
    finally:
        driver.destroy_graph(graph)
        held.clear()


def _make_update_error(label: str) -> InternalError:
    return InternalError(
        "a node cannot be given another address",
        where=label,
        why="it is in a graph that a library captured, or would become a node of another kind",
    )
