"""PoolId: the name of a pool."""

from __future__ import annotations

import itertools
from typing import NamedTuple

_numbers = itertools.count(1)


class PoolId(NamedTuple):
    """Names a pool; a pair, as in `torch.cuda`. (0, 0) is the default pool of a device.

    Attributes:
        number: counts the pools of this process, from 1.
        second: always 0.

    Example:
        >>> print(tg.PoolId(3))
        (3, 0)
    """

    number: int
    second: int = 0

    def __str__(self) -> str:
        return f"({self.number}, {self.second})"


DEFAULT_POOL_ID = PoolId(0, 0)


def new_pool_id() -> PoolId:
    """Returns an id that no pool of this process has had before, from any thread.

    Ids increase, so the pool that was made later has the larger one.
    """
    return PoolId(next(_numbers))
