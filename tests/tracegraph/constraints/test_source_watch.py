"""Clocks and random sources are moved for the user's own code in the thread that traces, only."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import pickle
import random
import secrets
import threading
import time
import types
import uuid
import warnings
from datetime import date as day
from datetime import datetime as moment
from random import randint
from time import time as read_clock
from typing import Any

import numpy as np
import pytest

from tracegraph.constraints.source_watch import move_sources
from tracegraph.constraints.sources import SourceWatch, get_watch, list_source_modules

GENERATOR = np.random.default_rng(0)
SECONDS = 429 * 86400


def idle() -> None:
    pass


CLOCKS = {
    "time.time": lambda: time.time(),
    "time.time_ns": lambda: time.time_ns() / 1e9,
    "time.monotonic": lambda: time.monotonic(),
    "time.perf_counter_ns": lambda: time.perf_counter_ns() / 1e9,
    "time.process_time": lambda: time.process_time(),
    "time.gmtime": lambda: time.mktime(time.gmtime()),
    "time.strftime": lambda: time.mktime(time.strptime(time.strftime("%Y %m %d"), "%Y %m %d")),
    "datetime.datetime.now": lambda: datetime.datetime.now().timestamp(),
    "datetime.date.today": lambda: datetime.date.today().toordinal() * 86400.0,
}


@pytest.mark.parametrize("name", CLOCKS)
def test_each_clock_is_moved_and_its_true_value_is_noted(name: str):
    read = CLOCKS[name]
    before = read()
    with move_sources(idle) as watch:
        moved = read()
    assert moved - before > SECONDS - 86400
    assert abs(read() - before) < 86400
    (call,) = watch.calls
    assert call.name == name
    assert f"{__name__.rpartition('.')[2]}.py:" in call.where
    assert watch.rounds == 3


def test_names_that_a_module_has_imported_are_moved():
    with warnings.catch_warnings(), move_sources(idle) as watch:
        # Python 3.12 warns of `utcnow`.
        warnings.simplefilter("ignore")
        assert read_clock() - SECONDS > time.time() - SECONDS - 86400
        values = read_clock(), moment.now(), moment.utcnow(), day.today(), randint(0, 9)
    assert [call.name.rpartition(".")[2] for call in watch.calls][-4:] == [
        "now",
        "utcnow",
        "today",
        "randint",
    ]
    assert values[1] - moment.now() > datetime.timedelta(days=428)
    assert type(values[1]) is datetime.datetime
    assert type(values[3]) is datetime.date
    assert read_clock is time.time
    assert moment is datetime.datetime


def test_imports_inside_the_function_are_moved():
    with move_sources(idle) as watch:
        from time import monotonic

        monotonic()
    assert [call.name for call in watch.calls] == ["time.monotonic"]


def test_what_a_function_closes_over_is_moved():
    def make(clock, generator):
        def inner():
            return clock(), generator.random()

        return functools.partial(lambda: inner())

    function = make(time.time, random.Random(3))
    with move_sources(function) as watch:
        value, _ = function()
    assert value - time.time() > SECONDS - 86400
    assert [str(call).partition(" at ")[0].partition(" gave ")[0] for call in watch.calls] == [
        "`time.time`",
        "`1`",
    ]
    assert watch.has_draws
    assert function()[0] - time.time() < 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: np.random.rand(),
        lambda: os.urandom(8),
        lambda: uuid.uuid4(),
        lambda: secrets.randbits(60),
        lambda: np.random.default_rng().random(),
        lambda: GENERATOR.random(),
    ],
)
def test_each_random_source_differs_and_is_noted(draw):
    values = []
    for number in (1, 2):
        with move_sources(idle, number) as watch:
            values.append(draw())
        assert watch.rounds == 8
        assert len(watch.calls) == 1
    assert values[0] != values[1]


def test_the_module_s_own_generators_are_not_touched():
    states = random.getstate(), pickle.dumps(np.random.get_state())
    with move_sources(idle):
        random.random()
        np.random.normal(size=3)
        np.random.seed(3)
    assert (random.getstate(), pickle.dumps(np.random.get_state())) == states


def test_seeds_make_numbers_repeat():
    def draw():
        random.seed(1)
        np.random.seed(2)
        state = random.getstate()
        values = [random.random(), np.random.rand(), np.random.default_rng(3).random()]
        random.setstate(state)
        return [*values, random.random()]

    wanted = draw()
    for number in (1, 2):
        with move_sources(idle, number):
            assert draw() == wanted


def test_classes_of_datetime_are_what_they_are():
    with move_sources(idle) as watch:
        value = datetime.datetime(2020, 1, 2)
        assert type(value) is moment(2020, 1, 2).__class__
        assert isinstance(value, datetime.datetime)
        assert isinstance(value, moment)
        assert not isinstance(day(2020, 1, 2), moment)
        assert issubclass(bool, int)
        assert not issubclass(int, datetime.date)
        assert moment.fromtimestamp(0).year in (1969, 1970)
        assert datetime.datetime.strptime("2020", "%Y") == datetime.datetime(2020, 1, 1)
        assert type(value) == moment  # noqa: E721
        assert pickle.loads(pickle.dumps(value)) == value
    assert watch.calls == []


def test_libraries_and_other_threads_read_the_true_clock(caplog):
    seen = []

    def read():
        seen.append((get_watch(), time.time(), datetime.datetime is moment.mro()[0], read_clock()))

    with move_sources(idle) as watch:
        logging.getLogger("test").warning("created now")
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    (record,) = caplog.records
    ((other, first, _, second),) = seen
    assert other is None
    assert abs(record.created - time.time()) < 600
    assert abs(first - time.time()) < 600
    assert abs(second - time.time()) < 600
    assert watch.calls == []


def test_watches_nest_and_undo_everything_even_after_an_error():
    types = [type(module) for module in list_source_modules()]
    watches = []
    with contextlib.suppress(ZeroDivisionError), move_sources(idle) as outer:
        with move_sources(idle, 2) as inner:
            time.time()
        time.monotonic()
        watches += [outer, inner]
        raise ZeroDivisionError
    names = [[call.name for call in watch.calls] for watch in watches]
    assert names == [["time.monotonic"], ["time.time"]]
    assert [type(module) for module in list_source_modules()] == types
    assert get_watch() is None
    assert read_clock is time.time


def test_two_threads_leave_in_any_order():
    first_in, first_out = threading.Event(), threading.Event()

    def trace():
        with move_sources(idle):
            first_in.set()
            assert first_out.wait(60)

    thread = threading.Thread(target=trace)
    thread.start()
    assert first_in.wait(60)
    with move_sources(idle) as watch:
        first_out.set()
        thread.join()
        moved = read_clock()
    assert moved - read_clock() > SECONDS - 86400
    assert len(watch.calls) == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_move_changes_every_part_of_a_date(number: int):
    now = datetime.datetime(2026, 3, 4, 5, 6, 7)
    moved = now + SourceWatch(number).move()
    parts = ("month", "day", "hour", "minute", "second")
    assert all(getattr(now, part) != getattr(moved, part) for part in parts)
    assert now.weekday() != moved.weekday()
    assert int(SourceWatch(number).move().total_seconds()) % 2 == number % 2


def test_a_module_may_become_plain_while_another_thread_reads_it():
    with move_sources(idle):
        read: Any = type(time).__getattribute__
    assert type(time) is types.ModuleType
    assert read(time, "time") is time.time
