"""ArrayState: what an Array promises.

Note [States of an Array].

    FRESH ----settle, or first read---> SETTLED      an immutable value
    RESIDENT ----detach---------------> SETTLED      shows the buffer until then, or until the next
                                                     replay takes it, see Note [Leaf sets]
    STATIC                                           readable until the next replay
    LIVE                                             shows the buffer, whatever wrote it last; in
                                                     a recorded block it stands for the buffer
    any ----consume, delete-----------> DELETED      every read raises, as after donation
"""

from __future__ import annotations

import enum


class ArrayState(enum.Enum):
    """What an Array promises, see Note [States of an Array]."""

    FRESH = "fresh"
    RESIDENT = "resident"
    STATIC = "static"
    LIVE = "live"
    SETTLED = "settled"
    DELETED = "deleted"
