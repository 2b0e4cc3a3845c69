"""Planted faults in a partition: labels, operands, order, effects; each must be found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tracegraph as tg
from tests.tracegraph.capturing.test_partition import partition
from tracegraph.capturing import partition as partition_module
from tracegraph.capturing.flat_function import FlatFunction
from tracegraph.capturing.partition_check import Cut, check_partition
from tracegraph.lowering.request import InputSpec, OutputSpec, Region, Role
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.streams.stream import Stream, current_stream, stream

X = jnp.arange(1.0, 5.0)
TABLE = np.arange(4, dtype=np.float32)


def step(state: Any, x: Any) -> Any:
    """Two callbacks in order, three captured parts, a donated state, two results of one type."""
    a, b = jnp.sin(x), jnp.cos(x) + TABLE
    io_callback(lambda *_: None, None, a, b, ordered=False)
    c = a * b + a
    io_callback(lambda *_: None, None, c, ordered=False)
    return state + c, c - b, jnp.tanh(c)


def fork(x: Any) -> Any:
    """Two streams that join."""
    side = Stream()
    side.wait_stream(current_stream())
    with stream(side):
        y = jnp.sin(x)
    z = jnp.cos(x)
    current_stream().wait_stream(side)
    return y + z


class Partition:
    """The arguments of `check_partition`, to be changed."""

    def __init__(self, function: Callable[..., Any], *args: Any, donated: Any = ()) -> None:
        patch = pytest.MonkeyPatch()
        patch.setattr(partition_module, "check_partition", self._keep)
        partition(function, *args, donated=donated, eager=("io_callback",))
        patch.undo()

    def _keep(self, graph: Any, request: Any, cuts: Any, **options: Any) -> None:
        self.graph, self.request, self.cuts, self.options = graph, request, list(cuts), options

    def check(self) -> None:
        check_partition(self.graph, self.request, self.cuts, **self.options)

    def replace(self, **fields: Any) -> None:
        self.request = dataclasses.replace(self.request, **fields)

    def change(
        self, index: int, region: dict[str, Any] | None = None, **function: Any
    ) -> tuple[Region, FlatFunction]:
        """Replaces fields of a region and of its function; returns what they were."""
        cut = self.cuts[index]
        changed = dataclasses.replace(cut.region, **(region or {}))
        self.cuts[index] = Cut(changed, dataclasses.replace(cut.function, **function))
        self.replace(regions=tuple(each.region for each in self.cuts))
        return cut.region, cut.function


def swap(items: Any) -> tuple[Any, ...]:
    first, second, *rest = items
    return (second, first, *rest)


def plant_swapped_labels(p: Partition) -> None:
    """A region reads two inputs of one type under each other's names."""
    p.change(1, {"inputs": swap(p.cuts[1].region.inputs)})


def plant_swapped_operands(p: Partition) -> None:
    """The function of a region takes its arguments in another order."""
    p.change(2, inputs=swap(p.cuts[2].function.inputs))


def plant_swapped_results(p: Partition) -> None:
    """A region returns two values under each other's names."""
    p.change(0, {"outputs": swap(p.cuts[0].region.outputs)})


def plant_lost_op(p: Partition) -> None:
    """The last op of the last region is gone, and so is what it makes."""
    region, function = p.cuts[-1].region, p.cuts[-1].function
    lost = set(function.ops[-1].results)
    kept = [i for i, value in enumerate(function.outputs) if value not in lost]
    outputs = tuple(region.outputs[i] for i in kept)
    p.change(
        -1,
        {"outputs": outputs},
        ops=function.ops[:-1],
        outputs=[function.outputs[i] for i in kept],
    )


def plant_op_twice(p: Partition) -> None:
    """An op is computed twice."""
    p.change(2, ops=[*p.cuts[2].function.ops, p.cuts[2].function.ops[0]])


def plant_late_op(p: Partition) -> None:
    """A region computes its ops in the wrong order."""
    p.change(2, ops=p.cuts[2].function.ops[::-1])


def plant_late_region(p: Partition) -> None:
    """A region comes before the one whose values it reads."""
    p.cuts[0], p.cuts[2] = p.cuts[2], p.cuts[0]
    p.replace(regions=tuple(each.region for each in p.cuts))


