"""DictWatch: each change is counted, marks have one owner, and nothing is called when dicts die."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.processes import run_python
from tracegraph.replaying import dict_watch
from tracegraph.replaying.dict_watch import DictWatch, DictWatcher, count_changes, has_watchers

needs_watchers = pytest.mark.skipif(
    not dict_watch._watcher.is_open, reason="this Python does not tell of changes of dicts"
)


def count_during(action: Callable[[], Any]) -> int:
    before = count_changes()
    action()
    return count_changes() - before


CHANGES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "replaced": lambda d: d.__setitem__("a", 3),
    "added": lambda d: d.__setitem__("z", 3),
    "deleted": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(a=3),
    "update by a dict": lambda d: d.update({"a": 3}),
    "or": lambda d: d.__ior__({"z": 3}),
    "setdefault": lambda d: d.setdefault("z", 3),
    "init": lambda d: d.__init__(z=3),
    "exec": lambda d: exec("a = 3", {}, d),
    "other key": lambda d: d.__setitem__(("a", 1), 3),
}
LOOKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "get": lambda d: d.get("a"),
    "missing": lambda d: d.get("z"),
    "copy": lambda d: d.copy() | {"z": 3},
    "same value": lambda d: d.__setitem__("a", d["a"]),
    "setdefault": lambda d: d.setdefault("a", 3),
    "list": lambda d: list(d.items()),
    "equal": lambda d: d == {"a": 1, "b": 3},
}


@needs_watchers
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", [1, 2, 20])
def test_a_change_is_counted(name: str, size: int) -> None:
    mapping: dict[str, Any] = dict(zip("abcdefghijklmnopqrst"[:size], range(1, 21), strict=False))
    watch = DictWatch([mapping])
    assert not watch.uncounted
    assert count_during(lambda: CHANGES[name](mapping)) >= 1
    assert count_during(lambda: mapping.__setitem__("y", object())) == 1


@needs_watchers
def test_an_empty_dict_that_becomes_a_copy_of_another_is_counted() -> None:
    mapping: dict[str, int] = {}
    watch = DictWatch([mapping])
    assert count_during(lambda: mapping.update({"a": 1, "b": 2})) == 1
    assert not watch.uncounted


@needs_watchers
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_is_not_counted(name: str) -> None:
    mapping = {"a": 1, "b": 2}
    watch = DictWatch([mapping])
    assert count_during(lambda: LOOKS[name](mapping)) == 0
    assert not watch.uncounted


@needs_watchers
def test_changes_of_other_dicts_are_not_counted() -> None:
    watched, other = {"a": 1}, {"a": 1}
    watch = DictWatch([watched])
    assert count_during(lambda: other.update(a=2)) == 0
    del watch
    assert count_during(lambda: watched.update(a=2)) == 0


@needs_watchers
def test_a_mark_has_one_owner() -> None:
    mapping = {"a": 1}
    first, second = DictWatch([mapping, mapping]), DictWatch([mapping])
    assert (first.uncounted, second.uncounted) == ([], [mapping])
    del second
    assert count_during(lambda: mapping.update(a=2)) == 1
    del first
    third = DictWatch([mapping])
    assert not third.uncounted
    assert count_during(lambda: mapping.update(a=3)) == 1


@needs_watchers
def test_one_of_many_threads_owns_a_mark() -> None:
    mappings: list[dict[Any, Any]] = [{index: object()} for index in range(20)]
    made: list[DictWatch] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for mapping in mappings:
            made.append(DictWatch([mapping]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [watch.uncounted for watch in made].count([]) == len(mappings)
    assert all(count_during(lambda m=m: m.update(a=1)) == 1 for m in mappings)
    made.clear()
    assert not any(count_during(lambda m=m: m.update(b=1)) for m in mappings)


@needs_watchers
def test_a_dict_that_dies_while_an_exception_is_raised() -> None:
    # pytest makes an error of what CPython prints because it cannot raise it.
    def fail() -> None:
        mapping = {"a": object()}
        watch = DictWatch([mapping, {"b": 1}])
        assert not watch.uncounted
        raise KeyError("planted")

    changes = count_changes()
    for _ in range(3):
        with pytest.raises(KeyError, match="planted"):
            fail()
    assert count_changes() == changes


@needs_watchers
def test_a_cycle_of_watch_and_dict_is_collected() -> None:
    mapping: dict[str, Any] = {}
    mapping["watch"] = DictWatch([mapping])
    owners = dict_watch._watcher._owners
    address = id(mapping)
    assert address in owners
    del mapping
    changes = count_changes()
    gc.collect()
    assert address not in owners
    assert count_changes() == changes


@needs_watchers
def test_a_change_runs_no_python_code() -> None:
    # In Python code a signal could be raised, and be lost.
    mapping, events = {"a": 1}, []
    watch = DictWatch([mapping])
    sys.setprofile(lambda frame, event, _: events.append((frame.f_code.co_name, event)))
    try:
        mapping["a"] = 2
    finally:
        sys.setprofile(None)
    assert not watch.uncounted
    assert [event for event in events if event[1] == "call"] == []


@pytest.fixture
def watchers() -> Iterator[list[DictWatcher]]:
    """As many as CPython allows, and one more; removed afterwards."""
    made = [DictWatcher()]
    while made[-1].is_open:
        made.append(DictWatcher())
    yield made
    for each in made:
        each.close()


@needs_watchers
def test_without_a_free_watcher_nothing_is_marked(watchers: list[DictWatcher]) -> None:
    assert 1 < len(watchers) <= 8
    mapping = {"a": 1}
    assert not watchers[-1].acquire(mapping, object())
    watchers[-1].release(mapping, object())
    assert count_during(lambda: mapping.update(a=2)) == 0


@needs_watchers
def test_a_closed_watcher_marks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher, mapping = DictWatcher(), {"a": 1}
    monkeypatch.setattr(dict_watch, "_watcher", watcher)
    early = DictWatch([mapping])
    assert not early.uncounted
    watcher.close()
    watcher.close()
    assert DictWatch([{"b": 1}]).uncounted == [{"b": 1}]
    # A tree that is watched since before may have changed at any time.
    assert count_during(lambda: None) >= 1
    del early


def test_where_there_are_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_watchers() == (sys.version_info >= (3, 12))
    for path, value in [
        ("version_info", (3, 11)),
        ("_is_gil_enabled", lambda: False),
        ("implementation", type("implementation", (), {"name": "pypy"})),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, path, value, raising=False)
            assert not has_watchers()
            assert not DictWatcher().is_open


def test_a_watch_that_hears_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_watch, "has_watchers", lambda: False)
    monkeypatch.setattr(dict_watch, "_watcher", DictWatcher())
    mapping = {"a": 1}
    watch = DictWatch([mapping])
    assert watch.uncounted == [mapping]
    assert not DictWatch([]).uncounted


EXIT = """
import atexit, sys, threading
from tracegraph.replaying.dict_watch import DictWatch
state = {"a": object()}
sys.modules["kept"] = kept = type(sys)("kept")
kept.state, kept.watch = state, DictWatch([state])
kept.state["watch"] = kept.watch
sys.kept = [state, DictWatch([{"late": 1}])]
# Registered before tracegraph's own, so that it runs later.
class AtEnd:
    def __del__(self):
        state["b"] = 1
        state.clear()
