"""The fake of a GPU whose kernels are regions: it reaches every capture."""

from __future__ import annotations

import importlib
import pathlib

import tracegraph
from tests.fakes.regions_as_kernels import DOORS

# It asks for the device's allocator of host memory, which the fake has none of.
OTHERS = {"tracegraph.user_memory.pinned_memory"}


def test_every_module_that_asks_for_the_device_gets_the_fake() -> None:
    folder = pathlib.Path(tracegraph.__file__).parent
    names = {
        ".".join(("tracegraph", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
        if "import find_device\n" in path.read_text()
    }
    assert {importlib.import_module(name) for name in names - OTHERS} == set(DOORS)
