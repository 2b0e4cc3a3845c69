"""Stand-ins for cuFFT and cuBLAS that compute with NumPy on host memory, and misbehave as allowed.

A transform to real numbers spoils its source, a workspace is written, and setting the stream of a
handle of cuBLAS takes its workspace away.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fakes.fake_driver import FakeDriver

DTYPES = {"R": np.float32, "C": np.complex64, "D": np.float64, "Z": np.complex128}
BLAS = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}
FFT_MAPS = "7f00-7f10 r-xp 0 08:01 42   /opt/libcufft.so.12\n"
BLAS_MAPS = "7f20-7f30 r-xp 0 08:01 43   /opt/libcublas.so.13\n"


class CufftFailure(Exception):
    """What the bindings of cuFFT raise when a call fails."""


class CublasFailure(Exception):
    """What the bindings of cuBLAS raise when a call fails."""


class FftType(enum.IntEnum):
    """cufftType."""

    R2C = 42
    C2R = 44
    C2C = 41
    D2Z = 106
    Z2D = 108
    Z2Z = 105


def view(address: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Returns the numbers at an address."""
    nbytes = count * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(dtype)


class FakeFft:
    """The module ``cufft``.

    Args:
        driver: captures the work.

    Attributes:
        calls: names of the calls and their arguments.
        alive: plans that are not destroyed, with what is known of each.
        fail_on: name of the call that fails next.
        workspace_bytes: what every plan needs.
    """

    Type = FftType

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.alive: dict[int, dict[str, Any]] = {}
        self.fail_on = ""
        self.cuFFTError = CufftFailure
        self.workspace_bytes = 64
        self._numbers = itertools.count(1)
        for form in FftType.__members__:
            setattr(self, f"exec_{form.lower()}", functools.partial(self._execute, form))

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name == self.fail_on:
            self.fail_on = ""
            raise CufftFailure("CUFFT_INVALID_PLAN")

    def create(self) -> int:
        self._record("create")
        plan = next(self._numbers)
        self.alive[plan] = {"stream": 0, "area": 0, "auto": 1}
        return plan

    def destroy(self, plan: int) -> None:
        self.calls.append(("destroy", (plan,)))
        del self.alive[plan]

    def set_auto_allocation(self, plan: int, auto: int) -> None:
        self._record("set_auto_allocation", plan, auto)
        self.alive[plan]["auto"] = auto

    def make_plan_many64(self, plan: int, rank: int, *rest: Any) -> int:
        self._record("make_plan_many64", plan, rank, *rest)
        lengths, inner, stride, distance, outer, outer_stride, outer_distance, form, batch = rest
        assert len(lengths) == len(inner) == len(outer) == rank
        assert (stride, outer_stride) == (1, 1)
        assert (distance, outer_distance) == (np.prod(inner), np.prod(outer))
        known = self.alive[plan]
        assert not known["auto"]
        known |= {"lengths": lengths, "inner": inner, "outer": outer, "batch": batch}
        known["form"] = FftType(form).name
        return self.workspace_bytes

    def set_stream(self, plan: int, stream: int) -> None:
        self._record("set_stream", plan, stream)
        self.alive[plan]["stream"] = stream

    def set_work_area(self, plan: int, area: int) -> None:
        self._record("set_work_area", plan, area)
        self.alive[plan]["area"] = area

    def _execute(self, form: str, plan: int, source: int, target: int, sign: int = 0) -> None:
        self._record(f"exec_{form.lower()}", plan, source, target, sign)
        known = dict(self.alive[plan])
        assert known["form"] == form
        assert known["area"] or not self.workspace_bytes
        spoil = functools.partial(ctypes.memset, known["area"], 0xFF, self.workspace_bytes)
        work = functools.partial(transform, known, source, target, sign, spoil)
        self.driver.add_captured(known["stream"], work)


def transform(
    known: dict[str, Any], source: int, target: int, sign: int, spoil: Callable[[], Any]
) -> None:
    """Does what a plan does, not scaled."""
    letters, batch = known["form"].split("2"), known["batch"]
    sizes = {"inner": (batch, *known["inner"]), "outer": (batch, *known["outer"])}
    old = view(source, int(np.prod(sizes["inner"])), DTYPES[letters[0]])
    new = view(target, int(np.prod(sizes["outer"])), DTYPES[letters[1]])
    values = old.reshape(sizes["inner"]).copy()
    axes = tuple(range(1, 1 + len(known["lengths"])))
    count = np.prod(known["lengths"])
    spoil()
    if letters[1] in "RD":
        old[...] = np.nan
        result = np.fft.irfftn(values, known["lengths"], axes) * count
    elif letters[0] in "RD":
        result = np.fft.rfftn(values, known["lengths"], axes)
    elif sign == 1:
        result = np.fft.ifftn(values, known["lengths"], axes) * count
    else:
        result = np.fft.fftn(values, known["lengths"], axes)
    new[...] = result.ravel()


