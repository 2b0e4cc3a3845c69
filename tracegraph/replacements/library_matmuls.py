"""Matmuls that XLA computes by kernels of its own, where the library has others.

Note [Matmuls of the library]
For each matmul XLA takes the faster one of cublasLt's kernel and one of its own, of those that it
times alone. In a program that is another question: what comes behind a matmul may be a part of
cublasLt's kernel, a bias or an update of weights, and stays a kernel of its own behind XLA's. In a
step of GPT-2 in bfloat16 on an H100, one of XLA's kernels for 2048 x 768 x 2304 takes 15.3 us and
the bias behind it 6.5; cublasLt takes 13.6 for both. So XLA is told to leave all of them to
cublasLt. Either way is XLA's own, so nothing is measured but the time.
"""

from __future__ import annotations

from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import KernelNode

# What XLA calls instructions for which it writes a kernel around a matmul.
_OWN_KERNEL = "gemm_fusion"


def count_own_matmuls(definition: GraphDefinition) -> int:
    """Returns how many kernels of XLA's own a definition has for matmuls.

    Args:
        definition: what XLA made of a function.
    """
    nodes = [node for stage in definition.stages for node in stage.nodes]
    return sum(isinstance(each, KernelNode) and each.name.startswith(_OWN_KERNEL) for each in nodes)
