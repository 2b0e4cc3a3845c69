"""Makes digits.csv.gz from the copy of the data set that scikit-learn carries.

Needs scikit-learn, which nothing else here needs: ``pip install scikit-learn``, then
``python examples/data/make_digits.py``. The same input gives the same file, byte for byte.
"""

from __future__ import annotations

import gzip
import pathlib

import numpy as np
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

TARGET = pathlib.Path(__file__).with_name("digits.csv.gz")


def write_digits(target: pathlib.Path) -> None:
    """Writes one line per image: 64 grey values from 0 to 16, row by row, then the digit."""
    images, digits = load_digits(return_X_y=True)
    rows = np.column_stack([images, digits]).astype(np.uint8)
    lines = "".join(",".join(map(str, row)) + "\n" for row in rows)
    # Without a time stamp the file depends on its content alone.
    target.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    write_digits(TARGET)
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")
