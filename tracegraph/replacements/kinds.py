"""Kinds: XLA's names of the types that kernels of our own read and write, by JAX's names."""

from __future__ import annotations

FLOAT_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# In which matrices are stored: kernels widen them exactly.
BYTE_KINDS = {"int8": "S8", "float8_e4m3fn": "F8E4M3FN", "float8_e5m2": "F8E5M2"}
