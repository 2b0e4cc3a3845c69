"""What the web viewer of memory snapshots does with a file, written anew and strict.

It reads a pickle of plain values by opcode, gives blocks addresses by adding up sizes, follows the
trace forwards for the timeline of blocks, and backwards from the final state for the view of
segments. Where the viewer would draw nonsense in silence, this raises.
"""

from __future__ import annotations

import pickletools
from typing import Any

PLAIN_OPCODES = frozenset(
    (
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "MEMOIZE",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_LIST",
        "LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
    )
)
ACTIVE = ("active_allocated", "active_pending_free")
STATES = (*ACTIVE, "inactive")


class ViewerError(Exception):
    """The viewer stops here, or would draw something wrong."""


def check_opcodes(data: bytes) -> set[str]:
    """Returns the opcodes of a pickle; raises for those that the viewer does not know."""
    names = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in PLAIN_OPCODES:
            raise ViewerError(f"unknown opcode {opcode.name}")
        if opcode.name == "PROTO" and argument not in (2, 3, 4):
            raise ViewerError(f"unhandled version {argument}")
        if opcode.name == "LONG1" and not -(2**63) <= int(argument or 0) < 2**63:
            raise ViewerError(f"an integer without a double: {argument}")
        names.add(opcode.name)
    return names


def view(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Draws every device; returns for each the bytes of all steps and the final bytes."""
    traces = snapshot["device_traces"]
    for segment in snapshot["segments"]:
        if not 0 <= segment["device"] < len(traces):
            raise ViewerError(f"no trace for device {segment['device']}")
        locate(segment)
    return [view_device(snapshot, device) for device in range(len(traces))]


def locate(segment: dict[str, Any]) -> None:
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] not in STATES:
            raise ViewerError(f"unknown state {block['state']}")
        if block.setdefault("address", address) != address:
            raise ViewerError(f"block at {block['address']:#x} is drawn at {address:#x}")
        address += block["size"]
    if address != segment["address"] + segment["total_size"]:
        raise ViewerError(f"the blocks of {segment['address']:#x} do not fill it")


def view_device(snapshot: dict[str, Any], device: int) -> dict[str, Any]:
    segments = [each for each in snapshot["segments"] if each["device"] == device]
    events = merge_frees(snapshot["device_traces"][device])
    sizes = follow_blocks(events, segments)
    rewind(events, segments)
    return {"sizes": sizes, "reserved": sum(each["total_size"] for each in segments)}


def merge_frees(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes one event of a request to free and its completion, if they follow each other."""
    events: list[dict[str, Any]] = []
    for entry in trace:
        event = {key: entry[key] for key in ("action", "size", "stream")}
        event["addr"] = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
        previous = events[-1] if events else None
        if (
            event["action"] == "free_completed"
            and previous is not None
            and (previous["action"], previous["addr"]) == ("free_requested", event["addr"])
        ):
            previous["action"] = "free"
            continue
        events.append(event)
    return events


def follow_blocks(events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[int]:
    """Returns the bytes in use at every step; the last are those of the segments."""
    changes = []
    live: dict[int, int] = {}
    before = 0
    for event in events:
        if event["action"] == "alloc":
            if event["addr"] in live:
                raise ViewerError(f"allocated twice: {event['addr']:#x}")
            live[event["addr"]] = event["size"]
            changes.append(event["size"])
        elif event["action"] in ("free", "free_completed"):
            if event["addr"] in live:
                if live.pop(event["addr"]) != event["size"]:
                    raise ViewerError(f"freed with another size: {event['addr']:#x}")
            else:
                before += event["size"]
            changes.append(-event["size"])
    active = {
        block["address"]: block["requested_size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] in ACTIVE
    }
    before += sum(size for address, size in active.items() if address not in live)
    if not live.items() <= active.items():
        raise ViewerError(f"allocated in the trace, not in the segments: {live.items() - active}")
    sizes = [before]
    for change in changes:
        sizes.append(sizes[-1] + change)
    if sizes[-1] != sum(active.values()) or min(sizes) < 0:
        raise ViewerError(f"the trace ends with {sizes[-1]}, the segments {sum(active.values())}")
    return sizes


def rewind(events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> None:
    """Undoes all events; at every step each block must lie in a segment."""
    spans = {each["address"]: each["total_size"] for each in segments}
    blocks = {
        block["address"]: block["state"] == "active_pending_free"
        for segment in segments
        for block in segment["blocks"]
        if block["state"] in ACTIVE
    }
    for event in reversed(events):
        undo(event, spans, blocks)
        for address in blocks:
            if not any(start <= address < start + size for start, size in spans.items()):
                raise ViewerError(f"block at {address:#x} lies in no segment")


def undo(event: dict[str, Any], spans: dict[int, int], blocks: dict[int, bool]) -> None:
    action, address = event["action"], event["addr"]
    if action in ("free", "free_completed"):
        if address in blocks:
            raise ViewerError(f"freed while in use: {address:#x}")
        blocks[address] = action == "free_completed"
    elif action == "free_requested":
        if not blocks.get(address, False):
            raise ViewerError(f"not awaiting its end: {address:#x}")
        blocks[address] = False
    elif action == "alloc":
        if blocks.pop(address, None) is None:
            raise ViewerError(f"allocated, but not in use afterwards: {address:#x}")
    elif action == "segment_free":
        spans[address] = event["size"]
    elif action == "segment_alloc":
        if spans.pop(address, None) != event["size"]:
            raise ViewerError(f"reserved, but not there afterwards: {address:#x}")
    elif action not in ("snapshot", "oom"):
        raise ViewerError(f"unknown action {action}")
