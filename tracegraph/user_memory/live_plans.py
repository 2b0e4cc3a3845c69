"""The memory plans of the captures that are alive, for snapshots."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tracegraph.lowering.planning.memory_plan import MemoryPlan
from tracegraph.runtime.memory.snapshots.snapshot import describe_plan
from tracegraph.runtime.replay import Replay

_plans: weakref.WeakKeyDictionary[Replay, MemoryPlan] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def watch_plan(plan: MemoryPlan, replay: Replay) -> None:
    """Lets `describe_live_plans` describe the plan of a replay as long as that lives."""
    with _lock:
        _plans[replay] = plan


def describe_live_plans() -> list[dict[str, Any]]:
    """Returns the plan of each living capture, as a snapshot file holds it."""
    with _lock:
        plans = [(plan, replay.arena) for replay, plan in _plans.items()]
    return [
        describe_plan(
            plan.name,
            arena.block.address,
            plan.arena_bytes - arena.absent_bytes,
            [
                (life.name, place, life.nbytes, life.first, life.last)
                for life in plan.lifetimes
                for place in (arena.find_place(plan.offsets[life.name]),)
                if place is not None and not life.is_outside
            ],
        )
        for plan, arena in sorted(plans, key=lambda pair: pair[1].block.address)
    ]
