"""Rules of names: a type's stands once, a function of errors says what it does with them."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

from tests.oracles.architecture_sources import list_nodes, read_sources

# Its structures are called as in XLA's header.
HEADER_FILE = "runtime/ffi/c_api.py"
# They override methods of `pickle.Unpickler` and `argparse.ArgumentParser`.
NAMED_BY_PYTHON = ("find_class", "error")


def check_type_names(root: pathlib.Path) -> list[str]:
    """A name means one thing: no two files have public classes or aliases of one name."""
    places: dict[str, str] = {}
    return [
        f"{source.path}:{node.lineno}: `{name}` is a type of {known} too"
        for source in read_sources(root)
        if source.path != HEADER_FILE
        for node in source.tree.body
        if (name := _find_type_name(node)) is not None and not name.startswith("_")
        if (known := places.setdefault(name, source.path)) != source.path
    ]


def _find_type_name(node: ast.stmt) -> str | None:
    """Returns the name of a class or alias; an alias of Any stands for a class that it names."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation) != "TypeAlias":
        return None
    return None if ast.unparse(node).endswith("= Any") else ast.unparse(node.target)


def check_error_names(root: pathlib.Path) -> list[str]:
    """One idiom of errors: a function's name says if it returns an error or raises one."""
    return [
        f"{source.path}:{node.lineno}: {problem}"
        for source in read_sources(root)
        for node in list_nodes(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name not in NAMED_BY_PYTHON
        for problem in _find_name_problems(node)
    ]


def _find_name_problems(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    name = node.name.removeprefix("_")
    if re.match(r"refuse(_|$)|report_", name):
        yield f"`{node.name}` is no name of this idiom: make_, find_, check_ or raise_"
    kinds = [each.rpartition(".")[2] for each in _list_return_types(node)]
    if kinds == ["NoReturn"] and not name.startswith("raise_"):
        yield f"`{node.name}` always raises, so it is named raise_..."
    if (
        kinds
        and all(kind.endswith("Error") for kind in kinds)
        and not re.fullmatch(r"make_\w+_error", name)
    ):
        yield f"`{node.name}` returns an error, so it is named make_..._error"
    if kinds == ["Violation"] and not re.fullmatch(r"make_(\w+_)?violation", name):
        yield f"`{node.name}` returns a violation, so it is named make_..._violation"
    if kinds == ["Violation", "None"] and not re.fullmatch(r"find_\w+_violation", name):
        yield f"`{node.name}` looks for a violation, so it is named find_..._violation"
    if name.startswith("raise_") and kinds != ["NoReturn"]:
        yield f"`{node.name}` is to return NoReturn"


def _list_return_types(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Returns the members of the union that a function is annotated to return."""
    return [] if node.returns is None else ast.unparse(node.returns).strip("'").split(" | ")
