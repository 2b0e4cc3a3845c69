"""The sources of a tree, and what each imports, read from their text only."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib

LAYERS = ("tracegraph", "lowering", "runtime")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One Python file of the package.

    Attributes:
        path: relative to the top of the tree, with forward slashes.
        module: dotted name that users import.
        layer: top folder that it is in.
        text: what is written in it.
        tree: its syntax tree.
    """

    path: str
    module: str
    layer: str
    text: str
    tree: ast.Module


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported dotted name and the line that it is on."""

    name: str
    line: int


def read_sources(root: pathlib.Path) -> list[SourceFile]:
    """Reads every file of the three layers under ``root``, sorted by path."""
    paths = sorted(path for layer in LAYERS for path in (root / layer).rglob("*.py"))
    return [_read_source(root, path) for path in paths]


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _read_source(root: pathlib.Path, path: pathlib.Path) -> SourceFile:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    module = ".".join(parts if parts[0] == "tracegraph" else ("tracegraph", *parts))
    text = path.read_text(encoding="utf-8")
    return SourceFile(relative.as_posix(), module, relative.parts[0], text, _parse(text))


def find_imports(tree: ast.AST, modules: frozenset[str] = frozenset()) -> list[Import]:
    """Returns every import below ``tree``; ``from a import b`` gives ``a.b``.

    Args:
        tree: any syntax node.
        modules: dotted names of known modules. A name of the form ``a.b`` that is inside ``a`` but
            not itself a module is then given as ``a``.
    """
    return [Import(_to_module(each.name, modules), each.line) for each in _list_imports(tree)]


# Every rule asks for those of every file, whose trees `_parse` keeps.
@functools.cache
def list_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns the nodes of ``tree``, itself first."""
    return tuple(ast.walk(tree))


@functools.cache
def _list_imports(tree: ast.AST) -> list[Import]:
    found: list[Import] = []
    for node in list_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            found += [Import(f"{source}.{alias.name}", node.lineno) for alias in node.names]
        if isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            found.append(Import(name, node.lineno))
    return found


def _imported_by_call(node: ast.Call) -> str | None:
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "import_late", "__import__") or not node.args:
        return None
    argument = node.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return None


def _to_module(name: str, modules: frozenset[str]) -> str:
    parent = name.rpartition(".")[0]
    return parent if name not in modules and parent in modules else name
