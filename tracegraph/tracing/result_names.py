"""The names of results in errors and reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from tracegraph.probing.collect_probes import ProbeSpec
from tracegraph.tracing.static_leaves import wrap_static_leaves


def name_results(tree: Any, probes: Iterable[ProbeSpec] = ()) -> list[str]:
    """Returns one name per result of a tree of results, as ``result['loss']``, and per probe."""
    numbered = wrap_static_leaves(jax.tree_util.tree_unflatten(tree, range(tree.num_leaves)))
    return [
        "result" + jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(numbered)
    ] + [f"probe {each.name!r}" for each in probes for _ in range(each.tree.num_leaves)]
