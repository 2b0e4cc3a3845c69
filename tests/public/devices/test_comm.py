"""tg.comm: values, devices and refusals; on three CPU devices in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_program

X = jnp.arange(6.0).reshape(2, 3)

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg
from tracegraph import comm

devices = jax.devices()
first, second, third = devices
host = np.arange(10, dtype=np.float32).reshape(2, 5)
there = jax.device_put(host, second)

def check(found, wanted, device):
    assert found.devices() == {device} and found.committed, (found.devices(), device)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted), (found, wanted)

# broadcast: from the host, from a device, to some, in the order asked for.
for source in (host, there):
    for found, device in zip(comm.broadcast(source), devices, strict=True):
        check(found, host, device)
    third_copy, first_copy = comm.broadcast(source, devices=[2, first])
    check(third_copy, host, third)
    check(first_copy, host, first)
key = jax.random.key(7)
moved = comm.broadcast(key, [1])[0]
assert moved == jax.device_put(key, second) and moved.devices() == {second}

# scatter and gather: equal pieces, fewer pieces than devices, given sizes, both ends of `dim`.
for source in (host, there):
    for dim in (1, -1):
        pieces = comm.scatter(source, dim=dim)
        for piece, wanted, device in zip(pieces, (host[:, :2], host[:, 2:4], host[:, 4:]), devices):
            check(piece, wanted, device)
        check(comm.gather(pieces, dim=dim, destination=1), host, second)
    pieces = comm.scatter(source)
    assert len(pieces) == 2
    check(pieces[1], host[1:], second)
    one, none, rest = comm.scatter(source, [2, 0, 1], chunk_sizes=(1, 0, np.int64(4)), dim=1)
    check(one, host[:, :1], third)
    check(none, host[:, :0], first)
    check(rest, host[:, 1:], second)
assert [piece.shape for piece in comm.scatter(host[:0])] == [(0, 5)] * 3

# reduce_add: anywhere to anywhere, the current device where none is named.
copies = comm.broadcast(host)
check(comm.reduce_add(copies, destination=third), host * 3, third)
check(comm.reduce_add([host, there]), host * 2, first)
with tg.device(1):
    check(comm.reduce_add(copies), host * 3, second)
    check(comm.gather(copies), np.concatenate([host] * 3), second)

# In the order of the arrays, wherever the sum is.
parts = [np.float32([1e8]), np.float32([1.0]), np.float32([-1e8])]
spread = [jax.device_put(part, device) for part, device in zip(parts, devices)]
for device in devices:
    check(comm.reduce_add(spread, device), (parts[0] + parts[1]) + parts[2], device)

# Coalesced: the same values, and as many copies as buffers.
arrays = [np.full(n, n, dtype) for n in range(1, 9) for dtype in ("f4", "i4")]
arrays = [jax.device_put(array, second) for array in arrays]
put, counts = jax.device_put, []
def count(value, device):
    counts.append(value.size)
    return put(value, device)
jax.device_put = count
copies = comm.broadcast_coalesced(arrays, [0, 2])
assert counts == [36] * 4, counts
counts.clear()
limited = comm.broadcast_coalesced(arrays, [0, 2], buffer_size=48)
# 1+2+3+4, 5+6, 7, 8 elements of each dtype, on two devices.
assert sorted(counts) == sorted([10, 11, 7, 8] * 2 * 2), counts
counts.clear()
lists = [[put(array, device) for array in arrays] for device in devices]
sums = comm.reduce_add_coalesced(lists, destination=2)
assert counts == [36] * 6, counts
jax.device_put = put
for found in (copies, limited):
    for device, row in zip((first, third), found, strict=True):
        for copy, array in zip(row, arrays, strict=True):
            check(copy, np.asarray(array), device)
for total, array in zip(sums, arrays, strict=True):
    check(total, np.asarray(array) * 3, third)

# Arrays of a list on different devices cannot be joined, and are still added.
mixed = [put(host, first), put(host, second)]
for total in comm.reduce_add_coalesced([mixed, mixed[::-1]]):
    check(total, host * 2, first)

# The results of captured functions go in, and what comes out goes to captured functions.
step = tg.capture(lambda w, x: (w + x, (w * x).sum()), donate_argnums=0)
totals = []
for index, piece in enumerate(comm.scatter(host, [0, 1])):
    with tg.device(index):
        w, total = step(jnp.ones((1, 5)), piece)
        w, total = step(w, piece)
        totals.append((w, total))
check(comm.gather([w for w, _ in totals], destination=1), host * 2 + 1, second)
check(comm.reduce_add([total for _, total in totals]), np.float32((host * (host + 1)).sum()), first)
print("ok")
"""


