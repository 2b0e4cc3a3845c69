"""A profile as text: its totals, then a table of the user's lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracegraph.profiling.graph_times import GraphTimes
from tracegraph.profiling.records import LineProfile, PartProfile

MOST_LINES = 24
# Above this share a node cannot have moved all bytes that it names.
_WHOLE = 1.0


def write_text(profile: GraphTimes) -> str:
    """Returns the report of a profile.

    Args:
        profile: what was measured.
    """
    return "\n".join([*_list_totals(profile), *_list_table(profile.by_line())])


def _list_totals(profile: GraphTimes) -> Iterator[str]:
    yield f"profile of `{profile.name}` on {profile.device}"
    peaks = profile.peaks
    if peaks.memory_rate:
        rates = [f"memory {peaks.memory_rate / 1e12:.2f} TB/s"]
        rates += [f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in peaks.tensor_rates.items()]
        yield f"  at most    {', '.join(rates)}"
    for part in profile.parts:
        if part.kind != "body":
            yield from _list_part(part, profile)
    bodies = [part for part in profile.parts if part.kind == "body"]
    for part in bodies:
        yield (
            f"  {part.title}: one turn has {part.node_count} nodes, critical path "
            f"{len(part.path)} nodes, {part.path_us:.1f} us"
        )
    yield from (f"  note       {note}" for note in profile.notes)


def _list_part(part: PartProfile, profile: GraphTimes) -> Iterator[str]:
    whole_us = part.whole_us or 0.0
    yield f"  {part.title}: {whole_us:.1f} us, {part.node_count} nodes"
    if part.kind == "eager" or not part.path:
        return
    ratio = f", the whole takes {whole_us / part.path_us:.2f} of it" if part.path_us else ""
    nodes = [node for node in profile.nodes if node.part == part.number]
    unknown = sum(node.warm_us is None for node in nodes if node.is_critical)
    least = f", at least: {unknown} of them were not timed" if unknown else ""
    yield f"    critical path  {len(part.path)} nodes, {part.path_us:.1f} us{least}{ratio}"
    if profile.floor_us is not None:
        floor_us = len(part.path) * profile.floor_us
        share = f", {floor_us / part.path_us:.0%} of the path" if part.path_us else ""
        yield (
            f"    chain x floor  {len(part.path)} x {profile.floor_us:.2f} us = "
            f"{floor_us:.1f} us{share}"
        )
    beside = part.node_count - len(part.path)
    yield f"    beside it      {beside} nodes, {part.beside_us:.1f} us"
    nbytes = sum(node.nbytes for node in nodes)
    rate = nbytes / (1e-6 * whole_us) if whole_us else 0.0
    peak = profile.peaks.memory_rate
    share = f", {rate / peak:.0%} of the memory's rate" if peak else ""
    yield f"    bytes named    {nbytes:,}, {rate / 1e9:,.1f} GB/s{share}"
    operations = sum(node.operations for node in nodes)
    if operations:
        yield f"    in matmuls     {operations / 1e9:.2f} GFLOP"
    # A kernel that sets a condition has the time of its branch or loop.
    timed = [node for node in nodes if node.warm_us]
    missing = sum(node.warm_us is None for node in nodes)
    untimed = f", {missing} not timed" if missing else ""
    launches = len({node.measured for node in timed})
    yield f"    measured       {launches} launches for {len(timed)} nodes{untimed}"
    streams = sorted({node.stream for node in nodes})
    if len(streams) > 1:
        yield f"    streams        {', '.join(map(str, streams))}"


def _list_table(lines: Sequence[LineProfile]) -> Iterator[str]:
    yield "  us on path       us  us cold  nodes  on path          bytes  of memory  line"
    for line in lines[:MOST_LINES]:
        where = line.where or "(no line is known)"
        yield f"{_format_numbers(line)}  {where}"
    rest = lines[MOST_LINES:]
    if not rest:
        return
    total = LineProfile(
        "",
        sum(line.node_count for line in rest),
        sum(line.path_count for line in rest),
        sum(line.warm_us for line in rest),
        sum(line.path_us for line in rest),
        sum(line.cold_us or 0.0 for line in rest) or None,
        sum(line.nbytes for line in rest),
    )
    yield f"{_format_numbers(total)}  and {len(rest)} more lines, see by_line()"


def _format_numbers(line: LineProfile) -> str:
    cold = "-" if line.cold_us is None else f"{line.cold_us:.1f}"
    return (
        f"{line.path_us:12.1f} {line.warm_us:8.1f} {cold:>8} {line.node_count:6} "
        f"{line.path_count:8} {line.nbytes:14,} {format_share(line.memory_share):>10}"
    )


def format_share(share: float | None) -> str:
    """Returns a share of the memory's rate; one above all of it only says that less was touched.

    Example:
        >>> format_share(0.405), format_share(1.7), format_share(None)
        ('40%', '>100%', '-')
    """
    if share is None:
        return "-"
    return f"{share:.0%}" if share <= _WHOLE else ">100%"
