"""Python's clocks and random sources, and what stands in for them while a function is traced again.

Note [Moved sources]
A value that Python computes while a function is traced is frozen in the graph. Tracing twice shows
it only if the two values differ where they are used: ``int(time.time())`` rarely does, nor does
``datetime.now().second``, nor the time in float32, whose steps are two minutes. So clocks are moved
in the second trace, and random sources are others: whatever depends on one of them differs.
What does not differ, such as a duration that is printed, is allowed. Where a clock was read or a
number was drawn and nothing differs, a few more traces with other moves follow: a coin that is
thrown for each trace may fall on the same side twice.

Only calls of the user's own code in the thread that traces are moved. JAX and other libraries read
the true clock, as do other threads: a stand-in calls the true source for them.
"""

from __future__ import annotations

import datetime
import functools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tracegraph.runtime.source_lines import is_own_file, locate_stack

# Each changes second, minute, hour, weekday, day and month. Of two that follow one another, one
# changes whether the seconds are even, and one does not: the true time goes on meanwhile.
_MOVES = (
    datetime.timedelta(days=429, hours=11, minutes=23, seconds=17),
    datetime.timedelta(days=-201, hours=-5, minutes=-37, seconds=-28),
    datetime.timedelta(days=67, hours=13, minutes=41, seconds=43),
)
# Added at each call: durations change, too.
_STEP = datetime.timedelta(hours=2, minutes=11, seconds=59)
# Traces after the first in all: where a clock was read, and where a number was drawn.
_CLOCK_ROUNDS = len(_MOVES)
_RANDOM_ROUNDS = 8
_SEED = 0x7467
_NANOSECONDS = 10**9
_STATE_CALLS = frozenset(["seed", "getstate", "setstate", "get_state", "set_state"])
# Of each thread: its `watch`, while it traces anew.
thread = threading.local()


class SourceCall(NamedTuple):
    """A call of a clock or of a random source by the user's own code.

    Attributes:
        name: of the source, as ``time.time``.
        value: what it gave, shortened; of a clock the true time.
        where: the user's line; empty for a generator that the user made.
    """

    name: str
    value: str = ""
    where: str = ""

    def __str__(self) -> str:
        if not self.where:
            return f"`{self.name}` gave random numbers"
        return f"`{self.name}` gave {self.value} at {self.where}"


class SourceWatch:
    """What the user's own code reads of clocks and random sources during one trace.

    Args:
        number: of the trace; 1 is the first that is moved.
    """

    def __init__(self, number: int = 1) -> None:
        self.calls: list[SourceCall] = []
        self.has_draws = False
        self.random = random.Random(_SEED + number)
        self.numpy_random = np.random.RandomState(_SEED + number)
        self._move = _MOVES[(number - 1) % len(_MOVES)]

    @property
    def rounds(self) -> int:
        """How many moved traces show that nothing depends on what was read."""
        if self.has_draws:
            return _RANDOM_ROUNDS
        return _CLOCK_ROUNDS if self.calls else 1

    def add_call(self, name: str, value: object, where: str) -> None:
        """Notes that a source was called."""
        text = str(value) if isinstance(value, datetime.date) else repr(value)
        self.calls.append(SourceCall(name, text if len(text) <= 40 else f"{text[:36]} ...", where))

    def add_generator(self, name: str) -> None:
        """Notes that numbers were drawn from a generator that the user made."""
        self.has_draws = True
        self.calls.append(SourceCall(name))

    def move(self) -> datetime.timedelta:
        """Returns how far the clock of the next reading is moved."""
        return self._move + _STEP * len(self.calls)


def get_watch() -> SourceWatch | None:
    """Returns the watch of this thread, None where it does not trace anew."""
    return getattr(thread, "watch", None)


@functools.cache
def list_stand_ins() -> dict[int, tuple[Any, Any]]:
    """Returns each known source with its stand-in, by the identity of the source."""
    pairs = [*_list_clocks(), *_list_random_sources(), *_list_entropy()]
    return {id(real): (real, stand_in) for real, stand_in in pairs}


def list_source_modules() -> tuple[ModuleType, ...]:
    """Returns the modules whose attributes the sources are."""
    return (time, datetime, random, np.random, os, uuid, secrets)


def _read_watch() -> SourceWatch | None:
    """Returns the watch if the caller of the caller is the user's own code."""
    watch = get_watch()
    return watch if watch is not None and is_own_file(_read_file()) else None


def _read_file() -> str:
    return sys._getframe(3).f_code.co_filename


def _locate() -> str:
    return locate_stack(sys._getframe(2))


def _list_clocks() -> Iterator[tuple[Any, Any]]:
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        yield _make_clock(name, 1)
        yield _make_clock(f"{name}_ns", _NANOSECONDS)
    for name, unit in (("clock_gettime", 1), ("clock_gettime_ns", _NANOSECONDS)):
        if hasattr(time, name):
            yield _make_clock(name, unit)
    for name, given in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1)):
        yield _make_calendar(name, given)
    yield datetime.datetime, MovedDatetime
    yield datetime.date, MovedDate


