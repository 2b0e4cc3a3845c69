"""What the GPU tests do with several workers on one GPU, tried without one."""

from __future__ import annotations

import os
import pathlib
import threading
import types
from typing import Any

import pytest

from tests.gpu import checking_tool, conftest, device_memory, part_times, sharing
from tests.paths import ROOT

COUNT = "PYTEST_XDIST_WORKER_COUNT"


def test_each_worker_has_a_part_of_the_memory() -> None:
    environment = {COUNT: "4"}
    sharing.share_memory(environment)
    assert float(environment[sharing.FRACTIONS[0]]) * 4 == pytest.approx(sharing.SHARED)


@pytest.mark.parametrize("environment", [{}, {COUNT: "1"}])
def test_a_process_alone_has_what_jax_takes(environment: dict[str, str]) -> None:
    before = dict(environment)
    sharing.share_memory(environment)
    assert environment == before


@pytest.mark.parametrize("name", sharing.FRACTIONS)
def test_what_the_user_has_set_stays(name: str) -> None:
    environment = {COUNT: "4", name: "0.9"}
    sharing.share_memory(environment)
    assert environment == {COUNT: "4", name: "0.9"}


def try_to_hold(folder: pathlib.Path, *, alone: bool) -> bool:
    try:
        with sharing.hold_gpu(folder, alone=alone, limit_s=0):
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("first", "second", "is_possible"),
    [(False, False, True), (False, True, False), (True, False, False), (True, True, False)],
)
def test_alone_is_alone(
    first: bool, second: bool, is_possible: bool, tmp_path: pathlib.Path
) -> None:
    with sharing.hold_gpu(tmp_path, alone=first):
        assert try_to_hold(tmp_path, alone=second) is is_possible
    # What came too late, or at an end, holds nothing.
    assert try_to_hold(tmp_path, alone=True)


@pytest.mark.parametrize(
    ("names", "gpus", "expected"),
    [
        (["gpu", "alone_on_gpu"], 1, True),
        (["gpu"], 2, False),
        # Skipped there: the others need not wait for that.
        (["two_gpus", "alone_on_gpu"], 1, False),
        (["two_gpus", "alone_on_gpu"], 2, True),
    ],
)
def test_which_tests_are_alone(
    names: list[str], gpus: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "list_total_bytes", lambda: (80 << 30,) * gpus)
    item: Any = types.SimpleNamespace(fixturenames=names)
    assert conftest.is_alone(item) is expected


def test_others_cannot_overtake_a_test_that_waits_to_be_alone(tmp_path: pathlib.Path) -> None:
    order = []

    def wait_to_be_alone() -> None:
        with sharing.hold_gpu(tmp_path, alone=True, limit_s=60):
            order.append("alone")

    waiting = threading.Thread(target=wait_to_be_alone)
    with sharing.hold_gpu(tmp_path, alone=False):
        waiting.start()
        while try_to_hold(tmp_path, alone=False):
            pass
        order.append("the others wait")
    waiting.join(60)
    assert order == ["the others wait", "alone"]
    assert try_to_hold(tmp_path, alone=False)


def test_tests_that_are_alone_share_a_turn(tmp_path: pathlib.Path) -> None:
    turns = sharing.Turns(tmp_path)
    turns.take(alone=True)
    turns.end(keeps_alone=True)
    assert not try_to_hold(tmp_path, alone=False)
    turns.take(alone=True)
    turns.end(keeps_alone=False)
    assert try_to_hold(tmp_path, alone=True)
    turns.take(alone=False)
    # One that is not alone passes nothing on, or two workers could wait for each other.
    turns.end(keeps_alone=True)
    assert try_to_hold(tmp_path, alone=True)


@pytest.mark.parametrize("workers", [("gw0", "gw1"), ("gw1", "gw0")])
def test_the_worker_with_those_that_are_alone_begins(
    tmp_path: pathlib.Path, workers: tuple[str, str]
) -> None:
    first, second = sharing.Turns(tmp_path), sharing.Turns(tmp_path)
    other = threading.Thread(target=second.begin, args=(workers[1],), kwargs={"alone": False})
    other.start()
    first.begin(workers[0], alone=True)
    assert not try_to_hold(tmp_path, alone=False)
    first.end(keeps_alone=False)
    other.join(60)
    assert try_to_hold(tmp_path, alone=False)
    assert not try_to_hold(tmp_path, alone=True)


def test_a_process_without_others_waits_for_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "BEGIN_S", 3600.0)
    sharing.Turns(tmp_path).begin("", alone=False)


def make_config(*args: pathlib.Path, numprocesses: int | None = None, usepdb: bool = False) -> Any:
    option = types.SimpleNamespace(numprocesses=numprocesses, dist="no", usepdb=usepdb)
    return types.SimpleNamespace(option=option, args=[str(path) for path in args])


