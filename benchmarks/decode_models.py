"""Shapes of decoders, and random weights for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    More than six fields because these are the numbers that name a model.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    context: int

    @property
    def head_width(self) -> int:
        """Elements of a query."""
        return self.width // self.heads

    def list_matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the weights of a layer: rows and columns, by name."""
        keys = self.groups * self.head_width
        return {
            "query": (self.width, self.width),
            "key": (self.width, keys),
            "value": (self.width, keys),
            "out": (self.width, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

    def count_bytes(self) -> int:
        """Returns the bytes of the weights that a token needs; rows of the table are left out."""
        matrices = sum(rows * columns for rows, columns in self.list_matrices().values())
        return 2 * (self.layers * matrices + self.width * self.vocabulary)


SHAPES = {
    "llama_1b": Shape(16, 2048, 32, 8, 8192, 128_256, 512),
    "llama_8b": Shape(32, 4096, 32, 8, 14_336, 128_256, 512),
    "small": Shape(8, 1024, 16, 8, 3072, 4096, 512),
    "tiny": Shape(2, 16, 4, 2, 32, 24, 8),
}


class Weights:
    """Random weights, the same in each process: pieces of one block of numbers."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
        self._block = numbers.astype(ml_dtypes.bfloat16)
        self._rng = np.random.default_rng(1)

    def draw(self, rows: int, columns: int) -> np.ndarray[Any, Any]:
        """Returns a matrix whose products keep the scale of what they are given."""
        count, size = rows * columns, self._block.size
        start = int(self._rng.integers(size))
        scaled = (np.roll(self._block, -start) * (rows**-0.5)).astype(self._block.dtype)
        return np.tile(scaled, -(-count // size))[:count].reshape(rows, columns)

    def make_model(self, shape: Shape, place: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns all weights, each placed on a device when it is made."""
        gain = place(np.ones(shape.width, self._block.dtype))
        blocks = []
        for _ in range(shape.layers):
            matrices = shape.list_matrices().items()
            block = {name: place(self.draw(*sizes)) for name, sizes in matrices}
            blocks.append(block | {"norm_1": gain, "norm_2": gain})
        table = place(self.draw(shape.vocabulary, shape.width))
        head = place(self.draw(shape.width, shape.vocabulary))
        return {"table": table, "blocks": blocks, "norm": gain, "head": head}
