"""The rule `control-flow`, of ``control_flow="refuse"``: a graph has one path through its ops.

It is the rule of PyTorch's graphs, which replay one list of kernels. Loops and branches of
`jax.lax` are legal otherwise.
"""

from __future__ import annotations

from tracegraph.constraints.dependence import Dependence
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Op

# One primitive to JAX, a loop until convergence once lowered.
_CONVERGING = frozenset(
    {
        "igamma",
        "igammac",
        "igamma_grad_a",
        "random_gamma",
        "random_gamma_grad",
        "regularized_incomplete_beta",
    }
)


def find_control_flow_violation(
    op: Op, dependence: Dependence, graph_name: str
) -> Violation | None:
    """Finds a branch or a loop whose path depends on data.

    Args:
        op: any op.
        dependence: the values of its graph that depend on data.
        graph_name: the captured function's name.

    Returns:
        The violation, or None; ``scan``, loops with a counter from literals, and branches over the
        platform are fine.
    """
    if op.name == "cond" and dependence.has_dependent_predicate(op):
        return _make_branch_violation(op, graph_name)
    if op.name == "while" and dependence.has_dependent_predicate(op):
        return _make_loop_violation(op, graph_name)
    if op.name in _CONVERGING and any(dependence.depends(operand) for operand in op.operands):
        return _make_convergence_violation(op, graph_name)
    return None


def _make_branch_violation(op: Op, graph_name: str) -> Violation:
    return _make_violation(
        f"`{graph_name}` takes a branch that depends on data",
        f"the host can't choose between {len(op.subgraphs)} branches",
        "compute both and select with jnp.where",
        op,
    )


def _make_loop_violation(op: Op, graph_name: str) -> Violation:
    return _make_violation(
        f"`{graph_name}` runs a loop whose length depends on data",
        "the number of rounds must be known when it is captured",
        "loop a fixed number of times with jax.lax.scan or jax.lax.fori_loop(0, 10, ...)",
        op,
    )


def _make_convergence_violation(op: Op, graph_name: str) -> Violation:
    return _make_violation(
        f"`{graph_name}` computes `{op.name}`, which loops until its data converges",
        "the number of rounds must be known when it is captured",
        f"move `{op.name}` outside `capture`",
        op,
    )


def _make_violation(what: str, why: str, fix: str, op: Op) -> Violation:
    return Violation(
        "control-flow",
        what,
        locate_op(op),
        f'control_flow="refuse" launches the same kernels at every replay; {why}',
        f'{fix}, leave control_flow="refuse" out, or use mode="partial"',
        op,
    )
