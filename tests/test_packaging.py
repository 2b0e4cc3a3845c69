"""A bare checkout, an editable install and a wheel all give the same one top-level name."""

from __future__ import annotations

import email
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from typing import Any

import pytest

from tests.paths import ROOT

LAYERS = ("tracegraph", "lowering", "runtime")
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "docs", *LAYERS)
# What is installed, and every text that may say how.
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")),
)
# Its folder holds pages only.
PAGES_PACKAGE = "tracegraph.docs"
PIP_OPTIONS = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")

BUILD_WHEEL = """
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    assert tomllib.load(file)["build-system"]["build-backend"] == "setuptools.build_meta"
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])
"""

IMPORT_EVERYTHING = """
import importlib, pathlib, sys
import tracegraph, tracegraph.lowering, tracegraph.runtime
from tracegraph.lowering.request import CaptureRequest
from tracegraph.runtime.errors import CaptureError
for name in sys.argv[1:]:
    importlib.import_module(name)
folder = pathlib.Path(tracegraph.__file__).parent
print(folder)
print(pathlib.Path(tracegraph.lowering.__file__).parent)
from tracegraph.error_sections import describe_error
print(pathlib.Path(describe_error("callback").rpartition("Page: ")[2]).parent)
"""

LIST_NEW_MODULES = """
import sys
import jax, jax.numpy as jnp, numpy, absl
before = set(sys.modules)
import tracegraph
print(*sorted(set(sys.modules) - before))
double = tracegraph.capture(lambda x: x * 2)
double(double(jnp.ones(2)))
print(*sorted(set(sys.modules) - before))
"""
# What only a GPU, a picture or another library needs.
HEAVY = [
    "cramjam",
    "cuda",
    "google.protobuf",
    "nvmath",
    "matplotlib",
    "PIL",
    "IPython",
    "torch",
    "flax",
    "optax",
    "equinox",
    "tracegraph.lowering.assemble",
    "tracegraph.lowering.compile_gpu",
    "tracegraph.lowering.xla",
    "tracegraph.memory_pictures",
    "tracegraph.runtime.cuda",
]


