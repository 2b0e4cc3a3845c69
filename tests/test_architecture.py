"""The import law holds in this tree, and every rule fires on a planted fault."""

from __future__ import annotations

import pathlib

import pytest

from tests.oracles import architecture_rules as rules
from tests.paths import ROOT

CLEAN_TREE = {
    "tracegraph/__init__.py": "from tracegraph.decorator import capture as capture\n",
    "tracegraph/decorator.py": (
        "import jax\n"
        "from tracegraph.lowering import build\n"
        "from tracegraph.runtime.errors import Bad\n"
        "def capture(): return build, Bad, jax.__version__\n"
    ),
    "tracegraph/jax_internals.py": "from jax._src import core\n",
    "lowering/__init__.py": "",
    "lowering/build.py": "from tracegraph.runtime import errors\n",
    "lowering/planning/memory_plan.py": "import numpy\nfrom tracegraph.lowering.planning.lifetimes import find\n",
    "lowering/planning/lifetimes.py": "def find(): return 1\n",
    "runtime/__init__.py": "",
    "runtime/errors.py": "class Bad(Exception): pass\n",
    "runtime/cuda/driver/driver.py": "from cuda.bindings import driver\n",
    "runtime/cuda/device.py": "from tracegraph.runtime.cuda.driver import driver\n",
    "runtime/host/device.py": "from tracegraph.runtime import errors\n",
    "runtime/default_device.py": (
        "from tracegraph.runtime.cuda.device import find\nfrom tracegraph.runtime.host import device\n"
    ),
    "runtime/memory/caching/__init__.py": "",
    "runtime/memory/caching/block.py": "from tracegraph.runtime.memory import pool\n",
    "runtime/memory/allocator.py": "from tracegraph.runtime.memory.caching.block import pool\n",
    "runtime/memory/pool.py": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Pool:\n    a: int\n"
    ),
}

