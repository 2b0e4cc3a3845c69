"""Checks a partition against its Graph: no op is lost, and each value is what its buffer says.

A replay is compared with executables of the same regions, so a label on the wrong buffer, or two
operands that changed places between two regions, would be compared with themselves. Here the
regions are held against the Graph instead. Nothing is run or traced: a few operations per operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from tracegraph.capturing.drafter import CHEAP_PRIMITIVES
from tracegraph.capturing.flat_function import FlatFunction
from tracegraph.constraints.callbacks import has_callback
from tracegraph.ir.graph import EXTERNAL_MARKS, STREAM_MARKS, Graph, Op, Operand, Value
from tracegraph.ir.printer import print_op, print_operand
from tracegraph.lowering.request import BufferSpec, CaptureRequest, Region, Role
from tracegraph.runtime.errors import InternalError


@dataclasses.dataclass(frozen=True)
class Cut:
    """A region, and the ops that it was made from."""

    region: Region
    function: FlatFunction


def check_partition(
    graph: Graph,
    request: CaptureRequest,
    cuts: Sequence[Cut],
    *,
    uncapturable: Collection[int],
    donated: Collection[int],
    describe: Callable[[str, Operand], BufferSpec],
) -> None:
    """Checks that the regions together are the graph.

    Args:
        graph: that was cut.
        request: what it became.
        cuts: its regions in order.
        uncapturable: indices of the ops that run eagerly.
        donated: indices of the donated inputs.
        describe: returns the buffer that holds a value, by a name.

    Raises:
        InternalError: an op is in no region or in several; a region reads what is not there yet,
            or not ordered before it; a buffer has the name or type of another value; ops with
            effects change places; a result is in another buffer than its value.
    """
    check = _Check(graph, request, frozenset(donated), describe)
    check.name_inputs()
    for index, cut in enumerate(cuts):
        if request.regions[index] is not cut.region:
            check.raise_fault(f"region {index} of the request is not `{cut.region.name}`")
        check.enter(index, cut)
    check.count_ops(frozenset(uncapturable))
    check.check_order()
    check.check_outputs()


class _Check:
    """The values that have a buffer so far, and which region made each."""

    def __init__(
        self,
        graph: Graph,
        request: CaptureRequest,
        donated: frozenset[int],
        describe: Callable[[str, Operand], BufferSpec],
    ) -> None:
        self._graph, self._request, self._donated = graph, request, donated
        self._describe = describe
        # What each buffer holds, and the region that wrote it; -1 for an input.
        self._held: dict[str, tuple[Operand, int]] = {}
        self._ancestors: list[set[int]] = []
        self._index_of: dict[str, int] = {}
        self._last_on_stream: dict[int, int] = {}
        # In the order of the regions; what a region computes again is not its own.
        self._own: list[tuple[int, Op]] = []
        self._made: dict[Value, int] = {}

    def raise_fault(self, why: str) -> NoReturn:
        """Raises the error of a partition that is not its graph."""
        raise InternalError(
            f"the partition of `{self._graph.name}` is not its graph",
            where=f"partition of `{self._graph.name}` into {len(self._request.regions)} regions",
            why=why,
        )

    def name_inputs(self) -> None:
        """Takes the buffers of inputs and constants."""
        count = len(self._graph.inputs)
        specs = self._request.inputs
        constants = {f"%{each.name}": each.value for each in self._graph.constants}
        if len(specs) < count:
            self.raise_fault(f"{count} inputs have {len(specs)} buffers")
        for index, spec in enumerate(specs):
            role = Role.DONATED if index in self._donated else Role.COPIED
            if index < count:
                value = self._graph.inputs[index]
            else:
                role, name = Role.CONSTANT, spec.buffer.name
                if name not in constants:
                    self.raise_fault(f"there is no constant {name}")
                value = constants[name]
            if spec.role is not role:
                self.raise_fault(f"input {index} is {spec.role.value}, not {role.value}")
            self._define(spec.buffer, value, -1)

    def enter(self, index: int, cut: Cut) -> None:
        """Checks what a region waits for, reads, computes and returns."""
        region, function = cut.region, cut.function
        place = region.place
        before = {self._index_of[name] for name in place.waits if name in self._index_of}
        if len(before) < len(place.waits):
            self.raise_fault(f"`{region.name}` waits for a region that does not come before it")
        if place.stream in self._last_on_stream:
            before.add(self._last_on_stream[place.stream])
        self._ancestors.append(before.union(*(self._ancestors[each] for each in before)))
        self._index_of[region.name] = self._last_on_stream[place.stream] = index
        if len(region.inputs) != len(function.inputs):
            self.raise_fault(
                f"`{region.name}` has {len(region.inputs)} inputs for {len(function.inputs)}"
            )
        for spec, value in zip(region.inputs, function.inputs, strict=True):
            self._check_read(region, index, spec, value)
        known: set[Operand] = {*function.inputs, *self._list_embedded(region, function)}
        for op in function.ops:
            for operand in op.operands:
                if isinstance(operand, Value) and operand not in known:
                    self.raise_fault(
                        f"`{region.name}` does not have {_print(operand)} of {print_op(op)}"
                    )
            known.update(op.results)
        self._own += [(index, op) for op in function.ops]
        if len(region.outputs) != len(function.outputs):
            self.raise_fault(f"`{region.name}` returns another number of results")
        for spec, operand in zip(region.outputs, function.outputs, strict=True):
            if isinstance(operand, Value) and operand not in known:
                self.raise_fault(
                    f"`{region.name}` does not have {_print(operand)}, which it returns"
                )
            self._define(spec, operand, index)

    def count_ops(self, uncapturable: frozenset[int]) -> None:
        """Checks that each op is in one region of its kind; cheap constants may be in several."""
        number = {op: index for index, op in enumerate(self._graph.ops)}
        regions = self._request.regions
        homes: dict[Op, list[int]] = {}
        for index, op in self._own:
            if op not in number:
                self.raise_fault(f"`{regions[index].name}` has an op that is not in the graph")
            homes.setdefault(op, []).append(index)
        constants: set[Operand] = set()
        for op, position in number.items():
            found = homes.get(op, [])
            is_eager = position in uncapturable
            is_constant = not is_eager and _is_constant(op, constants)
            if is_constant:
                constants.update(op.results)
            if op.name in EXTERNAL_MARKS:
                expected = len(found) == 1 and regions[found[0]].point is not None
            elif op.name in STREAM_MARKS:
                expected = not found or is_eager
            else:
                expected = len(found) == 1 or (is_constant and len(found) == len(set(found)))
            if not expected:
                names = ", ".join(regions[index].name for index in found) or "no region"
                self.raise_fault(f"{print_op(op)} is in {names}")
            for index in found:
                place = regions[index].place
                if place.is_captured == is_eager and not is_constant:
                    self.raise_fault(f"{print_op(op)} is on the wrong side of a cut")
                is_mark = op.name in STREAM_MARKS
                stream = op.params["stream"] if is_mark else op.origin.stream
                is_own_stream = stream == place.stream
                if place.is_captured and not is_own_stream and not is_constant:
                    self.raise_fault(f"{print_op(op)} is on stream {place.stream}")

    def check_order(self) -> None:
        """Checks that effects keep their order, and that eager regions run alone."""
        number = {op: index for index, op in enumerate(self._graph.ops)}
        effects = [number[op] for _, op in self._own if has_callback(op)]
        if effects != sorted(effects):
            self.raise_fault("ops that call back into Python have changed places")
        for index, region in enumerate(self._request.regions):
            if region.place.is_captured:
                continue
            alone = len(self._ancestors[index]) == index and all(
                index in ancestors for ancestors in self._ancestors[index + 1 :]
            )
            if not alone:
                self.raise_fault(f"`{region.name}` runs eagerly beside another region")

    def check_outputs(self) -> None:
        """Checks that each result is read from where its value is."""
        if len(self._request.outputs) != len(self._graph.outputs):
            self.raise_fault("the graph has another number of results")
        aliases: Mapping[int, int] = dict(self._graph.aliases)
        for index, (spec, operand) in enumerate(
            zip(self._request.outputs, self._graph.outputs, strict=True)
        ):
            held, writer = self._held.get(spec.buffer.name, (None, 0))
            if held is not operand:
                self.raise_fault(
                    f"result {index} is {_print(operand)}, and {spec.buffer.name} is not"
                )
            if spec.buffer != self._describe(spec.buffer.name, operand):
                self.raise_fault(f"the buffer of result {index} has another type")
            alias = aliases.get(index)
            wanted = None if alias is None else self._request.inputs[alias].buffer.name
            if spec.alias != wanted:
                self.raise_fault(f"result {index} updates {spec.alias}, not {wanted}")
            is_input = writer == -1 and spec.alias is None
            if is_input and self._find_role(spec.buffer.name) is not Role.COPIED:
                self.raise_fault(f"result {index} is an input that is overwritten or must not be")

    def _define(self, spec: BufferSpec, operand: Operand, writer: int) -> None:
        if spec.name in self._held:
            self.raise_fault(f"two values are in the buffer {spec.name}")
        if spec != self._describe(spec.name, operand):
            self.raise_fault(f"the buffer {spec.name} is not one of {_print(operand)}")
        self._held[spec.name] = (operand, writer)

    def _check_read(self, region: Region, index: int, spec: BufferSpec, value: Value) -> None:
        held, writer = self._held.get(spec.name, (None, 0))
        if held is not value:
            self.raise_fault(
                f"`{region.name}` reads {_print(value)} from {spec.name}, which is not there"
            )
        if spec != self._describe(spec.name, value):
            self.raise_fault(f"`{region.name}` reads {spec.name} as another type")
        if writer >= 0 and writer not in self._ancestors[index]:
            name = self._request.regions[writer].name
            self.raise_fault(f"`{region.name}` reads {spec.name} and does not wait for `{name}`")

    def _list_embedded(self, region: Region, function: FlatFunction) -> Iterator[Operand]:
        arrays = {each.value: each.array for each in self._graph.constants}
        for value, array in function.embedded.items():
            if arrays.get(value) is not array:
                self.raise_fault(f"`{region.name}` embeds another array as {_print(value)}")
            yield value

    def _find_role(self, name: str) -> Role:
        return next(spec.role for spec in self._request.inputs if spec.buffer.name == name)


def _is_constant(op: Op, constants: Collection[Operand]) -> bool:
    return op.name in CHEAP_PRIMITIVES and all(
        operand in constants or not isinstance(operand, Value) for operand in op.operands
    )


def _print(operand: Operand) -> str:
    return print_operand(operand)
