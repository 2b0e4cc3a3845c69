"""The driver's event behind an event of the user's."""

from __future__ import annotations

import weakref

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.streams.event import Event


def make_event(driver: CudaDriver, event: Event) -> int:
    """Returns the driver's handle of an event, which is made at its first use.

    Args:
        driver: with the context of the event's device current.
        event: destroys the handle when it goes.
    """
    if not event.handle:
        event.handle = driver.create_event(timing=event.enable_timing, blocking=event.blocking)
        weakref.finalize(event, driver.destroy_event, event.handle).atexit = False
    return event.handle