class FakeBlas:
    """The module ``cublas``; attributes as those of `FakeFft`.

    Args:
        driver: captures the work.
    """

    SideMode = enum.IntEnum("SideMode", [("LEFT", 0), ("RIGHT", 1)])
    FillMode = enum.IntEnum("FillMode", [("LOWER", 0), ("UPPER", 1)])
    Operation = enum.IntEnum("Operation", [("N", 0), ("T", 1), ("C", 2)])
    DiagType = enum.IntEnum("DiagType", [("NON_UNIT", 0), ("UNIT", 1)])

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.alive: list[int] = []
        self.fail_on = ""
        self.cuBLASError = CublasFailure
        self.stream, self.workspace = 0, (0, 0)
        for letter in BLAS:
            for name in ("scal", "trsm", "trsm_batched"):
                call = functools.partial(getattr(self, f"_{name}"), letter)
                setattr(self, f"{letter}{name}", call)

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name == self.fail_on:
            self.fail_on = ""
            raise CublasFailure("CUBLAS_STATUS_INVALID_VALUE")

    def create(self) -> int:
        self._record("create")
        self.alive.append(0xB1A5)
        return 0xB1A5

    def destroy(self, handle: int) -> None:
        self.alive.remove(handle)

    def set_stream(self, handle: int, stream: int) -> None:
        assert handle in self.alive
        self._record("set_stream", stream)
        self.stream, self.workspace = stream, (0, 0)

    def set_workspace(self, handle: int, address: int, nbytes: int) -> None:
        assert handle in self.alive
        self._record("set_workspace", address, nbytes)
        self.workspace = address, nbytes

    def _scal(self, letter: str, handle: int, count: int, alpha: int, x: int, step: int) -> None:
        assert handle in self.alive
        assert step == 1
        factor = view(alpha, 1, BLAS[letter])[0]
        self._record(f"{letter}scal", count, factor, x)

        def scale() -> None:
            view(x, count, BLAS[letter])[...] *= factor

        self.driver.add_captured(self.stream, scale)

    def _trsm(self, letter: str, handle: int, *arguments: int) -> None:
        self._record(f"{letter}trsm", *arguments)
        *options, alpha, a, lda, b, ldb = arguments
        self._solve(letter, handle, options, alpha, (lda, ldb), lambda: [(a, b)])

    def _trsm_batched(self, letter: str, handle: int, *arguments: int) -> None:
        self._record(f"{letter}trsm_batched", *arguments)
        *options, alpha, a, lda, b, ldb, count = arguments

        def read_pairs() -> list[tuple[int, int]]:
            tables = (view(table, count, np.uint64).tolist() for table in (a, b))
            return list(zip(*tables, strict=True))

        self._solve(letter, handle, options, alpha, (lda, ldb), read_pairs)

    def _solve(
        self,
        letter: str,
        handle: int,
        options: Sequence[int],
        alpha: int,
        leading: tuple[int, int],
        read_pairs: Callable[[], list[tuple[int, int]]],
    ) -> None:
        side, fill, operation, diagonal, m, n = options
        order = m if side == self.SideMode.LEFT else n
        assert handle in self.alive
        assert view(alpha, 1, BLAS[letter])[0] == 1
        assert leading == (order, m)
        address, nbytes = self.workspace

        def solve() -> None:
            ctypes.memset(address, 0xFF, nbytes)
            for a, b in read_pairs():
                matrix = view(a, order * order, BLAS[letter]).reshape(order, order, order="F")
                matrix = np.tril(matrix) if fill == self.FillMode.LOWER else np.triu(matrix)
                if diagonal == self.DiagType.UNIT:
                    matrix = matrix - np.diag(np.diag(matrix)) + np.eye(order)
                matrix = [matrix, matrix.T, matrix.conj().T][operation]
                right = view(b, m * n, BLAS[letter]).reshape(n, m).T
                if side == self.SideMode.LEFT:
                    right[...] = np.linalg.solve(matrix, right)
                else:
                    right[...] = np.linalg.solve(matrix.T, right.T).T

        self.driver.add_captured(self.stream, solve)


def make_libraries(driver: FakeDriver) -> Any:
    """Returns a stand-in for ``nvmath`` with both modules."""
    return SimpleNamespace(bindings=SimpleNamespace(cufft=FakeFft(driver), cublas=FakeBlas(driver)))
