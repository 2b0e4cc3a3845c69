"""Calls of NVIDIA's libraries as XLA describes them: what is computed, apart from where.

A call says which operands it has by their roles, and which of these it writes. The names of types,
sides and transposes are those of JAX or one letter of BLAS; what a library calls them is known to
the room of the libraries only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, TypeAlias


@dataclasses.dataclass(frozen=True)
class Transform:
    """A batch of Fourier transforms by one cuFFT plan, not scaled.

    Operands: ``source``, ``target``, and where the plan needs one ``workspace``.

    Attributes:
        form: what goes in and out in cuFFT's letters, as ``R2C``; D and Z are doubles.
        is_inverse: the sign of the exponent.
        lengths: of the transform, one to three, the innermost last.
        source_lengths: elements of one source along the same axes.
        target_lengths: the same of one target.
        batch_count: transforms; each follows the one before.
    """

    form: str
    is_inverse: bool
    lengths: tuple[int, ...]
    source_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]
    batch_count: int = 1

    kind: ClassVar[str] = "fft"

    @property
    def written(self) -> frozenset[str]:
        """The roles that it writes: a transform to real numbers may use its source as workspace."""
        targets = {"target", "workspace"}
        return frozenset(targets | {"source"} if self.form[-1] in "RD" else targets)

    @property
    def source_size(self) -> int:
        """Elements of one source."""
        return math.prod(self.source_lengths)

    @property
    def target_size(self) -> int:
        """Elements of one target."""
        return math.prod(self.target_lengths)

    def __str__(self) -> str:
        """As ``C2C inverse of 8x8, 3 times``."""
        direction = "inverse" if self.is_inverse else "forward"
        return f"{self.form} {direction} of {'x'.join(map(str, self.lengths))}, " + (
            "once" if self.batch_count == 1 else f"{self.batch_count} times"
        )


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiplies numbers in place, as cuBLAS does.

    Operands: ``target``, and where the device asks for one ``workspace``.

    Attributes:
        dtype: JAX's name; of the numbers and of the factor.
        count: of the numbers.
        factor: rounded to the dtype already.
    """

    dtype: str
    count: int
    factor: float

    kind: ClassVar[str] = "scale"
    written: ClassVar[frozenset[str]] = frozenset(("target", "workspace"))


@dataclasses.dataclass(frozen=True)
class TriangularSolve:
    """Solves op(A) X = B or X op(A) = B for a triangular A; X takes the place of B.

    Operands: ``a``, ``b``, and where the device asks for one ``workspace``. The columns of a matrix
    follow one another.

    More than six fields because they are the arguments of cuBLAS's ``trsm``, one to one.

    Attributes:
        dtype: JAX's name.
        is_left: True for op(A) X = B.
        is_lower: which triangle of A is read.
        is_unit: True to take the diagonal of A as ones.
        transpose: ``N``, ``T`` or ``C``: what op does.
        rows: of B.
        columns: of B.
        batch_count: of the systems; each matrix follows the one before.
    """

    dtype: str
    is_left: bool
    is_lower: bool
    is_unit: bool
    transpose: str
    rows: int
    columns: int
    batch_count: int = 1

    kind: ClassVar[str] = "triangular_solve"
    written: ClassVar[frozenset[str]] = frozenset(("b", "workspace"))

    @property
    def order(self) -> int:
        """Rows, and columns, of A."""
        return self.rows if self.is_left else self.columns


LibraryCall: TypeAlias = Transform | Scale | TriangularSolve
