"""Files are written behind the calls that captured, and who asks for them waits."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tests.processes import run_copy
from tracegraph.kernel_caching.storing import store_behind, wait_for_stores

FOLDER = pathlib.Path("kernels")


def test_a_key_is_waited_for_and_no_other():
    may_end, done = threading.Event(), list[str]()

    def store() -> None:
        may_end.wait(60)
        done.append("abc")

    store_behind(FOLDER, "abc", store)
    wait_for_stores(FOLDER, "abd")
    wait_for_stores(FOLDER.parent, "abc")
    assert not done
    threading.Timer(0.05, may_end.set).start()
    wait_for_stores(FOLDER, "abc")
    assert done == ["abc"]


def test_one_key_is_stored_once_at_a_time():
    running, most = list[int](), list[int]()

    def store() -> None:
        running.append(1)
        most.append(len(running))
        running.pop()

    for _ in range(20):
        store_behind(FOLDER, "abc", store)
    wait_for_stores()
    assert most == [1] * 20


def test_a_process_without_new_threads_stores_at_once(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = list[str]()
    store_behind(FOLDER, "abc", lambda: done.append("abc"))
    assert done == ["abc"]
    wait_for_stores()


PROGRAM = """
import time
from tracegraph.kernel_caching.storing import store_behind
store_behind("kernels", "abc", lambda: (time.sleep(0.2), print("stored")))
print("ends")
"""


def test_the_interpreter_waits_when_it_ends():
    assert run_copy(["-c", PROGRAM]).stdout == "ends\nstored\n"