@pytest.mark.parametrize(("gpu_bytes", "count"), [(80 << 30, 10), (56 << 30, 8), (1 << 30, 1)])
def test_a_run_of_the_folder_has_as_many_workers_as_fit(gpu_bytes: int, count: int) -> None:
    config = make_config(ROOT / "tests" / "gpu")
    assert sharing.choose_workers(config, {}, gpu_bytes)
    assert (config.option.numprocesses, config.option.dist) == (count, "worksteal")


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        (make_config(ROOT / "tests", numprocesses=0), {}),
        (make_config(ROOT / "tests", usepdb=True), {}),
        (make_config(pathlib.Path(__file__)), {}),
        (make_config(ROOT / "tests"), {"PYTEST_XDIST_WORKER": "gw0"}),
        (types.SimpleNamespace(option=types.SimpleNamespace(dist="no"), args=[str(ROOT)]), {}),
    ],
    ids=["-n 0", "--pdb", "one file", "a worker", "without pytest-xdist"],
)
def test_what_the_command_says_stays(config: Any, environment: dict[str, str]) -> None:
    before = dict(vars(config.option))
    assert not sharing.choose_workers(config, environment, 141 << 30)
    assert vars(config.option) == before


# One that does not end is not waited for twice.
@pytest.mark.parametrize(("status", "reports"), [(3, [0, 1]), (124, [0, 0])])
def test_tools_are_alone_before_the_workers_begin(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, status: int, reports: list[int]
) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$2 has seen nothing"; exit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(checking_tool.REPORTS, "")
    started = checking_tool.start_early(os.environ, tmp_path)
    assert started is not None
    names = list(checking_tool.CASES)
    for name, index in zip(names, reports, strict=True):
        report = checking_tool.read_report(name)
        assert report == {"status": status, "text": f"{names[index]} has seen nothing\n"}
    assert started.wait() == 0
    assert try_to_hold(tmp_path, alone=True)


def test_a_tool_that_cannot_be_killed_is_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking_tool, "LIMIT_S", 0.2)
    monkeypatch.setattr(checking_tool, "KILLED_AFTER_S", 0.1)
    # Stands for `timeout`, which waits for what it has killed.
    stand_in = tmp_path / "timeout"
    stand_in.write_text("#!/bin/sh\necho begun; exec sleep 60\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    started = []
    start = checking_tool.start_python

    def note(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(checking_tool, "start_python", note)
    try:
        report = checking_tool.run_tool("compute-sanitizer", "memcheck")
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert report == {"status": 137, "text": "begun\n"}


def test_a_file_that_is_not_made_is_not_waited_for_for_ever(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TimeoutError, match="no other process made"):
        sharing.wait_for_file(tmp_path / "report", limit_s=0)


def test_long_tests_come_where_the_other_workers_begin() -> None:
    items, long = list(range(20)), [100, 101, 102, 103]
    found = sharing.spread(items, long, count=4)
    assert [found[index : index + 6] for index in range(0, 24, 6)] == [
        [0, 1, 2, 3, 4, 5],
        [100, 103, 6, 7, 8, 9],
        [101, 10, 11, 12, 13, 14],
        [102, 15, 16, 17, 18, 19],
    ]
    assert sharing.spread(items, [], count=4) == items
    for count in (1, 2, 4):
        assert sorted(sharing.spread([1], long, count)) == [1, *long]


def make_report(nodeid: str, when: str, duration: float, *, failed: bool = False) -> object:
    return types.SimpleNamespace(nodeid=nodeid, when=when, duration=duration, failed=failed)


def test_seconds_of_each_module_are_added_up() -> None:
    reports = [
        make_report("tests/gpu/test_a.py::test_one", "setup", 1.0),
        make_report("tests/gpu/test_a.py::test_one", "call", 2.0),
        make_report("tests/gpu/test_a.py::test_two", "call", 0.5),
        make_report("tests/gpu/test_b.py::test_x[1::2]", "setup", 7.0, failed=True),
        make_report("tests/gpu/test_skipped.py::test_x", "setup", 9.0),
        make_report("tests/runtime/test_c.py::test_x", "call", 9.0),
        types.SimpleNamespace(nodeid="tests/gpu/test_a.py", when="collect"),
        types.SimpleNamespace(message="a warning"),
    ]
    assert list(part_times.format_times(reports)) == [
        "    7.0  test_b, 1 tests, most 7.0 in test_x[1::2]",
        "    3.5  test_a, 2 tests, most 3.0 in test_one",
        "   10.5  all, added up over the workers",
    ]
    assert list(part_times.format_times(reports[4:])) == []


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_with_the_seconds_of_its_modules(
    workers: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = pytester.mkdir("tests") / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.gpu.part_times import pytest_terminal_summary")
    for name in "ab":
        tests = (f"def test_{name}{number}(): pass\n" for number in range(3))
        (folder / f"test_{name}.py").write_text("".join(tests))
    result = pytester.runpytest_subprocess("-n", workers, "tests/gpu")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines_random(
        ["*seconds of the GPU tests*", "*test_a, 3 tests, most *", "*test_b, 3 tests, most *"]
    )
