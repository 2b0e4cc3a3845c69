"""`save` and `tg.load` of functions with buckets."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.processes import run_program
from tracegraph.runtime.saving.saved_file import parse_file, write_file
from tracegraph.runtime.streams.stream_capture import thread_state


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "step.tg"


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "gpu":
        monkeypatch.setattr(thread_state, "streams", [])
        capture_for_gpu(monkeypatch)


def total(x: Any) -> Any:
    is_true = (jnp.arange(x.shape[0]) < tg.bucket_size())[:, None]
    return x * 2, jnp.where(is_true, x, 0).sum(0)


def make_rows(size: int) -> Any:
    return np.arange(3.0 * size, dtype=np.float32).reshape(size, 3)


def check(step: Any, size: int) -> None:
    double, summed = step(make_rows(size))
    np.testing.assert_array_equal(double, 2 * make_rows(size))
    np.testing.assert_array_equal(summed, make_rows(size).sum(0))


def save(path: pathlib.Path) -> Any:
    step: Any = tg.capture(total, buckets={"x": {0: (2, 4, 64)}})
    step.warm_up(jax.ShapeDtypeStruct((1, 3), jnp.float32))
    step.save(path)
    return step


@pytest.mark.usefixtures("device")
def test_sizes_between_buckets_are_served_by_their_bucket(path: pathlib.Path) -> None:
    step = save(path)
    loaded: Any = tg.load(path)
    assert repr(loaded) == "<LoadedBucketedFunction total, 3 signatures>"
    assert loaded.pool_bytes == step.pool_bytes, "all sizes share one memory"
    for size in (1, 4, 40, 3, 2, 64):
        check(loaded, size)
    infos = loaded.bucket_info()
    assert [(each.bucket, each.hits, each.full) for each in infos] == [
        (2, 2, 1), (4, 2, 1), (64, 2, 1),
    ]  # fmt: skip
    assert [each.pool_bytes for each in infos] == [e.pool_bytes for e in step.bucket_info()]
    loaded.release()
    assert loaded.pool_bytes == 0
    for size in (2, 50, 2):
        check(loaded, size)
    assert loaded.pool_bytes == step.pool_bytes


def test_donated_state_beside_buckets(path: pathlib.Path) -> None:
    def add(state: Any, x: Any) -> Any:
        is_true = jnp.arange(x.shape[0]) < tg.bucket_size()
        return state + jnp.where(is_true, x, 0).sum(), x + 1

    step: Any = tg.capture(add, buckets={"x": {0: (2, 8)}}, donate_argnums=0)
    step.warm_up(jnp.zeros(()), jnp.zeros(1))
    step.save(path)
    loaded: Any = tg.load(path)
    state = jnp.zeros(())
    for size in (2, 3, 8):
        state, x = loaded(state, jnp.ones(size))
        np.testing.assert_array_equal(x, np.full(size, 2))
    assert float(state) == 13


def test_a_fresh_process(path: pathlib.Path) -> None:
    save(path)
    program = """
        import sys
        import numpy as np
        import tracegraph as tg
        double, summed = tg.load(sys.argv[1])(np.ones((3, 3), np.float32))
        print(double.shape, np.asarray(summed).tolist())
    """
    assert run_program(program, path) == "(3, 3) [3.0, 3.0, 3.0]\n"


def test_what_the_file_has_no_bucket_for(path: pathlib.Path) -> None:
    step: Any = tg.capture(total, buckets={"x": {0: (2, 4)}})
    step(make_rows(2))
    step.save(path)
    loaded: Any = tg.load(path)
    check(loaded, 1)
    with pytest.raises(tg.ReplayError, match="other arguments than the one") as raised:
        loaded(make_rows(3))
    assert "x: wanted f32[2,3], got f32[4,3]" in raised.value.where
    with pytest.raises(tg.CaptureError, match="largest"):
        loaded(make_rows(5))
    with pytest.raises(tg.ReplayError, match="inside of another program"):
        jax.jit(loaded)(make_rows(2))
    check(loaded, 2)


@pytest.mark.parametrize(
    "edit",
    [
        lambda extra: extra.clear(),
        lambda extra: extra.update(buckets=None),
        lambda extra: extra["buckets"]["rows"].pop(),
        lambda extra: _change(extra, "CheckedBucket", "results", ["t"]),
        lambda extra: _change(extra, "CheckedBucket", "bucket", ["t", 1, 2]),
        lambda extra: _change(extra, "PaddedResult", "axes", ["t", ["t", 7, "axis 0 of `x`", 1]]),
        lambda extra: _change(extra, "PaddedResult", "axes", ["t", ["t", 0, "other", 1]]),
        lambda extra: _change(extra, "SavedBuckets", "checked", ["t"]),
    ],
)
def test_buckets_that_do_not_fit_their_graphs(
    path: pathlib.Path, edit: Callable[[Any], None]
) -> None:
    save(path)
    file = parse_file(path.read_bytes(), str(path))
    edit(file.content["extra"])
    write_file(path, file.content, [bytes(blob) for blob in file.blobs])
    with pytest.raises(tg.SavedFileError, match="cannot be loaded"):
        tg.load(path)


def _change(extra: Any, kind: str, field: str, value: Any) -> None:
    types = extra["buckets"]["types"]
    number = next(i for i, names in enumerate(types) if names[0] == kind)
    for row in extra["buckets"]["rows"]:
        if row[0] == number:
            row[types[number].index(field)] = value
