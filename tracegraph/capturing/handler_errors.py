"""XLA's error of a call whose handler is not registered, in our four lines at the user's line."""

from __future__ import annotations

import re

import jax

from tracegraph.constraints.violation import Violation, locate_op, make_capture_error
from tracegraph.ir.graph import Graph, Op
from tracegraph.runtime.errors import CaptureError

_UNREGISTERED = re.compile(
    r"No (?:FFI handler registered for (\S+) on a|registered implementation for custom call to "
    r"(\S+) for) platform (\w+)"
)
# Which jax.ffi takes, by what XLA calls them.
_PLATFORMS = {"Host": "cpu"}


def translate_compile_error(error: Exception, graph: Graph) -> CaptureError | None:
    """Turns an error of XLA's compilation into ours, where we know more of it than XLA says.

    Args:
        error: that a compilation raised.
        graph: what was compiled.

    Returns:
        The error of a call whose name nothing is registered under; None for any other error.
    """
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    found = _UNREGISTERED.search(str(error)) if is_of_xla else None
    if found is None:
        return None
    target, platform = found[1] or found[2], _PLATFORMS.get(found[3], found[3])
    calls = _find_calls(graph, target)
    places = [locate_op(op) for op in calls] or [f"XLA's call of {target}"]
    why = f"XLA knows no handler of this name for the platform {platform}"
    fix = (
        f'register it before the call: jax.ffi.register_ffi_target("{target}", handler, '
        f'platform="{platform}")'
    )
    what = f"`{graph.name}` calls `{target}`, which is not registered"
    violations = [Violation("ffi-handler", what, place, why, fix) for place in places]
    return make_capture_error(violations, graph_name=graph.name, graph=graph)


def _find_calls(graph: Graph, target: str) -> list[Op]:
    inner = [
        each for op in graph.ops for _, sub in op.subgraphs for each in _find_calls(sub, target)
    ]
    return [op for op in graph.ops if op.params.get("target_name") == target] + inner
