"""DictWatch: every way to change a dict is told, nothing else, and nothing is kept or lost."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest

from tracegraph import dict_watch
from tracegraph.dict_watch import watch_dicts

HAS_WATCHERS = sys.version_info >= (3, 12)
needs_watchers = pytest.mark.skipif(not HAS_WATCHERS, reason="CPython watches dicts from 3.12 on")


class Value:
    """Something that a weak reference can point to."""


def test_there_are_watchers_from_3_12_on():
    assert (watch_dicts([{}]) is not None) == HAS_WATCHERS


@needs_watchers
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("a", 3),
        lambda d: d.__setitem__("new", 3),
        lambda d: d.__delitem__("a"),
        lambda d: d.pop("a"),
        lambda d: d.popitem(),
        lambda d: d.update(b=5),
        lambda d: d.setdefault("c", 1),
        lambda d: d.clear(),
        lambda d: d.__ior__({"z": 1}),
    ],
)
def test_a_change_is_told(change):
    one, other = {"a": 1, "b": 2}, {"x": 1}
    watch = watch_dicts([other, one])
    assert not watch.has_changed
    assert one["a"] == len(list(one)) - 1 == 1
    assert not watch.has_changed
    change(one)
    assert watch.has_changed
    watch.has_changed = False
    change(other) if "a" in other else other.update(a=1)
    assert watch.has_changed


@needs_watchers
def test_several_watches_of_one_dict():
    state = {"a": 1}
    first, second = watch_dicts([state]), watch_dicts([state])
    del first
    gc.collect()
    state["a"] = 2
    assert second.has_changed
    third = watch_dicts([state])
    assert not third.has_changed
    state["b"] = 2
    assert third.has_changed


@needs_watchers
def test_a_watch_keeps_its_dicts_and_gives_them_back():
    value = Value()
    state, gone = {"a": value}, weakref.ref(value)
    address = id(state)
    watch = watch_dicts([state])
    del state, value
    gc.collect()
    assert gone() is not None
    assert address in dict_watch._watches
    del watch
    gc.collect()
    assert gone() is None
    assert address not in dict_watch._watches


@needs_watchers
def test_without_a_free_watcher_there_is_none(monkeypatch):
    def refuse(_callback):
        raise RuntimeError("no more dict watcher IDs available")

    monkeypatch.setattr(dict_watch.ctypes.pythonapi, "PyDict_AddWatcher", refuse)
    dict_watch._find_watcher.cache_clear()
    try:
        assert watch_dicts([{}]) is None
    finally:
        monkeypatch.undo()
        dict_watch._find_watcher.cache_clear()


def test_the_end_of_the_interpreter_is_quiet():
    """Dicts that are still watched, some in cycles, die after the modules."""
    program = """
        import tracegraph.dict_watch as d
        state = {"a": 1}
        state["self"] = state
        kept = [d.watch_dicts([state, {}]), state]
        import builtins
        builtins.kept_for_ever = kept
        """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