sys.at_end = AtEnd()
atexit.register(lambda: state.update(c=1))
print("ok")
"""


def test_nothing_is_called_at_exit() -> None:
    done = run_python(["-W", "error", "-c", EXIT], variables={"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok", "")


class InterruptError(Exception):
    """Stands for a KeyboardInterrupt."""


def interrupt_at(step: int, action: Callable[[], Any]) -> bool:
    """Runs an action with an interrupt before its nth step of bytecode; False if it has fewer."""
    steps = itertools.count()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        is_constructing = frame.f_code.co_name not in ("__del__", "release")
        if frame.f_code.co_filename != dict_watch.__file__ or not is_constructing:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise InterruptError
        return trace

    # Python 3.12 traces opcodes only if a frame had asked for it before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        action()
    except InterruptError:
        return True
    finally:
        sys.settrace(None)
    return False


@needs_watchers
def test_an_interrupt_at_any_step_of_a_watch_leaves_no_mark(monkeypatch: pytest.MonkeyPatch):
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    owners = dict_watch._watcher._owners
    mappings = [{"a": 1}, {"b": 2}]
    before = dict(owners)
    step = 0
    while interrupt_at(step, lambda: DictWatch(mappings)):
        step += 1
        assert owners == before
        for mapping in mappings:
            assert count_during(lambda mapping=mapping: mapping.update(z=1)) == 0, step
    assert step > 50
    assert not unraisable
    assert not DictWatch(mappings).uncounted


@needs_watchers
def test_only_the_owner_takes_a_mark_off():
    mapping = {"a": 1}
    watch = DictWatch([mapping])
    dict_watch._watcher.release(mapping, object())
    assert count_during(lambda: mapping.update(a=2)) == 1
    del watch
    assert count_during(lambda: mapping.update(a=3)) == 0
