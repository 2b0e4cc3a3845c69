"""The rules of ``numerics="equivalent"``, in the order in which they are tried."""

from __future__ import annotations

from tracegraph.replacements.match import Rule
from tracegraph.replacements.scatter_sums import ScatterSums

RULES: tuple[Rule, ...] = (ScatterSums(),)
