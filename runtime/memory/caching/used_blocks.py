"""UsedBlocks: the blocks that users hold, and how they are freed, from finalisers too."""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.block_store import BlockStore
from tracegraph.runtime.memory.caching.pool_router import PoolRouter
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.history import Frames
from tracegraph.runtime.memory.pool_id import PoolId


class _Left(NamedTuple):
    """A pool whose last user may be gone; its free memory is released."""

    pool_id: PoolId


class _Repair(NamedTuple):
    """An interrupt came inside of a call: Note [Interrupts]."""


class _Owner(weakref.ref[object]):
    """An object that gives blocks or uses of pools back when it goes.

    Attributes:
        items: the blocks and pools that it holds when it goes; it may add some until then.
        kept: what must live until it is given back.
        drain: what gives it back at once if the allocator is idle.
    """

    __slots__ = ("drain", "items", "kept")
    items: Sequence[Block | PoolId]
    kept: object
    drain: weakref.ref[object]


_Noted: TypeAlias = Block | PoolId | _Left | _Repair | _Owner

# By their own identity: references to one object are equal.
_owners: dict[int, _Owner] = {}


class UsedBlocks:
    """Finds and frees the blocks of an allocator, and ends uses of its private pools.

    Note [Finalisers]. A finaliser may run inside any call, also inside the allocator's own, in the
    same thread. So it must not change anything there and then: it calls `free_later` or
    `release_pool_later`, which only note it, unless the allocator is idle at that moment. The
    next call of the allocator does what was noted, in its order. Each rare call is
    ``with lock, used``, both spelled out: the lock is entered and left in C, while an interrupt
    may come inside of an `__enter__` in Python that has taken it, and leave it held.

    An interrupt may come in a finaliser, too. Python then drops what the finaliser had still to do,
    and `weakref.finalize` is one in Python. So the callback of an owner is `append` of the queue
    itself, in which no interrupt can come; only the attempt to do it at once may be lost.

    Args:
        store: all blocks of the allocator.
        uses: the freed ones that other streams still read.
        pools: the private pools.
        put_back: called with each block that no stream reads any more, and the call stack of its
            free; neither this nor the next two refer to the allocator.
        release_pool: called with each pool whose last user a finaliser was.
        repair: called after an interrupt.

    Attributes:
        noted: what finalisers have returned. Where there is anything, `drain` is due.
    """

    def __init__(
        self,
        store: BlockStore,
        uses: StreamUses,
        pools: PoolRouter,
        put_back: Callable[[Block, Frames | None], None],
        release_pool: Callable[[Pool, Frames | None], None],
        repair: Callable[[], None],
    ) -> None:
        self._store, self._uses, self._pools = store, uses, pools
        self._put_back, self._release_pool, self._repair = put_back, release_pool, repair
        self._active = store.active
        self._lost: set[Block] = set()
        self.noted: collections.deque[_Noted] = collections.deque()
        self._begun: _Noted | None = None

    def free(self, block: Block, frames: Frames | None) -> None:
        """Frees a block, under the allocator's lock.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        if not block.is_allocated or self._active.get(block.address) is not block:
            if block not in self._lost:
                raise _make_free_error(block, self._store.device)
            self._lost.remove(block)
            return
        self._store.mark_freed(block, frames)
        if block.stream_uses:
            self._uses.defer(block)
        else:
            self._put_back(block, frames)

    def lose(self, blocks: tuple[Block, ...]) -> None:
        """Ignores later frees of some blocks by users that have lost them."""
        self._lost.update(blocks)

    def abandon(self, pool_id: PoolId, before: frozenset[Block]) -> None:
        """Ends a change of a pool that an exception has cut short.

        Args:
            pool_id: of the pool.
            before: its live blocks before the change. Their owners lose those that are gone; those
                that came since have no owner.
        """
        blocks = frozenset(self.list_live(pool_id))
        self.lose(tuple(before - blocks))
        self.noted.extend(blocks - before)

    def list_live(self, pool_id: PoolId) -> list[Block]:
        """Returns the blocks of a pool that users hold."""
        blocks = self._active.values()
        return [each for each in blocks if each.is_allocated and each.size_class.pool_id == pool_id]

    def find(self, address: int) -> Block:
        """Returns the block in use that begins at an address.

        Raises:
            TracegraphError: there is none.
        """
        with self._store.lock, self:
            block = self._active.get(address)
            if block is None or not block.is_allocated:
                raise _make_address_error(address, self._store.device)
            return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses a block: after `free`, reuse waits for that stream.

        Raises:
            TracegraphError: the block is not in use in this allocator.
        """
        with self._store.lock:
            if not block.is_allocated or self._active.get(block.address) is not block:
                raise _make_stream_error(block, stream, self._store.device)
            self._uses.record(block, stream)

    def give_back_with(self, owner: object, items: Sequence[Block | PoolId], kept: object) -> None:
        """Frees blocks, and ends uses of pools, as soon as possible after an object is gone.

        Args:
            owner: the object.
            items: the blocks and pools that it holds when it goes; it may add some until then.
            kept: what keeps the allocator, and all else that must live until then.
        """
        # Of two callbacks the one made last comes first: it is noted, then done.
        # At interpreter exit the process frees all memory by itself.
        drain = weakref.ref(owner, functools.partial(_drain, self, kept, sys.is_finalizing))
        reference = _Owner(owner, self.noted.append)
        reference.items, reference.kept, reference.drain = items, kept, drain
        _owners[id(reference)] = reference

    def free_later(self, block: Block) -> None:
        """Frees a block as soon as possible. For finalisers: see Note [Finalisers]."""
        self.noted.append(block)
        self.drain_if_idle()

    def release_pool_later(self, pool_id: PoolId) -> None:
        """Counts one user of a pool less as soon as possible, and releases what it leaves."""
        self.noted.append(pool_id)
        self.drain_if_idle()

    def drain(self) -> None:
        """Does what finalisers have noted, under the allocator's lock.

        Nothing leaves the queue before it is done, for an interrupt may come in between.
        """
        # A provider, or a finaliser inside of it, may call the allocator in the middle of one: the
        # call that began it goes on with the rest.
        while self.noted and self.noted[0] is not self._begun:
            noted = self._begun = self.noted[0]
            try:
                self._do(noted)
            except TracegraphError:
                self._begun = None
                self.noted.popleft()
                raise
            self._begun = None
            if not isinstance(noted, PoolId):
                self.noted.popleft()

    def __enter__(self) -> None:
        """Begins a call, under the allocator's lock; an interrupt in it is repaired."""
        try:
            self.drain()
        except BaseException as error:
            self.note_interrupt(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends the call."""
        if error is not None:
            self.note_interrupt(error)

    def note_interrupt(self, error: BaseException) -> None:
        """Has the next call repair what an exception may have left half done.

        Under the allocator's lock. Errors of ours leave everything whole.
        """
        if isinstance(error, TracegraphError):
            return
        self._begun = None
        head = self.noted[0] if self.noted else None
        if isinstance(head, Block) and not head.is_allocated:
            # Its free has begun, and the repair ends it.
            self.noted.popleft()
        self.noted.appendleft(_Repair())

    def free_unreturned(self, block: Block | None) -> None:
        """Frees a block that an interrupt has kept from being returned; any other stays."""
        if block is not None and block.is_allocated:
            self.free_later(block)

    def _do(self, noted: _Noted) -> None:
        match noted:
            case Block():
                self.free(noted, None)
            case _Left():
                self._release_if_freeable(noted.pool_id)
            case _Repair():
                self._repair()
            case _Owner():
                # Without a call in between: Note [Interrupts].
                items, noted.items = noted.items, ()
                self.noted.extend(items)
                _owners.pop(id(noted), None)
            case _:
                pool = self._pools.find_used(noted)
                # What is noted before it may be a block of this pool.
                self.noted.append(_Left(noted))
                # Without another call in between: Note [Interrupts].
                pool.use_count -= 1
                self.noted.popleft()

    def _release_if_freeable(self, pool_id: PoolId) -> None:
        history = self._store.history
        frames = history.capture_free_frames() if history.is_enabled else None
        pool = self._store.private.get(pool_id)
        if pool is not None and not pool.use_count:
            self._release_pool(pool, frames)

    def drain_if_idle(self) -> None:
        """Does what finalisers have noted, unless a call of the allocator is under way."""
        lock = self._store.lock
        # Owned by this thread: the finaliser runs inside a call of it.
        if lock._is_owned():  # type: ignore[attr-defined]
            return
        try:
            if not lock.acquire(blocking=False):
                return
            self.drain()
            lock.release()
        except BaseException as error:
            # No `finally`: an interrupt may come before and after each of these calls.
            if lock._is_owned():  # type: ignore[attr-defined]
                self.note_interrupt(error)
                lock.release()
            raise


def _drain(used: UsedBlocks, _kept: object, is_exiting: Callable[[], bool], _: object) -> None:
    if not is_exiting():
        used.drain_if_idle()


def _make_free_error(block: Block, device: int) -> TracegraphError:
    """Returns the error of a block that is not in use."""
    return TracegraphError(
        f"cannot free the block at {block.address:#x}: it is not in use in this allocator",
        where=f"caching allocator of device {device}, {block!r}",
        why="it was freed before or belongs to another allocator; its bytes may be in use",
        fix="free each block once, in the allocator that allocated it",
        anchor="pool",
    )


def _make_stream_error(block: Block, stream: int, device: int) -> TracegraphError:
    """Returns the error of a stream that is named for a block which is not in use."""
    return TracegraphError(
        f"cannot record stream {stream} on the block at {block.address:#x}: it is not in use",
        where=f"caching allocator of device {device}, {block!r}",
        why="after it was freed, its bytes may be in use by another owner",
        fix="record the stream before the block is freed",
        anchor="pool",
    )


def _make_address_error(address: int, device: int) -> TracegraphError:
    """Returns the error of an address at which no block begins."""
    return TracegraphError(
        f"no block of this allocator is in use at {address:#x}",
        where=f"caching allocator of device {device}",
        why="it was freed before, or was not allocated here, or points into the middle of a block",
        fix="pass the address that the allocation returned, once",
        anchor="pool",
    )