SEVEN_FIELDS = "".join(f"    f{i}: int\n" for i in range(7))
RECORD_HEAD = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass R:\n"
FAULTS = [
    pytest.param(rule, path, text, message, id=f"{rule.__name__}-{index}")
    for index, (rule, path, text, message) in enumerate(
        [
            (rules.check_layers, "runtime/x.py", "import tracegraph.lowering.build", "x.py:1: runtime imports lowering"),
            (rules.check_layers, "runtime/x.py", "import tracegraph as tg", "runtime imports tracegraph"),
            (rules.check_layers, "lowering/x.py", "\nfrom tracegraph.decorator import capture", "x.py:2: lowering imports tracegraph"),
            (rules.check_layers, "lowering/x.py", "from tracegraph import decorator", "lowering imports tracegraph"),
            (rules.check_layers, "tracegraph/x.py", "from runtime import errors", "users have it as `tracegraph.runtime.errors`"),
            (rules.check_layers, "tracegraph/x.py", "from . import decorator", "relative import"),
            (rules.check_local_imports, "lowering/x.py", "def f():\n  if 1:\n    import tracegraph.runtime.errors", "x.py:3: imports `tracegraph.runtime.errors` inside"),
            (rules.check_local_imports, "tracegraph/x.py", "class A:\n  def f(self):\n    from .decorator import capture", "inside a function"),
            (rules.check_local_imports, "tracegraph/x.py", "import importlib\ndef f(): return importlib.import_module('tracegraph.lowering')", "inside a function"),
            (rules.check_local_imports, "lowering/x.py", "def f(): return import_late('tracegraph.runtime.errors', 'Bad')", "inside a function"),
            (rules.check_layers, "runtime/x.py", "find = import_late('tracegraph.lowering.build', 'find')", "x.py:1: runtime imports lowering"),
            (rules.check_devices, "lowering/x.py", "find = import_late('tracegraph.runtime.cuda.device', 'find')", "imports `tracegraph.runtime.cuda.device`"),
            (rules.check_cycles, "lowering/planning/lifetimes.py", "from tracegraph.lowering.planning.memory_plan import x", "tracegraph.lowering.planning.lifetimes -> tracegraph.lowering.planning.memory_plan -> tracegraph.lowering.planning.lifetimes"),
            (rules.check_cycles, "tracegraph/decorator.py", "import tracegraph", "tracegraph -> tracegraph.decorator -> tracegraph"),
            (rules.check_cycles, "runtime/x.py", "from tracegraph.runtime.x import y", "import cycle"),
            (rules.check_rooms, "runtime/memory/pool.py", "from tracegraph.runtime.memory.caching import block", "runtime/memory/caching: import cycle caching -> pool.py -> caching, at runtime/memory/caching/block.py:1, runtime/memory/pool.py:1"),
            (rules.check_rooms, "runtime/memory/caching/store.py", "\nimport tracegraph.runtime.memory.allocator", "allocator.py -> caching -> allocator.py, at runtime/memory/allocator.py:1, runtime/memory/caching/store.py:2"),
            (rules.check_rooms, "runtime/memory/pool.py", "from tracegraph.runtime.memory import allocator", "allocator.py -> caching -> pool.py -> allocator.py"),
            (rules.check_driver, "runtime/cuda/graphs/graph.py", "from cuda.bindings import driver", "graph.py:1: imports `cuda.bindings.driver`"),
            (rules.check_driver, "runtime/cuda/graphs/graph.py", "from cuda.bindings.driver import cuInit", "only runtime/cuda/driver/driver.py may"),
            (rules.check_driver, "runtime/cuda/graphs/graph.py", "import cuda.bindings as b", "only runtime/cuda/driver/driver.py may"),
            (rules.check_devices, "tracegraph/x.py", "\nfrom tracegraph.runtime.cuda.device import CudaDevice", "x.py:2: imports `tracegraph.runtime.cuda.device.CudaDevice`"),
            (rules.check_devices, "lowering/x.py", "from tracegraph.runtime import host", "imports `tracegraph.runtime.host`"),
            (rules.check_devices, "runtime/x.py", "import tracegraph.runtime.cuda.driver.driver", "only runtime/default_device.py knows"),
            (rules.check_devices, "runtime/cuda/x.py", "from tracegraph.runtime.host.device import HostDevice", "cuda/x.py:1: imports"),
            (rules.check_private_jax, "tracegraph/x.py", "from jax._src import core", "`jax._src.core`"),
            (rules.check_private_jax, "lowering/x.py", "import jax.extend.core", "`jax.extend.core`"),
            (rules.check_private_jax, "lowering/x.py", "import jax\njax.extend.core.Literal", "x.py:2: touches private"),
            (rules.check_private_jax, "lowering/x.py", "from jax import lax as l\nl._f()", "`jax.lax._f`"),
            (rules.check_private_jax, "lowering/x.py", "import jax.numpy as jnp\njnp._f()", "`jax.numpy._f`"),
            (rules.check_private_jax, "runtime/x.py", "import jaxlib.xla_client", "`jaxlib.xla_client`"),
            (rules.check_private_jax, "runtime/x.py", "import jaxlib\njaxlib.xla_client", "`jaxlib.xla_client`"),
            (rules.check_pure_places, "runtime/memory/pool.py", "import jax.numpy", "pool.py: reaches jax"),
            (rules.check_pure_places, "runtime/memory/providers/x.py", "from cuda.bindings import nvrtc", "reaches cuda"),
            (rules.check_pure_places, "lowering/planning/lifetimes.py", "import jax", "memory_plan.py: reaches jax through tracegraph.lowering.planning.lifetimes"),
            (rules.check_file_lengths, "lowering/x.py", "a = 1\n" * 401, "401 lines"),
            (rules.check_file_lengths, "tests/lowering/test_x.py", "a = 1\n" * 401, "tests/lowering/test_x.py: 401 lines"),
            (rules.check_module_names, "tracegraph/capture.py", "", "named like the public `capture`"),
            (rules.check_module_names, "tracegraph/capture/__init__.py", "", "named like the public `capture`"),
            (rules.check_records, "runtime/x.py", RECORD_HEAD + SEVEN_FIELDS, "x.py:3: record `R` has 7 fields"),
            (rules.check_records, "runtime/x.py", "from dataclasses import dataclass\n@dataclass\nclass R:\n  a: int", "`R` is not frozen"),
            (rules.check_type_names, "tracegraph/x.py", "\nclass Pool: pass", "tracegraph/x.py:2: `Pool` is a type of runtime/memory/pool.py too"),
            (rules.check_type_names, "tracegraph/x.py", "Pool: TypeAlias = dict[str, int]", "x.py:1: `Pool` is a type of runtime/memory/pool.py too"),
            (rules.check_error_names, "runtime/x.py", "def refuse(): pass", "x.py:1: `refuse` is no name of this idiom"),
            (rules.check_error_names, "runtime/x.py", "def _refuse_size(): pass", "`_refuse_size` is no name of this idiom"),
            (rules.check_error_names, "tracegraph/x.py", "def report_all(): pass", "`report_all` is no name of this idiom"),
            (rules.check_error_names, "lowering/x.py", "def find_fault() -> BadError: pass", "`find_fault` returns an error"),
            (rules.check_error_names, "lowering/x.py", "def make_fault() -> errors.BadError | WorseError: pass", "`make_fault` returns an error"),
            (rules.check_error_names, "runtime/x.py", "class A:\n  async def _make_it(self) -> 'BadError': pass", "x.py:2: `_make_it` returns an error"),
            (rules.check_error_names, "runtime/x.py", "def fail() -> NoReturn: pass", "`fail` always raises"),
            (rules.check_error_names, "runtime/x.py", "def fail() -> typing.NoReturn: pass", "`fail` always raises"),
            (rules.check_error_names, "runtime/x.py", "def _raise_late() -> None: pass", "`_raise_late` is to return NoReturn"),
            (rules.check_error_names, "runtime/x.py", "def raise_late(): pass", "`raise_late` is to return NoReturn"),
            (rules.check_error_names, "tracegraph/x.py", "def _describe(op) -> Violation: pass", "`_describe` returns a violation"),
            (rules.check_error_names, "tracegraph/x.py", "def find_it(op) -> Violation: pass", "`find_it` returns a violation"),
            (rules.check_error_names, "tracegraph/x.py", "def check_op(op) -> Violation | None: pass", "`check_op` looks for a violation"),
        ]
    )
]  # fmt: skip
LEGAL_NEIGHBOURS = [
    pytest.param(rule, path, text, id=f"{rule.__name__}-{index}")
    for index, (rule, path, text) in enumerate(
        [
            (rules.check_layers, "tracegraph/x.py", "import tracegraph.runtime.errors, runtimes"),
            (rules.check_local_imports, "tracegraph/x.py", "def f():\n  import numpy"),
            (rules.check_cycles, "tracegraph/x.py", "from tracegraph.decorator import capture"),
            (rules.check_rooms, "runtime/memory/caching/store.py", "from tracegraph.runtime.memory.caching import block"),
            (rules.check_rooms, "runtime/memory/snapshots/x.py", "from tracegraph.runtime.memory import allocator, caching"),
            (rules.check_rooms, "runtime/cuda/graphs/x.py", "from tracegraph.runtime.memory import allocator"),
            (rules.check_driver, "runtime/cuda/x.py", "from cuda.bindings import nvrtc"),
            (rules.check_devices, "tracegraph/x.py", "from tracegraph.runtime import hosts, default_device"),
            (rules.check_devices, "runtime/cuda/graphs/x.py", "from tracegraph.runtime.cuda.buffer import CudaBuffer"),
            (rules.check_private_jax, "lowering/x.py", "import jax\njax.numpy.sin, jax.__version__, a._b"),
            (rules.check_private_jax, "lowering/x.py", "import jaxlib\njaxlib.__file__"),
            (rules.check_pure_places, "runtime/arrays/array.py", "import jax"),
            (rules.check_file_lengths, "lowering/x.py", '"""T, past 400\nlines because x."""\n' + "a = 1\n" * 500),
            (rules.check_file_lengths, "lowering/x.py", "a = 1\n" * 400),
            (rules.check_module_names, "tracegraph/__init__.py", "from tracegraph import decorator as decorator"),
            (rules.check_records, "runtime/x.py", RECORD_HEAD + '    """R. More than six\n    fields because x."""\n' + SEVEN_FIELDS),
            (rules.check_records, "runtime/x.py", RECORD_HEAD + "    a: ClassVar[int]\n" + SEVEN_FIELDS[:-12]),
            (rules.check_type_names, "tracegraph/x.py", "class _Pool: pass\nclass Bads: pass\nPool = _Pool"),
            (rules.check_type_names, "tracegraph/x.py", "Pool: TypeAlias = Any\nBad: int = 1"),
            (rules.check_type_names, "runtime/ffi/c_api.py", "class Pool: pass"),
            (rules.check_error_names, "runtime/x.py", "def make_late_error() -> BadError | WorseError: pass"),
            (rules.check_error_names, "runtime/x.py", "class A(pickle.Unpickler):\n  def find_class(self) -> NoReturn: pass"),
            (rules.check_error_names, "runtime/x.py", "def _raise_late_error() -> NoReturn: pass\nclass FooError: pass"),
            (rules.check_error_names, "runtime/x.py", "def refused(): pass\ndef report(): pass\ndef _make_report(): pass"),
            (rules.check_error_names, "tracegraph/x.py", "def translate(error) -> BadError | None: pass"),
            (rules.check_error_names, "tracegraph/x.py", "def find_op_violation() -> Violation | None: pass\ndef _make_violation() -> Violation: pass"),
        ]
    )
]  # fmt: skip


def _write_tree(root: pathlib.Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps_the_law(rule: rules.Rule) -> None:
    assert rules.read_sources(ROOT), f"no sources below {ROOT}"
    found = rule(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_has_no_violations(rule: rules.Rule, tmp_path: pathlib.Path) -> None:
    _write_tree(tmp_path, CLEAN_TREE)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(("rule", "path", "text", "message"), FAULTS)
def test_a_planted_fault_is_found(
    rule: rules.Rule, path: str, text: str, message: str, tmp_path: pathlib.Path
) -> None:
    _write_tree(tmp_path, {**CLEAN_TREE, path: text})
    found = rule(tmp_path)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(("rule", "path", "text"), LEGAL_NEIGHBOURS)
def test_a_legal_neighbour_is_not_found(
    rule: rules.Rule, path: str, text: str, tmp_path: pathlib.Path
) -> None:
    _write_tree(tmp_path, {**CLEAN_TREE, path: text})
    assert rule(tmp_path) == []


def test_every_rule_has_a_planted_fault() -> None:
    assert {fault.values[0] for fault in FAULTS} == set(rules.RULES)
