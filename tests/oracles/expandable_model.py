"""The slow model of the caching allocator, with segments that grow page by page."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from tests.fakes.bytes_provider import Call
from tests.oracles.allocator_model import MIB, AllocatorModel
from tests.oracles.model_records import (
    ModelSegment,
    ModelStatistics,
    Piece,
    PieceState,
    count_used,
)
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import PoolId


@dataclasses.dataclass(eq=False)
class ExpandablePieces(ModelSegment):
    """A range of addresses; a piece of it is also "unmapped". Never returned as a segment."""

    page_bytes: int = 0

    @property
    def is_free(self) -> bool:
        return False

    @property
    def mapped(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.state != "unmapped"]

    @property
    def mapped_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.mapped)


class ExpandableStatistics(ModelStatistics):
    """Expandable segments count by what is mapped, and neither as segments nor as split."""

    def sum_up(self, segments: list[ModelSegment]) -> tuple[int, ...]:
        usual = super().sum_up([one for one in segments if not isinstance(one, ExpandablePieces)])
        own = [segment for segment in segments if isinstance(segment, ExpandablePieces)]
        mapped = [piece for segment in own for piece in segment.mapped]
        live, live_bytes, active, active_bytes, requested = count_used(mapped)
        reserved = sum(piece.nbytes for piece in mapped)
        expandable = (live, live_bytes, 0, reserved, active, active_bytes, 0, 0, requested)
        return tuple(map(operator.add, usual, expandable))

    def count_reserved(self, segment: ModelSegment) -> int:
        if isinstance(segment, ExpandablePieces):
            return segment.mapped_bytes
        return segment.nbytes

    def is_whole(self, segment: ModelSegment) -> bool:
        return not isinstance(segment, ExpandablePieces)


class ExpandableModel(AllocatorModel):
    """An AllocatorModel where all requests but arenas are served by expandable segments.

    Attributes:
        taken_away: calls that unmap memory or release a range, since the last comparison.
    """

    def __init__(self, config: AllocatorConfig, total_bytes: int) -> None:
        super().__init__(config, total_bytes)
        self.total_bytes = total_bytes
        self.statistics = ExpandableStatistics(config.max_split_bytes)
        self.taken_away: list[Call] = []

    def search(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        if kind == "exact":
            return super().search(size, stream, pool, kind)
        fitting = [one for one in self.free_pieces(pool, kind, stream) if one.nbytes >= size]
        fitting.sort(key=lambda one: (one.nbytes, one.address))
        if not fitting:
            return None
        best = fitting[0]
        for other in fitting[1:]:
            if self.find_reach(other) >= self.find_reach(best):
                break
            best = other
        split_limit = self.config.max_split_bytes
        if split_limit is None:
            return best
        if size < split_limit:
            return best if best.nbytes < split_limit else None
        most = size + self.config.max_non_split_rounding_bytes
        return best if best.nbytes < most else None

    def find_reach(self, piece: Piece) -> int:
        """Returns where a piece could grow to, as a size."""
        pieces = piece.segment.pieces
        behind = pieces[pieces.index(piece) + 1 :]
        has_room = bool(behind) and behind[0].state == "unmapped"
        return piece.nbytes + (behind[0].nbytes if has_room else 0)

    def must_split(self, piece: Piece, size: int) -> bool:
        pool = piece.segment.pool
        can_split = pool is None or self.pools[pool].can_split
        return can_split and piece.nbytes - size >= 512

    def reserve(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        wanted = 2 * MIB if size <= MIB else self.config.large_segment_bytes
        if size >= 10 * MIB:
            wanted = -(-size // (2 * MIB)) * 2 * MIB
        wanted = size if kind == "exact" else wanted
        if self.limit_bytes is not None and self.reserved_bytes + wanted > self.limit_bytes:
            return None
        if kind != "exact":
            return self.grow_segment(size, stream, pool, kind)
        call = next(self.calls)
        assert (call.name, call.nbytes) == ("allocate", wanted), call
        if call.address is None:
            return None
        return self.add_segment(call.address, wanted, stream, pool, kind)

    @property
    def reserved_bytes(self) -> int:
        statistics: Any = self.statistics
        return sum(statistics.count_reserved(segment) for segment in self.segments)

    def grow_segment(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        chain = self.find_room(size, stream, pool, kind) or self.open_range(
            size, stream, pool, kind
        )
        if chain is None:
            return None
        segment, start = chain
        while True:
            piece = next(one for one in segment.pieces if one.address == start)
            if piece.state == "free" and piece.nbytes >= size:
                return piece
            have = piece.nbytes if piece.state == "free" else 0
            if not self.map(segment, start + have, size - have):
                self.drop_if_empty(segment)
                return None

    def find_room(
        self, size: int, stream: int, pool: PoolId | None, kind: str
    ) -> tuple[ExpandablePieces, int] | None:
        mine = [
            segment
            for segment in self.segments
            if isinstance(segment, ExpandablePieces)
            and (segment.stream, segment.pool, segment.kind) == (stream, pool, kind)
        ]
        for segment in sorted(mine, key=lambda one: one.address):
            for index, piece in enumerate(segment.pieces):
                if piece.state != "unmapped":
                    continue
                first = index - (index > 0 and segment.pieces[index - 1].state == "free")
                room = 0
                for other in segment.pieces[first:]:
                    if other.state not in ("free", "unmapped"):
                        break
                    room += other.nbytes
                if room >= size:
                    return segment, segment.pieces[first].address
        return None

    def open_range(
        self, size: int, stream: int, pool: PoolId | None, kind: str
    ) -> tuple[ExpandablePieces, int] | None:
        page_bytes = 2 * MIB if kind == "small" else self.config.large_segment_bytes
        range_bytes = -(-self.total_bytes * 9 // 8 // page_bytes) * page_bytes
        if size > range_bytes:
            return None
        call = next(self.calls)
        assert (call.name, call.nbytes) == ("reserve", range_bytes), call
        assert call.address is not None
        segment = ExpandablePieces(call.address, range_bytes, stream, pool, kind, [], page_bytes)
        segment.pieces.append(Piece(call.address, range_bytes, segment, state="unmapped"))
        self.segments.append(segment)
        return segment, call.address

    def map(self, segment: ExpandablePieces, address: int, wanted: int) -> bool:
        """Maps pages at the start of an unmapped piece, as many as are wanted or as it has."""
        piece = next(one for one in segment.pieces if one.address == address)
        assert piece.state == "unmapped"
        pages = -(-min(wanted, piece.nbytes) // segment.page_bytes)
        for index in range(pages):
            call = next(self.calls)
            assert (call.name, call.nbytes) == ("map", segment.page_bytes), call
            if call.address is None:
                if index:
                    self.taken_away.append(Call("unmap", index * segment.page_bytes, address))
                return False
            assert call.address == address + index * segment.page_bytes
        self.change_state(segment, address, pages * segment.page_bytes, "free")
        self.counts["num_device_alloc"] += 1
        self.observe()
        return True

    def change_state(
        self, segment: ExpandablePieces, address: int, nbytes: int, state: str
    ) -> None:
        """Cuts a piece at both ends of a part, which changes; then merges what is alike."""
        index = next(i for i, one in enumerate(segment.pieces) if one.address <= address < one.end)
        piece = segment.pieces[index]
        borders = [(piece.address, piece.state), (address, state), (address + nbytes, piece.state)]
        ends = [address, address + nbytes, piece.end]
        segment.pieces[index : index + 1] = [
            Piece(start, end - start, segment, state=each)
            for (start, each), end in zip(borders, ends, strict=True)
            if end > start
        ]
        merged: list[Piece] = []
        for one in segment.pieces:
            if merged and merged[-1].state == one.state and one.state in ("free", "unmapped"):
                merged[-1].nbytes += one.nbytes
            else:
                merged.append(one)
        segment.pieces[:] = merged

    def release_free(self, pool: PoolId | None) -> None:
        super().release_free(pool)
        for segment in tuple(self.segments):
            if isinstance(segment, ExpandablePieces) and segment.pool == pool:
                self.unmap_free_pages(segment)

    def unmap_free_pages(self, segment: ExpandablePieces) -> None:
        page_bytes = segment.page_bytes
        for piece in [one for one in segment.pieces if one.state == "free"]:
            first = -(-(piece.address - segment.address) // page_bytes)
            last = (piece.end - segment.address) // page_bytes
            if last <= first:
                continue
            address, nbytes = segment.address + first * page_bytes, (last - first) * page_bytes
            self.change_state(segment, address, nbytes, "unmapped")
            self.taken_away.append(Call("unmap", nbytes, address))
            self.counts["num_device_free"] += 1
            self.observe()
        self.drop_if_empty(segment)

    def drop_if_empty(self, segment: ExpandablePieces) -> None:
        if not segment.mapped:
            self.segments.remove(segment)
            nbytes = segment.pieces[0].nbytes
            self.taken_away.append(Call("release", nbytes, segment.address))

    def release_oversize(self, size: int, stream: int, pool: PoolId | None, kind: str) -> bool:
        return kind == "exact" and super().release_oversize(size, stream, pool, kind)

    def cut(self, segment: ModelSegment, states: list[PieceState]) -> list[Piece]:
        if not isinstance(segment, ExpandablePieces):
            return super().cut(segment, states)
        live = []
        for run in [one for one in segment.pieces if one.state == "free"]:
            inside = [state for state in states if run.address <= state.address < run.end]
            live += self.cut_run(segment, run.address, run.end, inside) if inside else []
        return live

    def cut_run(
        self, segment: ExpandablePieces, start: int, end: int, states: list[PieceState]
    ) -> list[Piece]:
        live, gaps = [], []
        wanted = {state.address: state for state in states}
        while start < end:
            rest = next(one for one in segment.pieces if one.address == start)
            state = wanted.get(start)
            border = min([*[address for address in wanted if address > start], end])
            nbytes = state.nbytes if state else border - start
            requested = state.requested if state else nbytes
            piece = self.hand_out(rest, nbytes, requested, has_rest=rest.nbytes > nbytes)
            (live if state else gaps).append(piece)
            start = piece.end
        for piece in gaps:
            self.free(piece)
        return live
