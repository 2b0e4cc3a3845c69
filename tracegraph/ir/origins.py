"""Where an op comes from, as messages name it; the printed IR has the short form."""

from __future__ import annotations

import itertools
import sys

from tracegraph.ir.graph import Origin
from tracegraph.jax_internals import list_lines
from tracegraph.runtime.source_lines import locate_lines, walk_frames


def locate_origin(origin: Origin) -> str:
    """Returns the user's own innermost line, and in brackets a library's that made the op.

    Args:
        origin: of an op; one that was not traced has its short source only.

    Example:
        >>> locate_origin(Origin("train.py:41 in step"))
        'train.py:41 in step'
    """
    context = origin.equation_context
    if context is None:
        return origin.source
    # JAX's stack ends at the function that it traces; where that is a library's, ours goes on.
    stack = itertools.chain(list_lines(context), walk_frames(sys._getframe(1)))
    return locate_lines(stack) or origin.source