def test_three_devices() -> None:
    flags = "--xla_force_host_platform_device_count=3"
    assert run_program(PROGRAM, XLA_FLAGS=flags) == "ok\n"


REFUSALS: list[tuple[Callable[[], Any], str, str]] = [
    (
        lambda: tg.comm.broadcast([1.0]),
        "`tensor` is of type list",
        "argument `tensor` of broadcast()",
    ),
    (lambda: tg.comm.broadcast(X, []), "`devices` is empty", "argument `devices` of broadcast()"),
    (lambda: tg.comm.broadcast(X, 0), "`devices` is of type int", "argument `devices`"),  # pyright: ignore[reportArgumentType]
    (lambda: tg.comm.broadcast(X, [0, 64]), "`devices[1]` is 64", "argument `devices[1]`"),
    (lambda: tg.comm.broadcast_coalesced(X), "`tensors` is of type ArrayImpl", "`tensors`"),
    (lambda: tg.comm.broadcast_coalesced([X], [0], 0), "`buffer_size` is 0", "`buffer_size`"),
    (lambda: tg.comm.scatter(X, [0], dim=2), "`dim` is 2", "argument `dim` of scatter()"),
    (lambda: tg.comm.scatter(X[0, 0], [0]), "`dim` is 0", "argument `dim` of scatter()"),
    (lambda: tg.comm.scatter(X, [0], [3]), "`chunk_sizes` is [3]", "argument `chunk_sizes`"),
    (lambda: tg.comm.scatter(X, [0], [1, 1]), "`chunk_sizes` is [1, 1]", "`chunk_sizes`"),
    (lambda: tg.comm.scatter(X, [0, 0], [3, -1]), "`chunk_sizes` is [3, -1]", "`chunk_sizes`"),
    (lambda: tg.comm.gather([]), "`tensors` is empty", "argument `tensors` of gather()"),
    (
        lambda: tg.comm.gather([X, X[:, :2]]),
        "`tensors[1]` is float32[2,2], and `tensors[0]` is float32[2,3]",
        "argument `tensors[1]` of gather()",
    ),
    (lambda: tg.comm.gather([X], destination=-1), "`destination` is -1", "`destination`"),
    (
        lambda: tg.comm.reduce_add([X, X, X.astype(int)]),
        "`inputs[2]` is int32[2,3], and `inputs[0]` is float32[2,3]",
        "argument `inputs[2]` of reduce_add()",
    ),
    (lambda: tg.comm.reduce_add([jax.random.key(0)]), "`inputs[0]` is of dtype key", "`inputs[0]`"),
    (
        lambda: tg.comm.reduce_add_coalesced([[X], [X, X]]),
        "`inputs[1]` has 2 arrays, and `inputs[0]` has 1",
        "argument `inputs` of reduce_add_coalesced()",
    ),
    (
        lambda: tg.comm.reduce_add_coalesced([[X, X], [X, X[0]]]),
        "`inputs[1][1]` is float32[3], and `inputs[0][1]` is float32[2,3]",
        "argument `inputs[1][1]`",
    ),
]


@pytest.mark.parametrize(("call", "what", "where"), REFUSALS)
def test_wrong_arguments_are_named(call: Callable[[], Any], what: str, where: str) -> None:
    with pytest.raises(tg.ConfigError) as raised:
        call()
    assert raised.value.what.startswith(what)
    assert where in raised.value.where
    assert len(str(raised.value).splitlines()) == 4
    assert raised.value.anchor in ("comm", "device")


@pytest.mark.parametrize("trace", [jax.jit, tg.capture])
def test_nothing_moves_while_a_function_is_traced(trace: Any) -> None:
    with pytest.raises(tg.CaptureError) as raised:
        trace(lambda x: tg.comm.broadcast(x, [0])[0] * 2)(X)
    assert raised.value.what == "broadcast() is called while a function is being traced"
    assert raised.value.anchor == "several-devices"
    # What is closed over has a value, and still no place in a graph.
    with pytest.raises(tg.CaptureError):
        tg.capture(lambda x: tg.comm.reduce_add([X, X]) + x)(X)


def test_an_output_must_not_be_given() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        tg.comm.broadcast(X, out=[X])  # pyright: ignore[reportCallIssue]


def test_state_in_a_graphs_memory_is_copied_as_it_is_now() -> None:
    step = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = step(step(jnp.zeros(3)))
    (copy,) = tg.comm.broadcast(state, [0])
    state = step(state)
    np.testing.assert_array_equal(copy, np.full(3, 2.0, np.float32))
    np.testing.assert_array_equal(state, np.full(3, 3.0, np.float32))
