"""What a dictionary must hold so that snapshot viewers can draw it."""

from __future__ import annotations

from typing import Any

STATES = ("active_allocated", "active_pending_free", "inactive")


def find_problem(snapshot: Any) -> str:
    """Returns the first thing that a viewer could not read, or an empty text.

    Args:
        snapshot: any plain value.

    Example:
        >>> find_problem({"segments": []})
        'device_traces is missing'
    """
    if not isinstance(snapshot, dict):
        return f"it holds a {type(snapshot).__name__}, not a dict"
    for key in ("segments", "device_traces"):
        if key not in snapshot:
            return f"{key} is missing"
        if not isinstance(snapshot[key], list):
            return f"{key} is a {type(snapshot[key]).__name__}, not a list"
    for index, segment in enumerate(snapshot["segments"]):
        problem = _find_segment_problem(segment)
        if problem:
            return f"segments[{index}]: {problem}"
        if segment["device"] >= len(snapshot["device_traces"]):
            return f"segments[{index}]: device_traces has no entry {segment['device']}"
    for device, trace in enumerate(snapshot["device_traces"]):
        for index, entry in enumerate(trace if isinstance(trace, list) else [trace]):
            problem = _find_entry_problem(entry)
            if problem:
                return f"device_traces[{device}][{index}]: {problem}"
    return _find_plans_problem(snapshot.get("tracegraph_plans", []))


def _find_segment_problem(segment: Any) -> str:
    problem = _find_key_problem(
        segment, device=int, address=int, total_size=int, stream=int, blocks=list
    )
    if problem:
        return problem
    for index, block in enumerate(segment["blocks"]):
        problem = _find_key_problem(block, size=int, state=str)
        if problem:
            return f"blocks[{index}]: {problem}"
        if block["state"] not in STATES:
            return f"blocks[{index}]: state {block['state']!r} is none of {', '.join(STATES)}"
    total = sum(block["size"] for block in segment["blocks"])
    # Viewers add up the sizes to find each block's address.
    if segment["blocks"] and total != segment["total_size"]:
        return f"its blocks have {total:,} bytes together, the segment {segment['total_size']:,}"
    return ""


def _find_entry_problem(entry: Any) -> str:
    problem = _find_key_problem(entry, action=str, size=int, stream=int)
    if problem or entry["action"] == "oom":
        return problem
    return _find_key_problem(entry, addr=int)


def _find_plans_problem(plans: Any) -> str:
    for index, plan in enumerate(plans if isinstance(plans, list) else [plans]):
        problem = _find_key_problem(plan, name=str, arena_bytes=int, buffers=list)
        for buffer in () if problem else plan["buffers"]:
            problem = problem or _find_key_problem(
                buffer, name=str, offset=int, bytes=int, first=int, last=int
            )
        if problem:
            return f"tracegraph_plans[{index}]: {problem}"
    return ""


def _find_key_problem(record: Any, **kinds: type) -> str:
    if not isinstance(record, dict):
        return f"a {type(record).__name__}, not a dict"
    for key, kind in kinds.items():
        if key not in record:
            return f"{key} is missing"
        if not isinstance(record[key], kind):
            return f"{key} is a {type(record[key]).__name__}, not a {kind.__name__}"
    return ""
