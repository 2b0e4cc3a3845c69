"""The memory plans of the captures that are alive, for snapshots."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.memory.snapshots.snapshot import describe_plan

_captures: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
_lock = threading.Lock()


def watch_plan(captured: CapturedGraph) -> None:
    """Lets `describe_live_plans` describe a capture as long as it lives."""
    with _lock:
        _captures.add(captured)


def describe_live_plans() -> list[dict[str, Any]]:
    """Returns the plan of each living capture, as a snapshot file holds it."""
    with _lock:
        captures = list(_captures)
    plans = [(each.lowered.plan, each.replay.arena) for each in captures]
    return [
        describe_plan(
            plan.name,
            arena.block.address,
            plan.arena_bytes,
            [
                (life.name, plan.offsets[life.name], life.nbytes, life.first, life.last)
                for life in plan.lifetimes
            ],
        )
        for plan, arena in sorted(plans, key=lambda pair: pair[1].block.address)
    ]