def _run(*command: object, cwd: pathlib.Path, path: pathlib.Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _modules(root: pathlib.Path) -> list[str]:
    """Dotted names of every module that the three folders hold, as users import them."""
    files = sorted(file for layer in LAYERS for file in (root / layer).rglob("*.py"))
    parts = [file.relative_to(root).with_suffix("").parts for file in files]
    dotted = [
        ".".join(each if each[0] == "tracegraph" else ("tracegraph", *each)) for each in parts
    ]
    return [name.removesuffix(".__init__") for name in dotted if not name.endswith(".__main__")]


def find_packages(root: pathlib.Path) -> list[str]:
    """Returns the dotted name of every folder of the layers that holds Python files."""
    folders = {file.parent for layer in LAYERS for file in (root / layer).rglob("*.py")}
    names = [".".join(folder.relative_to(root).parts) for folder in folders]
    return sorted(n if n.split(".")[0] == "tracegraph" else f"tracegraph.{n}" for n in names)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of what is shipped, so that a build leaves nothing in the tree under test."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    # As `pip wheel` does, without the processes that it starts before.
    _run(sys.executable, "-c", BUILD_WHEEL, folder, cwd=checkout)
    (built,) = folder.glob("*.whl")
    return built


def test_bare_checkout(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code = ("-c", IMPORT_EVERYTHING, *_modules(checkout))
    folders = _run(sys.executable, *code, cwd=tmp_path, path=checkout).split()
    assert folders == [str(checkout / name) for name in ("tracegraph", "lowering", "docs")]


def test_wheel(wheel: pathlib.Path, checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "site"
    _run(sys.executable, "-m", "pip", "install", *PIP_OPTIONS, "-t", target, wheel, cwd=tmp_path)
    code = ("-c", IMPORT_EVERYTHING, *_modules(checkout))
    folders = _run(sys.executable, *code, cwd=tmp_path, path=target).split()
    inner = target / "tracegraph"
    assert folders == [str(each) for each in (inner, inner / "lowering", inner / "docs")]


def test_wheel_has_one_top_level_name(wheel: pathlib.Path, checkout: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tracegraph"}
    assert "tracegraph/py.typed" in names
    pages = {f"tracegraph/docs/{page.name}" for page in (checkout / "docs").glob("*.md")}
    assert pages == {name for name in names if name.startswith("tracegraph/docs/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {name for name in names if name.endswith(".py")}
    wanted = {
        file.relative_to(checkout).as_posix()
        for layer in LAYERS
        for file in (checkout / layer).rglob("*.py")
    }
    wanted = {name if name.startswith("tracegraph/") else f"tracegraph/{name}" for name in wanted}
    assert shipped == wanted


@functools.cache
def read_settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_is_named_unlike_the_package_of_others(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        written = email.message_from_bytes(archive.read(path))
    assert written["Name"] == "tracegraph-jax"
    extras = set(written.get_all("Provides-Extra", ()))
    assert extras == {"cuda12", "cuda13", "plots", "telemetry", "test", "dev"}


def find_wrong_installs(text: str) -> list[str]:
    """Returns what a text installs under the name of others, or with an extra that is not there."""
    extras = read_settings()["project"]["optional-dependencies"]
    strangers = re.findall(r"pip install [^`\n#]*?\"?\btracegraph\b(?!-jax)(?:\[\w+\])?", text)
    named = re.findall(r"(?<![\w-])(tracegraph-jax|tracegraph|\"\.)\[(\w+)\]", text)
    wrong = [name for name, extra in named if name == "tracegraph" or extra not in extras]
    return [*strangers, *wrong]


def test_what_a_text_installs_is_this_package() -> None:
    wrong = {path.name: find_wrong_installs(path.read_text()) for path in PAGES}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install tracegraph",
        'pip install "tracegraph[cuda13]"',
        'pip install -U tracegraph "jax[cuda13]"',
        '"tracegraph[test]"',
        'pip install "tracegraph-jax[cuda11]"',
        'pip install ".[gpu]"',
    ],
)
def test_a_wrong_install_is_noticed(text: str) -> None:
    assert find_wrong_installs(text) != []


def test_the_extra_for_developers_is_that_for_tests_and_more() -> None:
    project = read_settings()["project"]
    assert f"{project['name']}[test]" in project["optional-dependencies"]["dev"]


def test_editable_install(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = pathlib.Path(_run(python, "-c", purelib, cwd=tmp_path).strip())
    # The new environment sees what this one has installed, save an editable tracegraph: the line
    # puts the folder on the path without running the .pth files in it.
    numpy_home = pathlib.Path(sys.modules["numpy"].__file__ or "").parent.parent
    (packages / "outer.pth").write_text(f"{numpy_home}\n")
    options = (*PIP_OPTIONS, "--editable")
    # So it has pip, too, and needs no other process to start it.
    _run(python, "-m", "pip", "install", *options, checkout, cwd=tmp_path)
    code = ("-c", IMPORT_EVERYTHING, *_modules(checkout))
    folders = _run(python, *code, cwd=tmp_path).split()
    assert folders == [str(checkout / name) for name in ("tracegraph", "lowering", "docs")]
    own = {each.name.split("-")[0] for each in packages.iterdir()} & {*LAYERS, "tracegraph_jax"}
    assert own == {"tracegraph_jax"}, "only the metadata of tracegraph may be in site-packages"
    # What the errors recommend: an extra of what is installed, found without the index.
    extra = ("install", "--no-index", "--dry-run", "tracegraph-jax[plots]")
    done = _run(python, "-m", "pip", *extra, cwd=tmp_path)
    assert "matplotlib" in done
    assert "Would install" not in done


def test_package_list_is_complete() -> None:
    assert read_settings()["tool"]["setuptools"]["packages"] == sorted(
        [*find_packages(ROOT), PAGES_PACKAGE]
    )
    missing = [
        package
        for package, folder in ((name, name.split(".")) for name in find_packages(ROOT))
        if not (ROOT.joinpath(*folder) / "__init__.py").is_file()
        and not (ROOT.joinpath(*folder[1:]) / "__init__.py").is_file()
    ]
    assert missing == []


def test_a_new_folder_is_found(tmp_path: pathlib.Path) -> None:
    for name in ("tracegraph/a.py", "tracegraph/new/b.py", "lowering/xla/c.py", "runtime/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    wanted = ["tracegraph", "tracegraph.lowering.xla", "tracegraph.new", "tracegraph.runtime"]
    assert find_packages(tmp_path) == wanted


def test_import_loads_nothing_else(tmp_path: pathlib.Path) -> None:
    lines = _run(sys.executable, "-c", LIST_NEW_MODULES, cwd=tmp_path, path=ROOT).splitlines()
    imported, captured = (line.split() for line in lines)
    ours = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert ours <= {"tracegraph", "jax", "jaxlib", "numpy", "absl", "ml_dtypes", "opt_einsum"}
    assert "tracegraph.runtime.host.device" in imported
    assert find_heavy(imported) == []
    assert find_heavy(captured) == [], "a capture on the host device needs nothing of a GPU's"


def find_heavy(names: list[str]) -> list[str]:
    return [name for name in names if any(f"{name}.".startswith(f"{top}.") for top in HEAVY)]


def test_a_heavy_module_is_noticed() -> None:
    names = ["tracegraph.runtime.cuda.device", "cuda", "cudas", "tracegraph.runtime.arrays.array"]
    assert find_heavy(names) == ["tracegraph.runtime.cuda.device", "cuda"]
