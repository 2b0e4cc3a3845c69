"""Estimates of how long the steps of a graph take, from what is known of their launches.

Note [Estimated times]
Which steps are dealt out first, and how many lanes there are, depends on how their times compare,
see Note [Lanes]. Measured times would make each capture's graph another one. These are fitted by
eye to ``benchmarks/results/kernel_times_h100.txt``: on an H100 a kernel takes 0.7 µs at least;
blocks move at most 0.08 MB/µs each and 5 MB/µs together, out of caches; what stages its operands in
shared memory, as matmuls do, takes a microsecond more.
"""

from __future__ import annotations

import math

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, Step
from tracegraph.runtime.definition.nodes import CopyNode, FillNode, KernelNode

_LEAST_US, _STAGED_US, _LIBRARY_US, _CONDITIONAL_US = 0.7, 1.0, 4.0, 8.0
_BYTES_PER_US, _BLOCK_BYTES_PER_US = 5e6, 8e4


def estimate_microseconds(step: Step) -> float:
    """Returns about how long a step takes, see Note [Estimated times].

    Args:
        step: of a graph; of a loop one turn is counted.
    """
    if isinstance(step, ConditionalStep):
        inner = [estimate_microseconds(each) for body in step.bodies for each in body]
        return _CONDITIONAL_US + sum(inner)
    nbytes = sum(use.nbytes for use in (*step.reads, *step.writes))
    node = step.node if isinstance(step, DeviceStep) else None
    if node is None or isinstance(node, CopyNode | FillNode):
        return _LEAST_US + nbytes / _BYTES_PER_US
    if not isinstance(node, KernelNode):
        return _LIBRARY_US + nbytes / _BYTES_PER_US
    shape = node.shape
    rate = min(_BYTES_PER_US, _BLOCK_BYTES_PER_US * math.prod(shape.grid))
    return _LEAST_US + (_STAGED_US if shape.shared_bytes else 0.0) + nbytes / rate