def plant_swapped_effects(p: Partition) -> None:
    """Two callbacks change places; what each reads is there in time."""
    p.cuts[1:4] = [p.cuts[2], p.cuts[3], p.cuts[1]]
    p.replace(regions=tuple(each.region for each in p.cuts))


def plant_captured_callback(p: Partition) -> None:
    """A callback is inside a graph."""
    place = dataclasses.replace(p.cuts[1].region.place, is_captured=True)
    p.change(1, {"place": place})


def plant_eager_rest(p: Partition) -> None:
    """What could be captured runs eagerly."""
    place = dataclasses.replace(p.cuts[2].region.place, is_captured=False)
    p.change(2, {"place": place})


def plant_type(p: Partition) -> None:
    """A buffer has the type of another value."""
    region = p.cuts[2].region
    spec = dataclasses.replace(region.inputs[0], dtype=np.dtype(np.int32))
    p.change(2, {"inputs": (spec, *region.inputs[1:])})


def plant_result(p: Partition) -> None:
    """Two results change places."""
    first, *rest = p.request.outputs
    p.replace(outputs=(first, *swap(rest)))


def plant_alias(p: Partition) -> None:
    """A result does not update the donated input that it should."""
    first, *rest = p.request.outputs
    p.replace(outputs=(OutputSpec(first.buffer), *rest))


def plant_role(p: Partition) -> None:
    """A donated input is copied at each replay."""
    first, *rest = p.request.inputs
    p.replace(inputs=(InputSpec(first.buffer, Role.COPIED), *rest))


def plant_constant(p: Partition) -> None:
    """A region embeds another array than the function closes over."""
    value = next(iter(p.cuts[0].function.embedded))
    p.change(0, embedded={value: jnp.zeros(4)})


FAULTS: dict[Callable[[Partition], None], str] = {
    plant_swapped_labels: "reads %",
    plant_swapped_operands: "reads %",
    plant_swapped_results: "the buffer|is not there|result",
    plant_lost_op: "is in no region|result",
    plant_op_twice: "is in region2, region2",
    plant_late_op: "does not have",
    plant_late_region: "is not there",
    plant_swapped_effects: "changed places",
    plant_captured_callback: "on the wrong side",
    plant_eager_rest: "on the wrong side",
    plant_type: "as another type",
    plant_result: "result 1",
    plant_alias: "updates None",
    plant_role: "not donated",
    plant_constant: "embeds another array",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[Partition], None]) -> None:
    found = Partition(step, X, X, donated=(0,))
    found.check()
    plant(found)
    with pytest.raises(InternalError, match="the partition of `f` is not its graph") as caught:
        found.check()
    assert any(each in caught.value.why for each in FAULTS[plant].split("|")), caught.value.why


def test_a_missing_wait_between_streams_is_found() -> None:
    found = Partition(fork, X)
    found.check()
    last = next(i for i, cut in enumerate(found.cuts) if cut.region.place.waits and i > 1)
    place = dataclasses.replace(found.cuts[last].region.place, waits=())
    found.change(last, {"place": place})
    with pytest.raises(InternalError, match="is not its graph") as caught:
        found.check()
    assert "does not wait for" in caught.value.why


def test_an_op_on_another_stream_is_found() -> None:
    found = Partition(fork, X)
    index = next(i for i, cut in enumerate(found.cuts) if cut.region.place.stream)
    place = dataclasses.replace(found.cuts[index].region.place, stream=99)
    found.change(index, {"place": place})
    with pytest.raises(InternalError, match="is not its graph") as caught:
        found.check()
    assert "is on stream 99" in caught.value.why


def test_a_wrong_label_is_found_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are compared with the same regions, so only the check of the partition finds it."""
    finish = partition_module._finish

    def finish_swapped(draft: Any, *rest: Any) -> Cut:
        cut = finish(draft, *rest)
        if len(cut.region.inputs) < 2:
            return cut
        return Cut(dataclasses.replace(cut.region, inputs=swap(cut.region.inputs)), cut.function)

    monkeypatch.setattr(partition_module, "_finish", finish_swapped)
    captured = tg.capture(lambda x, y: x - y, mode="partial")
    with pytest.raises(tg.InternalError, match="is not its graph"):
        captured(X, X + 1)
    monkeypatch.setattr(partition_module, "_finish", finish)
    np.testing.assert_array_equal(captured(X, X + 1), jax.jit(lambda x, y: x - y)(X, X + 1))
