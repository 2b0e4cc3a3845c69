"""The collector is held off for a while, and as it was afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tracegraph.lowering.collector import hold_collector

SECONDS = 240.0


@pytest.fixture(autouse=True)
def is_put_back() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def test_it_is_off_inside_and_on_afterwards():
    with hold_collector():
        assert not gc.isenabled()
        with hold_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()


def test_it_is_on_after_an_error():
    with pytest.raises(ZeroDivisionError), hold_collector():
        raise ZeroDivisionError


def test_a_function_can_be_held():
    @hold_collector()
    def look() -> bool:
        return gc.isenabled()

    assert [look(), look()] == [False, False]
    assert gc.isenabled()


def test_one_that_is_off_stays_off():
    gc.disable()
    try:
        with hold_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_several_threads_puts_it_back():
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with hold_collector():
            is_held.set()
            assert may_end.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(SECONDS)
    with hold_collector():
        pass
    assert not gc.isenabled()
    may_end.set()
    thread.join()
