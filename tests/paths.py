"""Where things are in the checkout."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / "tests" / "data"