def _make_clock(name: str, unit: int) -> tuple[Any, Any]:
    real = getattr(time, name)

    @functools.wraps(real)
    def stand_in(*args: Any) -> Any:
        value = real(*args)
        watch = _read_watch()
        if watch is None:
            return value
        moved = value + int(watch.move().total_seconds()) * unit
        watch.add_call(f"time.{name}", value, _locate())
        return moved

    return real, stand_in


def _make_calendar(name: str, given: int) -> tuple[Any, Any]:
    """Returns a function that tells the present time where an argument is left out."""
    real = getattr(time, name)

    @functools.wraps(real)
    def stand_in(*args: Any) -> Any:
        watch = _read_watch()
        if watch is None or len(args) > given:
            return real(*args)
        seconds = time.time() + watch.move().total_seconds()
        watch.add_call(f"time.{name}", real(*args), _locate())
        return real(*args, time.localtime(seconds) if given else seconds)

    return real, stand_in


class _RealClass(type):
    """The type of a class that stands for a real one: its instances are those of the real one."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _get_real(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _get_real(cls))

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _get_real(cls)

    def __hash__(cls) -> int:
        return hash(_get_real(cls))


def _get_real(cls: type) -> type:
    return next(base for base in cls.__mro__ if type(base) is type)


class MovedDatetime(datetime.datetime, metaclass=_RealClass):
    """`datetime.datetime` with a moved clock; what it makes are real ones."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a real one."""
        return datetime.datetime(*args, **kwargs)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        """Returns the moved present time."""
        value, watch = datetime.datetime.now(tz), _read_watch()
        return value if watch is None else _move_date(watch, "datetime.datetime.now", value)

    @classmethod
    def utcnow(cls) -> Any:
        """Returns the moved present time."""
        # Python's own warns that it is deprecated.
        value, watch = datetime.datetime.utcnow(), _read_watch()
        return value if watch is None else _move_date(watch, "datetime.datetime.utcnow", value)

    @classmethod
    def today(cls) -> Any:
        """Returns the moved present time."""
        value, watch = datetime.datetime.today(), _read_watch()
        return value if watch is None else _move_date(watch, "datetime.datetime.today", value)


class MovedDate(datetime.date, metaclass=_RealClass):
    """`datetime.date` with a moved clock; what it makes are real ones."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a real one."""
        return datetime.date(*args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        """Returns the moved present day."""
        value, watch = datetime.date.today(), _read_watch()
        return value if watch is None else _move_date(watch, "datetime.date.today", value)


def _move_date(watch: SourceWatch, name: str, value: datetime.date) -> datetime.date:
    moved = value + watch.move()
    watch.add_call(name, value, locate_stack(sys._getframe(2)))
    return moved


def _list_random_sources() -> Iterator[tuple[Any, Any]]:
    for name in random.__all__:
        real = getattr(random, name)
        if isinstance(getattr(real, "__self__", None), random.Random):
            yield _make_draw(real, f"random.{name}", lambda watch: watch.random)
    for name in np.random.__all__:
        real = getattr(np.random, name)
        owner = getattr(real, "__self__", None)
        if isinstance(owner, np.random.RandomState) or name in _STATE_CALLS:
            yield _make_draw(real, f"np.random.{name}", lambda watch: watch.numpy_random)
    yield _make_unseeded(np.random.default_rng, "np.random.default_rng")


def _make_draw(
    real: Callable[..., Any], name: str, find: Callable[[SourceWatch], Any]
) -> tuple[Any, Any]:
    """Returns a function of a module's own generator, and one of the watch's generator."""
    method = name.rpartition(".")[2]

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        watch = _read_watch()
        if watch is None:
            return real(*args, **kwargs)
        value = getattr(find(watch), method)(*args, **kwargs)
        if method not in _STATE_CALLS:
            watch.has_draws = True
            watch.add_call(name, value, _locate())
        return value

    return real, stand_in


def _list_entropy() -> Iterator[tuple[Any, Any]]:
    """Yields the sources that no seed makes repeat: the values differ by themselves."""
    for module, names in (
        (os, ("urandom", "getrandom")),
        (uuid, ("uuid1", "uuid4")),
        (secrets, secrets.__all__),
    ):
        for name in names:
            real = getattr(module, name, None)
            if real is not None and not isinstance(real, type) and name != "compare_digest":
                yield _make_unseeded(real, f"{module.__name__}.{name}")


def _make_unseeded(real: Callable[..., Any], name: str) -> tuple[Any, Any]:
    """Returns a function, and the same that notes its calls; a seed makes a generator repeat."""
    is_generator = real is np.random.default_rng

    @functools.wraps(real)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        value, watch = real(*args, **kwargs), _read_watch()
        is_seeded = is_generator and any(each is not None for each in (*args, *kwargs.values()))
        if watch is not None and not is_seeded:
            watch.has_draws = True
            watch.add_call(name, value, _locate())
        return value

    return real, stand_in
