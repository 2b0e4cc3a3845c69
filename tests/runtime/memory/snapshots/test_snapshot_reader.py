"""The reader of snapshots runs nothing, and says what is wrong with a file."""

import collections
import enum
import os
import pickle
import random

import pytest

from tests.oracles import error_lines
from tests.runtime.memory.snapshots.test_snapshot import PLAN
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.snapshots.plain_values import NotPlainError, to_plain
from tracegraph.runtime.memory.snapshots.snapshot import read_snapshot
from tracegraph.runtime.memory.snapshots.snapshot_check import find_problem


class Size(enum.IntEnum):
    SMALL = 512


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (PoolId(3), (3, 0)),
        (Size.SMALL, 512),
        (collections.OrderedDict(a=[True, None, 1.5, "x"]), {"a": [True, None, 1.5, "x"]}),
        ((1, [2, (3,)]), (1, [2, (3,)])),
    ],
)
def test_values_become_plain(value, plain):
    got = to_plain([value])[0]
    assert got == plain
    assert type(got) is type(plain)


@pytest.mark.parametrize("value", [{1}, b"x", object(), 1j, print])
def test_other_values_do_not(value):
    with pytest.raises(NotPlainError, match=type(value).__name__):
        to_plain({"key": [value]})


class RunsSystem:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write_evil(kind, path):
    """Pickles that would touch a file when loaded in the ordinary way."""
    touch = f"touch {path}"
    return {
        "reduce": pickle.dumps({"segments": [RunsSystem(path)], "device_traces": []}),
        "old_reduce": pickle.dumps(RunsSystem(path), protocol=0),
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "stack_global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(touch)])
        + touch.encode()
        + b"\x85R.",
        "eval": b'cbuiltins\neval\n(S\'__import__("os").system("' + touch.encode() + b"\")'\ntR.",
        "build": b"\x80\x04cbuiltins\nobject\n)\x81}\x8c\x01ab.",
        "persistent": b"\x80\x04\x8c\x01xQ.",
        "set": pickle.dumps({"segments": [{1}], "device_traces": []}),
        "bytes": pickle.dumps({"segments": b"x", "device_traces": []}),
        "bytearray": pickle.dumps({"segments": bytearray(b"x")}, protocol=5),
        "complex": pickle.dumps({"segments": 1j}),
    }[kind]


EVIL = {
    "reduce": "posix.system",
    "old_reduce": "posix.system",
    "inst": "pickle opcode STRING",
    "obj": "os.system",
    "stack_global": "posix.system",
    "eval": "builtins.eval",
    "build": "builtins.object",
    "persistent": "pickle opcode BINPERSID",
    "set": "pickle opcode EMPTY_SET",
    "bytes": "pickle opcode SHORT_BINBYTES",
    "bytearray": "pickle opcode BYTEARRAY8",
    "complex": "builtins.complex",
}


@pytest.mark.parametrize("kind", EVIL)
def test_the_reader_runs_nothing_and_names_what_it_found(tmp_path, kind):
    touched = tmp_path / "touched"
    path = tmp_path / "evil.pickle"
    path.write_bytes(write_evil(kind, touched))
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert not touched.exists()
    error_lines.match(
        caught.value,
        f"snapshot file {path} holds `{EVIL[kind]}`",
        f"reading {path}",
        "only plain values are read",
        "write it with tg.memory.dump_snapshot(path)",
    )


@pytest.mark.parametrize("kind", ["reduce", "inst", "stack_global"])
def test_an_ordinary_reader_would_have_run_it(tmp_path, kind):
    touched = tmp_path / "touched"
    pickle.loads(write_evil(kind, touched))
    assert touched.exists()


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def loop():
    value = {"segments": [], "device_traces": []}
    value["segments"].append(value)
    return value


GOOD_SEGMENT = {
    "device": 0,
    "address": 0,
    "total_size": 512,
    "stream": 0,
    "blocks": [{"size": 512, "state": "inactive"}],
}


