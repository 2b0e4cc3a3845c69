"""Scope: what thunks name by number or by text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from tracegraph.lowering.device_program import GraphStep
from tracegraph.lowering.xla.ffi_call import CheckCall
from tracegraph.lowering.xla.program import Allocation, AllocationKind
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, LaunchShape
from tracegraph.runtime.errors import CudaError, UnsupportedError

# Returns how many bytes of workspace a call of a library needs.
PlanCall: TypeAlias = Callable[[LibraryCall], int]
_ORDER = BufferUse("#order of collectives", 0, 1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a kernel's launches have in common.

    Attributes:
        code: what runs.
        shape: on how many threads.
        parameters: for each of the kernel's the number of its argument, or its bytes.
        waits_first: True if it waits for the kernels before it before it touches memory.
    """

    code: KernelCode
    shape: LaunchShape
    parameters: tuple[int | bytes, ...]
    waits_first: bool


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Which iteration of a loop a sequence is.

    Attributes:
        first: its number in the first turn of the loop's node.
        per_turn: iterations per turn; 0 where the sequence is no part of such a node.
        counter: four bytes with the number of turns that are over, where there are turns.
    """

    first: int
    per_turn: int = 0
    counter: BufferUse | None = None


@dataclasses.dataclass(frozen=True)
class Scope:
    """What the thunks of one sequence refer to.

    More than six fields because all but the first two are shared by the sequences of a program.

    Attributes:
        views: by number of the allocation: its bytes, or None where no thunk may read or write.
        instructions: of the computation that the sequence is of, by name.
        codes: kernels met so far; equal ones are kept once.
        binary: the image that old kernels are looked up in; empty where that would be wrong.
        launches: those read so far, by the bytes of their description and the count of arguments.
        computations: the instructions of every computation, by its number.
        iterations: those of the loops around the sequence, the innermost first; None where a loop
            does not count them.
        added: temporaries that XLA's program does not have.
        check_call: of the device; says why a call of a handler or of cuDNN cannot be in a graph.
        plan_call: of the device; says how much workspace a call of a library needs.
        cudnn_graphs: the compiled graphs of cuDNN, by their fingerprints.
        reads_loops: say of each kernel what it computes for each element, where that is known.
        partitions: how many devices the program is for.
        has_choices: a node may choose among several branches.
        has_ieee_sums: XLA was asked for no other sums of floats than those of IEEE 754.
        is_checked: the fields of the thunks were looked at before, in another iteration.
    """

    views: tuple[BufferUse | None, ...]
    instructions: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    codes: dict[tuple[str, bytes], KernelCode] = dataclasses.field(default_factory=dict, repr=False)
    binary: bytes = dataclasses.field(default=b"", repr=False)
    launches: dict[tuple[bytes, int], Launch] = dataclasses.field(default_factory=dict, repr=False)
    computations: Mapping[int, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    iterations: tuple[Iteration | None, ...] = ()
    added: list[Allocation] = dataclasses.field(default_factory=list, repr=False)
    check_call: CheckCall | None = dataclasses.field(default=None, repr=False)
    plan_call: PlanCall | None = dataclasses.field(default=None, repr=False)
    cudnn_graphs: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    reads_loops: bool = False
    partitions: int = 1
    has_choices: bool = True
    has_ieee_sums: bool = False
    is_checked: bool = False

    def open_loop(self, name: str, iteration: Iteration | None) -> Scope:
        """Returns the scope of a sequence of a loop.

        Args:
            name: of the loop's instruction.
            iteration: which one the sequence is; None where that is not counted.
        """
        return self.open_branch(name).enter_iteration(iteration)

    def enter_iteration(self, iteration: Iteration | None) -> Scope:
        """Returns the scope with an iteration of one more loop around it; see `open_loop`."""
        return dataclasses.replace(self, iterations=(iteration, *self.iterations))

    def open_branch(self, name: str) -> Scope:
        """Returns the scope of a sequence of an instruction that calls computations."""
        caller = self.instructions.get(name)
        called = () if caller is None else caller.called_computation_ids
        instructions = {
            inner: instruction
            for number in called
            for inner, instruction in self.computations.get(number, {}).items()
        }
        return dataclasses.replace(self, instructions=instructions)

    def add_temporary(self, nbytes: int) -> BufferUse:
        """Returns bytes that no thunk names."""
        name = f"#added.{len(self.added)}"
        self.added.append(Allocation(name, nbytes, AllocationKind.TEMPORARY))
        return BufferUse(name, 0, nbytes)

    def find_order(self) -> tuple[BufferUse, bool]:
        """Returns the byte that orders collectives, and whether none has asked for it before."""
        is_first = all(each.name != _ORDER.buffer for each in self.added)
        if is_first:
            self.added.append(Allocation(_ORDER.buffer, 1, AllocationKind.TEMPORARY))
        return _ORDER, is_first

    def add_workspace(self, call: LibraryCall) -> dict[str, BufferUse]:
        """Returns the workspace that a call of a library needs on the device, by its role, if any.

        Raises:
            Refusal: the library cannot do it, or is missing.
        """
        try:
            nbytes = self.plan_call(call) if self.plan_call is not None else 0
        except (CudaError, UnsupportedError) as error:
            raise Refusal(f"cannot be done by its library: {error.what} ({error.fix})") from error
        return {"workspace": self.add_temporary(nbytes)} if nbytes else {}

    def find_use(self, piece: Any) -> BufferUse:
        """Returns the bytes that a ``BufferAllocationSliceProto`` names.

        Raises:
            Refusal: the slice reaches out of its allocation, or there is no such allocation.
        """
        index, offset, size = piece.buffer_allocation_index, piece.offset, piece.size
        if not 0 <= index < len(self.views):
            raise Refusal(f"names allocation #{index} of {len(self.views)}")
        view = self.views[index]
        if view is None:
            raise Refusal(f"names allocation #{index}, which is no device memory")
        if offset < 0 or size < 0 or offset + size > view.nbytes:
            raise Refusal(
                f"names bytes {offset} to {offset + size} of allocation #{index}, which has "
                f"{view.nbytes}"
            )
        return BufferUse(view.buffer, view.offset + offset, size)

    def find_shaped_use(self, piece: Any) -> BufferUse:
        """Returns the bytes that a ``ShapedSliceProto`` names, as `find_use`."""
        if not piece.HasField("slice"):
            raise Refusal("names no bytes where an array is needed")
        return self.find_use(piece.slice)

    def intern_code(self, symbol: str, image: bytes) -> KernelCode:
        """Returns the kernel of a symbol in an image; the same object for equal ones."""
        if not symbol or not image:
            raise Refusal("has no compiled kernel")
        return self.codes.setdefault((symbol, image), KernelCode(symbol, image))


class DecodeSequence(Protocol):
    """Returns the steps of a sequence of thunks that is inside of a thunk."""

    def __call__(
        self,
        thunks: Iterable[Any],
        scope: Scope,
        *,
        known: dict[int, list[GraphStep]] | None = None,
    ) -> list[GraphStep]:
        """See `decode_sequence` in `lowering/xla/thunks.py`."""
        ...
