"""Convolutions that are tried on a GPU, and compiled for one that is only described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

# Features are the last dimension.
LAST = ("NHWC", "HWIO", "NHWC")


def make_convolution(
    strides: tuple[int, ...] = (1, 1), dimension_numbers: Any = LAST, **options: Any
) -> Callable[..., Any]:
    """Returns a convolution of two arrays with the padding that keeps sizes."""

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w, strides, "SAME", dimension_numbers=dimension_numbers, **options
        )

    return convolve