def wrap(segment=None, entry=None, plan=None, **changes):
    """A snapshot with one segment, one entry and one plan, changed."""
    segment = GOOD_SEGMENT | (segment or {})
    entry = {"action": "alloc", "addr": 0, "size": 1, "stream": 0} | (entry or {})
    plans = [PLAN | (plan or {})]
    return {
        "segments": [segment],
        "device_traces": [[entry]],
        "tracegraph_plans": plans,
        **changes,
    }


WRONG = {
    "a list": ([], "it holds a list, not a dict"),
    "no keys": ({}, "segments is missing"),
    "no traces": ({"segments": []}, "device_traces is missing"),
    "text for segments": (wrap(segments="x"), "segments is a str, not a list"),
    "number for trace": (wrap(device_traces=[5]), "device_traces[0][0]: a int, not a dict"),
    "segment of no device": (wrap({"device": 1}), "segments[0]: device_traces has no entry 1"),
    "address of text": (wrap({"address": "0"}), "segments[0]: address is a str, not a int"),
    "gap": (wrap({"total_size": 1024}), "segments[0]: its blocks have 512 bytes together"),
    "state": (
        wrap({"blocks": [{"size": 512, "state": "free"}]}),
        "segments[0]: blocks[0]: state 'free' is none of",
    ),
    "no addr": (
        wrap(device_traces=[[{"action": "alloc", "size": 1, "stream": 0}]]),
        "device_traces[0][0]: addr is missing",
    ),
    "plan": (wrap(plan={"arena_bytes": None}), "tracegraph_plans[0]: arena_bytes is a NoneType"),
    "buffer": (wrap(plan={"buffers": [{}]}), "tracegraph_plans[0]: name is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plain_value_that_is_no_snapshot_is_refused(tmp_path, name):
    value, problem = WRONG[name]
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what == f"snapshot file {path} is not a snapshot"
    assert caught.value.why.startswith(problem)
    assert caught.value.anchor == "snapshot"


def test_the_smallest_snapshot_is_read(tmp_path):
    assert find_problem(wrap()) == ""
    path = tmp_path / "file.pickle"
    oom = {"action": "oom", "device_free": 5, "size": 1, "stream": 0}
    path.write_bytes(pickle.dumps({"segments": [GOOD_SEGMENT], "device_traces": [[oom]]}))
    assert read_snapshot(path)["segments"] == [GOOD_SEGMENT]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is empty"),
        (pickle.dumps(wrap())[:-1], "is truncated"),
        (pickle.dumps(wrap())[: len(pickle.dumps(wrap())) // 2], "is truncated"),
        (b"<html>not found</html>", "is not a pickle (ValueError"),
        (b"\x80\x09.", "is not a pickle (ValueError"),
        (b"\x80\x04h\x05.", "is not a pickle (UnpicklingError"),
        (b"\x80\x04]r\xff\xff\xff\x07.", "is not a pickle (ValueError: value 3 is stored as"),
        (pickle.dumps(nest(200)), "holds `a value that holds itself or nests too deep`"),
        (pickle.dumps(loop()), "holds `a value that holds itself or nests too deep`"),
    ],
)
def test_broken_files_are_refused(tmp_path, data, what):
    path = tmp_path / "file.pickle"
    path.write_bytes(data)
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what.startswith(f"snapshot file {path} {what}")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nowhere.pickle"
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what == f"snapshot file {path} cannot be read"
    assert caught.value.why == "FileNotFoundError: No such file or directory"


def test_damaged_bytes_end_in_our_error_or_in_a_snapshot(tmp_path):
    rng = random.Random(1)
    small = wrap()
    path = tmp_path / "file.pickle"
    refused = 0
    for _ in range(2000):
        data = bytearray(pickle.dumps(small, protocol=rng.randrange(6)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_snapshot(path)
        except TracegraphError:
            refused += 1
    assert refused > 1000
