"""PlanCache: the plans of a library that were used last, and the plans of graphs.

Note [Plans]
    A plan holds tables in device memory that the kernels of a captured call read at every replay.
    So the cache does not own plans: it and each graph hold them, and a plan is freed when the last
    of these lets it go. Taking it out of the cache, by `clear` or because others were used since,
    frees it only if no graph is left that holds it; such a plan is not counted by `size`.

    Freeing a plan is a call of its library, and a plan may go wherever Python drops the last name
    of a graph, also inside of a garbage collection while a stream is being captured, where the
    call would break the capture. So a finaliser only notes what is to be freed; it is freed when
    the cache is used next.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from tracegraph.runtime.errors import ConfigError

# That of PyTorch with CUDA 10 and newer.
DEFAULT_MAX_SIZE = 4096

Plan = TypeVar("Plan")


class PlanCache(Generic[Plan]):
    """Keeps the plans that were used last. May be used from any thread.

    Example:
        >>> cache = PlanCache(max_size=2)
        >>> class Plan: pass
        >>> for key in "abca":
        ...     _ = cache.find(key, Plan, lambda plan: None)
        >>> cache.size, cache.keys
        (2, ('c', 'a'))
    """

    def __init__(self, max_size: int = DEFAULT_MAX_SIZE) -> None:
        self._max_size = max_size
        self._lock = threading.RLock()
        # The one used last comes last.
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._dropped: deque[Callable[[], None]] = deque()

    @property
    def size(self) -> int:
        """How many plans the cache holds."""
        return len(self._plans)

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What its plans are for, the one used last at the end."""
        with self._lock:
            return tuple(self._plans)

    @property
    def max_size(self) -> int:
        """How many plans it holds at most; 0 to keep none. A smaller value takes effect at once."""
        return self._max_size

    @max_size.setter
    def max_size(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"`max_size` of a plan cache is {value!r}",
                where="tg.backends.cufft_plan_cache.max_size",
                why="it is a count of plans: 0 keeps none",
                fix=f"pass an int that is not negative; {DEFAULT_MAX_SIZE} is the default",
                anchor="config",
            )
        with self._lock:
            self._max_size = value
            self._shrink()
        self._free_dropped()

    def clear(self) -> None:
        """Takes out every plan; those that no graph holds are freed."""
        with self._lock:
            plans, self._plans = self._plans, OrderedDict()
        plans.clear()
        self._free_dropped()

    def find(
        self, key: Hashable, make: Callable[[], Plan], free: Callable[[Plan], Callable[[], None]]
    ) -> Plan:
        """Returns the plan for a key: the one that it holds, or else a new one.

        Args:
            key: what the plan is for.
            make: returns a new plan.
            free: called with it, returns what frees it, without a reference to it.
        """
        self._free_dropped()
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = make()
                weakref.finalize(plan, self._dropped.append, free(plan)).atexit = False
                if self._max_size:
                    self._plans[key] = plan
                    self._shrink()
            else:
                self._plans.move_to_end(key)
            return plan

    def _shrink(self) -> None:
        while len(self._plans) > self._max_size:
            self._plans.popitem(last=False)

    def _free_dropped(self) -> None:
        """See Note [Plans]."""
        while self._dropped:
            try:
                free = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            free()


_caches: dict[str, PlanCache[Any]] = {}


def find_fft_plans(device: str) -> PlanCache[Any]:
    """Returns the cache of the cuFFT plans of one device.

    Args:
        device: its name, as ``cuda:0``.
    """
    return _caches.setdefault(device, PlanCache())
