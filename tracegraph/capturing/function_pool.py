"""FunctionPool: the private pool of a captured function, joined when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tracegraph.runtime.arrays.state_home import StateHomes
from tracegraph.runtime.device import Device
from tracegraph.runtime.memory.pool_id import PoolId, new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool, find_pool, join_pool


class FunctionPool:
    """The private pool of one captured function: one on each device that it is called on.

    A function that was never captured, or whose tracing failed, is no user of a pool.

    Args:
        pool_id: of the pool to share; None for one of its own.

    Attributes:
        homes: of the state that graphs of the function may share.
    """

    def __init__(self, pool_id: PoolId | None) -> None:
        self.homes = StateHomes()
        self._pool_id = pool_id
        # Held from now on, even if the captures that share it go.
        self._shared = find_pool(pool_id) if pool_id is not None else None
        # One per device that the function is called on; a pool with an id is of one device. Graphs
        # over several devices have others, by their place and the device.
        self._joined: dict[Any, PrivatePool] = {}
        self._is_shared = pool_id is not None
        # Signatures may be captured at the same time.
        self._lock = threading.Lock()

    def join(self, device: Device) -> PrivatePool:
        """Returns the pool of a device; the first call joins it.

        Args:
            device: that the graphs are on.

        Raises:
            TracegraphError: the pool is one of another device, or has lost its last user.
        """
        with self._lock:
            joined = self._joined.get(device.jax_device)
            if joined is None:
                pool_id = self._pool_id if self._pool_id is not None else new_pool_id()
                joined = self._joined[device.jax_device] = join_pool(pool_id, device.allocator)
            return joined

    def join_all(self, devices: Sequence[Device], place: Any) -> list[PrivatePool]:
        """Returns a pool of each of several devices, for graphs that they replay together.

        Their graphs have one lock, that of the first pool, so no other graph may be in these pools.

        Args:
            devices: in order.
            place: the sharding of what each has whole.
        """
        with self._lock:
            return [self._join_for(place, device) for device in devices]

    def _join_for(self, place: Any, device: Device) -> PrivatePool:
        key = place, device.jax_device
        if key not in self._joined:
            self._joined[key] = join_pool(new_pool_id(), device.allocator)
        return self._joined[key]

    def share(self, device: Device) -> PoolId:
        """Returns the id for other functions, which may join from now on.

        Args:
            device: whose pool it is to be; one of another device counts where it has none yet.
        """
        self._is_shared = True
        joined = dict(self._joined)
        pool = joined.get(device.jax_device) or next(iter(joined.values()), None)
        return (pool or self.join(device)).pool_id

    def count_bytes(self) -> int:
        """Returns how many bytes the pools of all devices hold."""
        return sum(pool.reserved_bytes for pool in dict(self._joined).values())

    def leave_unshared(self) -> None:
        """Drops a pool that no other function can have joined."""
        if not self._is_shared:
            self.leave()

    def leave(self) -> None:
        """Drops the pool; the next call of `join` joins it again, or a new one."""
        self._joined = {}
