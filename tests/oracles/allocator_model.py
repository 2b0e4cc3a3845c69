"""A slow, obvious model of the caching allocator: it looks at everything, each time anew.

No free list, no counters that are kept up to date: a segment is a list of pieces, the best fit is
found by trying all of them, and every statistic is a sum over all pieces. Only the addresses of new
segments come from outside, from the log of the provider, whose calls the model predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.fakes.bytes_provider import Call
from tests.oracles.model_records import (
    ModelPool,
    ModelSegment,
    ModelStatistics,
    Piece,
    PieceState,
)
from tests.oracles.model_streams import ModelStreams
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import PoolId

MIB = 1 << 20
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class AllocatorModel(ModelStreams):
    """Predicts each answer, each provider call and each statistic of a `CachingAllocator`.

    Args:
        config: options; those about expandable segments are not modelled.
        total_bytes: of the device, for the fraction.
    """

    def __init__(self, config: AllocatorConfig, total_bytes: int) -> None:
        super().__init__()
        self.config = config
        fraction = config.per_process_memory_fraction
        self.limit_bytes = int(fraction * total_bytes) if fraction < 1 else None
        self.segments: list[ModelSegment] = []
        self.pools: dict[PoolId, ModelPool] = {}
        self.routes: dict[PoolId, Callable[[int], bool]] = {}
        self.searches: dict[tuple[PoolId | None, str], int] = {}
        self.statistics = ModelStatistics(config.max_split_bytes)
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.calls: Iterator[Call] = iter(())
        self.released: list[int] = []

    # Operations ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int) -> Piece | None:
        """Returns the piece that an allocation gives, or None where memory has run out."""
        self.settle(stream)
        size = self.round_size(nbytes)
        pool = self.find_route(stream)
        kind = "small" if size <= MIB else "large"
        piece = self.search(size, stream, pool, kind) or self.grow(size, stream, pool, kind)
        if piece is None and pool is None:
            piece = self.search_oom_pools(size, stream, kind)
        if piece is None:
            self.counts["num_ooms"] += 1
            return None
        return self.hand_out(piece, size, nbytes, self.must_split(piece, size))

    def allocate_exact(self, nbytes: int, pool: PoolId, stream: int) -> Piece | None:
        """Returns the piece that is an arena: a whole segment of its own kind."""
        self.settle(stream)
        step = 512 if nbytes <= MIB else 32 << 10 if nbytes <= 128 * MIB else 2 * MIB
        size = -(-max(nbytes, 1) // step) * step
        piece = self.search(size, stream, pool, "exact")
        if piece is None:
            # Arenas that do not fit are not kept beside a new one.
            arenas = [one for one in self.segments if (one.pool, one.kind) == (pool, "exact")]
            for arena in [one for one in arenas if one.is_free]:
                self.release(arena)
            piece = self.grow(size, stream, pool, "exact")
        if piece is None:
            self.counts["num_ooms"] += 1
            return None
        return self.hand_out(piece, size, nbytes, has_rest=False)

    def free(self, piece: Piece) -> None:
        piece.state = "pending"
        self.observe()
        if piece.uses:
            self.defer(piece)
        else:
            self.put_back(piece)

    def empty_cache(self, pool: PoolId | None = None) -> None:
        self.release_cached(pool, keeps_default=bool(self.routes))

    def create_or_increment_pool(
        self, pool: PoolId, *, can_split: bool = True, is_for_oom: bool = False
    ) -> None:
        if pool in self.pools:
            self.pools[pool].use_count += 1
        else:
            self.pools[pool] = ModelPool(1, can_split, is_for_oom)
            self.statistics.add_pool(pool)

    def release_pool(self, pool: PoolId) -> None:
        self.pools[pool].use_count -= 1

    def checkpoint(self, pool: PoolId) -> list[PieceState]:
        mine = [piece for piece in self.pieces() if piece.segment.pool == pool]
        live = [piece for piece in mine if piece.state == "live"]
        states = [PieceState(one.address, one.nbytes, one.requested, one.segment) for one in live]
        return sorted(states, key=lambda state: state.address)

    def restore(self, pool: PoolId, states: list[PieceState]) -> list[Piece]:
        """Frees all of the pool, then cuts its segments as they were; returns the live pieces."""
        mine = [piece for piece in self.pieces() if piece.segment.pool == pool]
        for piece in sorted(mine, key=lambda one: one.address):
            if piece.state == "live":
                self.free(piece)
        if any(piece.state == "pending" for piece in mine):
            self.synchronize(pool)
        return [
            piece
            for segment in dict.fromkeys(state.segment for state in states)
            for piece in self.cut(segment, [one for one in states if one.segment is segment])
        ]

    def cut(self, segment: ModelSegment, states: list[PieceState]) -> list[Piece]:
        """Allocates all of a free segment piece by piece, then frees what was not live."""
        assert segment.is_free
        live, gaps = [], []
        wanted = {state.address: state for state in states}
        while segment.pieces[-1].state == "free":
            rest = segment.pieces[-1]
            state = wanted.get(rest.address)
            later = [address for address in wanted if address > rest.address]
            end = min([*later, rest.end])
            nbytes = state.nbytes if state else end - rest.address
            requested = state.requested if state else nbytes
            piece = self.hand_out(rest, nbytes, requested, has_rest=rest.nbytes > nbytes)
            (live if state else gaps).append(piece)
        for piece in gaps:
            self.free(piece)
        return live

    # Parts --------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        return (piece for segment in self.segments for piece in segment.pieces)

    def settle(self, stream: int) -> None:
        """Puts back what is not used any more, as each allocation does first."""
        if not self.is_busy:
            self.poll()
        elif self.config.graph_capture_record_stream_reuse:
            self.reuse_joined(stream)

    def find_route(self, stream: int) -> PoolId | None:
        # The one that was begun last counts.
        fitting = [pool for pool, matches in self.routes.items() if matches(stream)]
        return fitting[-1] if fitting else None

    def round_size(self, nbytes: int) -> int:
        divisions = self.config.find_divisions(nbytes)
        if divisions > 1 and nbytes > 512 * divisions:
            step = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // step) * step
        return max(512, -(-nbytes // 512) * 512)

    def search(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        if self.limit_bytes is not None and self.config.garbage_collection_threshold > 0:
            self.searches[pool, kind] = self.searches.get((pool, kind), 0) + 1
        fitting = [one for one in self.free_pieces(pool, kind, stream) if one.nbytes >= size]
        if not fitting:
            return None
        best = min(fitting, key=lambda one: (one.nbytes, one.address))
        split_limit = self.config.max_split_bytes
        if split_limit is None:
            return best
        if size < split_limit:
            return best if best.nbytes < split_limit else None
        most = size + self.config.max_non_split_rounding_bytes
        return best if best.nbytes < most else None

    def free_pieces(self, pool: PoolId | None, kind: str, stream: int) -> list[Piece]:
        return [
            piece
            for segment in self.segments
            if segment.pool == pool and segment.kind == kind and segment.stream == stream
            for piece in segment.pieces
            if piece.state == "free"
        ]

    def grow(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        if self.limit_bytes is not None and self.config.garbage_collection_threshold > 0:
            self.collect_garbage()
        piece = self.reserve(size, stream, pool, kind)
        if piece is None and self.release_oversize(size, stream, pool, kind):
            piece = self.reserve(size, stream, pool, kind)
        if piece is None and not self.is_busy:
            self.release_cached(None)
            self.counts["num_alloc_retries"] += 1
            piece = self.reserve(size, stream, pool, kind)
        return piece

    def reserve(self, size: int, stream: int, pool: PoolId | None, kind: str) -> Piece | None:
        wanted = 2 * MIB if size <= MIB else self.config.large_segment_bytes
        if size >= 10 * MIB:
            wanted = -(-size // (2 * MIB)) * 2 * MIB
        wanted = size if kind == "exact" else wanted
        reserved = sum(segment.nbytes for segment in self.segments)
        if self.limit_bytes is not None and reserved + wanted > self.limit_bytes:
            return None
        call = next(self.calls)
        assert (call.name, call.nbytes) == ("allocate", wanted), call
        if call.address is None:
            return None
        return self.add_segment(call.address, wanted, stream, pool, kind)

    def add_segment(
        self, address: int, nbytes: int, stream: int, pool: PoolId | None, kind: str
    ) -> Piece:
        segment = ModelSegment(address, nbytes, stream, pool, kind)
        segment.pieces.append(Piece(address, nbytes, segment))
        self.segments.append(segment)
        self.counts["num_device_alloc"] += 1
        self.observe()
        return segment.pieces[0]

    def must_split(self, piece: Piece, size: int) -> bool:
        pool = piece.segment.pool
        if pool is not None and not self.pools[pool].can_split:
            return False
        assert piece.segment.kind != "exact"
        rest = piece.nbytes - size
        if piece.segment.kind == "small":
            return rest >= 512
        split_limit = self.config.max_split_bytes
        return rest > MIB and (split_limit is None or size < split_limit)

    def hand_out(self, piece: Piece, size: int, requested: int, has_rest: bool) -> Piece:
        if has_rest:
            siblings = piece.segment.pieces
            rest = Piece(piece.address + size, piece.nbytes - size, piece.segment)
            rest.free_since = self.count_searches(piece.segment)
            siblings.insert(siblings.index(piece) + 1, rest)
            piece.nbytes = size
        piece.state, piece.requested = "live", requested
        piece.uses, piece.uses_in_captures = set(), set()
        self.observe()
        return piece

    def put_back(self, piece: Piece) -> None:
        siblings = piece.segment.pieces
        piece.state, piece.requested, piece.marker = "free", 0, None
        index = siblings.index(piece)
        for other in siblings[index + 1 : index + 2] + siblings[max(index - 1, 0) : index]:
            if other.state == "free":
                piece.address = min(piece.address, other.address)
                piece.nbytes += other.nbytes
                siblings.remove(other)
        piece.free_since = self.count_searches(piece.segment)
        self.observe()

    def count_searches(self, segment: ModelSegment) -> int:
        return self.searches.get((segment.pool, segment.kind), 0)

    # Reclaiming ---------------------------------------------------------------------------------

    def collect_garbage(self) -> None:
        assert self.limit_bytes is not None
        threshold = int(self.config.garbage_collection_threshold * self.limit_bytes)
        target = sum(segment.nbytes for segment in self.segments) - threshold
        searches = self.searches.get((None, "large"), 0)
        while target > 0:
            ages = {
                segment: searches - segment.pieces[0].free_since
                for segment in self.segments
                if (segment.pool, segment.kind) == (None, "large") and segment.is_free
            }
            if not ages:
                return
            mean = sum(ages.values()) / len(ages)
            for segment in [one for one, age in ages.items() if age >= mean]:
                target -= segment.nbytes
                self.release(segment)

    def release_oversize(self, size: int, stream: int, pool: PoolId | None, kind: str) -> bool:
        split_limit = self.config.max_split_bytes
        if split_limit is None:
            return False
        wanted = max(size, split_limit)
        mine = self.free_pieces(pool, kind, stream)
        mine.sort(key=lambda one: (one.nbytes, one.address))
        fitting = [one for one in mine if one.nbytes >= wanted]
        if fitting:
            self.release(fitting[0].segment)
            return True
        released = 0
        for piece in reversed(mine):
            if released >= wanted or piece.nbytes < split_limit:
                break
            released += piece.nbytes
            self.release(piece.segment)
        return released >= wanted

    def release_cached(self, pool: PoolId | None, *, keeps_default: bool = False) -> None:
        if pool is None and not self.is_busy and not keeps_default:
            self.counts["num_sync_all_streams"] += 1
            self.synchronize(None)
            self.release_free(None)
        for freeable in [one for one, state in self.pools.items() if state.use_count == 0]:
            if pool is not None and freeable != pool:
                continue
            if pool is not None and not self.is_busy:
                self.counts["num_sync_all_streams"] += 1
                self.synchronize(pool)
            self.release_free(freeable)
            if not any(segment.pool == freeable for segment in self.segments):
                del self.pools[freeable]
                self.statistics.drop_pool(freeable)

    def release_free(self, pool: PoolId | None) -> None:
        for segment in [one for one in self.segments if one.pool == pool and one.is_free]:
            self.release(segment)

    def release(self, segment: ModelSegment) -> None:
        assert segment.is_free
        self.segments.remove(segment)
        self.released.append(segment.address)
        self.counts["num_device_free"] += 1
        self.observe()

    def search_oom_pools(self, size: int, stream: int, kind: str) -> Piece | None:
        for pool, state in self.pools.items():
            if state.is_for_oom and state.use_count > 0:
                piece = self.search(size, stream, pool, kind)
                if piece is not None:
                    return piece
        return None

    def observe(self) -> None:
        """Lets the statistics look at all pieces."""
        self.statistics.observe(self.segments)
