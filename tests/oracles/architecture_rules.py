"""The rules of the house, each a function from a folder to the list of its violations.

A violation is one line of text that starts with the file (and line) at fault. The rules read source
text only, so that they run on any tree and import nothing of it.
"""

from __future__ import annotations

import ast
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from tests.oracles.architecture_sources import (
    LAYERS,
    Import,
    SourceFile,
    find_imports,
    list_nodes,
    read_sources,
)
from tests.oracles.naming_rules import check_error_names, check_type_names

ALLOWED_LAYERS = {
    "tracegraph": ("tracegraph", "lowering", "runtime"),
    "lowering": ("lowering", "runtime"),
    "runtime": ("runtime",),
}
DRIVER_FILE = "runtime/cuda/driver/driver.py"
DRIVER_MODULES = ("cuda", "cuda.bindings", "cuda.cuda", "cuda.bindings.driver")
DEVICE_PACKAGES = ("tracegraph.runtime.cuda", "tracegraph.runtime.host")
DEVICE_DOOR = "runtime/default_device.py"
JAX_DOORS = ("tracegraph/jax_internals.py", "runtime/jax_interop.py")
PURE_PLACES = ("runtime/memory/", "lowering/planning/memory_plan.py")
IMPURE_MODULES = ("jax", "jaxlib", "cuda")
# Whose folders are rooms: what they import of one another is one way.
ROOM_PARENTS = (
    "tracegraph",
    "lowering",
    "lowering/kernels",
    "runtime",
    "runtime/cuda",
    "runtime/memory",
)
LINE_LIMIT = 400
LINE_EXCUSE = "past 400 lines because"
FIELD_LIMIT = 6
FIELD_EXCUSE = "More than six fields because"

Rule: TypeAlias = Callable[[pathlib.Path], list[str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _is_own(name: str) -> bool:
    return any(_is_inside(name, package) for package in LAYERS) or name.startswith(".")


def _module_names(sources: list[SourceFile]) -> frozenset[str]:
    return frozenset(source.module for source in sources)


def check_layers(root: pathlib.Path) -> list[str]:
    """Law 1: tracegraph imports lowering imports runtime, never back, always by the full name."""
    sources = read_sources(root)
    modules = _module_names(sources)
    return [
        f"{source.path}:{each.line}: {problem}"
        for source in sources
        for each in find_imports(source.tree, modules)
        if (problem := _find_layer_problem(source, each.name))
    ]


def _find_layer_problem(source: SourceFile, name: str) -> str | None:
    if name.startswith("."):
        return "relative import; write the full name from `tracegraph` on"
    if _is_inside(name, "lowering") or _is_inside(name, "runtime"):
        return f"imports `{name}`; users have it as `tracegraph.{name}`"
    if not _is_inside(name, "tracegraph"):
        return None
    second = name.split(".")[1] if "." in name else "tracegraph"
    target = second if second in LAYERS else "tracegraph"
    if target in ALLOWED_LAYERS[source.layer]:
        return None
    return f"{source.layer} imports {target} (`{name}`)"


def check_local_imports(root: pathlib.Path) -> list[str]:
    """Law 2, first part: no import of our own packages inside a function."""
    return [
        f"{source.path}:{each.line}: imports `{each.name}` inside a function"
        for source in read_sources(root)
        for function in list_nodes(source.tree)
        if isinstance(function, FunctionNode)
        for each in find_imports(function)
        if _is_own(each.name)
    ]


def check_cycles(root: pathlib.Path) -> list[str]:
    """Law 2, second part: no import cycles between modules."""
    edges = _own_edges(read_sources(root))
    return [
        f"{module}: import cycle {' -> '.join(cycle)}"
        for module in sorted(edges)
        if (cycle := _find_cycle(module, edges)) and module == min(cycle)
    ]


def _own_edges(sources: list[SourceFile]) -> dict[str, list[str]]:
    modules = _module_names(sources)
    return {
        source.module: sorted({each.name for each in find_imports(source.tree, modules)} & modules)
        for source in sources
    }


def _find_cycle(start: str, edges: dict[str, list[str]]) -> list[str]:
    """Returns the shortest path from ``start`` back to it, or nothing."""
    paths = [[start]]
    seen: set[str] = set()
    while paths:
        path = paths.pop(0)
        for target in edges[path[-1]]:
            if target == start:
                return [*path, target]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []


def check_rooms(root: pathlib.Path) -> list[str]:
    """Law 2, last part: no import cycles between the folders of ROOM_PARENTS."""
    return [problem for parent in ROOM_PARENTS for problem in find_room_cycles(root, parent)]


def find_room_cycles(root: pathlib.Path, parent: str) -> list[str]:
    """Returns each import cycle in which a folder takes part, with the imports that close it.

    Args:
        root: of the tree.
        parent: folder whose folders are rooms. A file right below it is a room of its own, so that
            what all rooms use and what uses all rooms may be there together.
    """
    sources = [each for each in read_sources(root) if each.path.startswith(parent + "/")]
    rooms = {each.module: _name_room(each.path, parent) for each in sources}
    imports: dict[str, dict[str, str]] = {room: {} for room in rooms.values()}
    for source in sources:
        for each in find_imports(source.tree, frozenset(rooms)):
            target = rooms.get(each.name, rooms[source.module])
            if target != rooms[source.module]:
                imports[rooms[source.module]].setdefault(target, f"{source.path}:{each.line}")
    edges = {room: sorted(targets) for room, targets in imports.items()}
    return [
        f"{parent}/{room}: import cycle {' -> '.join(cycle)}, at "
        + ", ".join(imports[start][end] for start, end in itertools.pairwise(cycle))
        for room in sorted(edges)
        if (cycle := _find_cycle(room, edges)) and room == min(cycle)
    ]


def _name_room(path: str, parent: str) -> str:
    return path.removeprefix(parent + "/").partition("/")[0]


def check_driver(root: pathlib.Path) -> list[str]:
    """Law 3: only one file imports the CUDA driver bindings."""
    return [
        f"{source.path}:{each.line}: imports `{each.name}`; only {DRIVER_FILE} may"
        for source in read_sources(root)
        if source.path != DRIVER_FILE
        for each in find_imports(source.tree)
        if each.name in DRIVER_MODULES or _is_inside(each.name, "cuda.bindings.driver")
    ]


def check_devices(root: pathlib.Path) -> list[str]:
    """Section 10: a device is known by its protocol; one file chooses which, and none mixes two."""
    return [
        f"{source.path}:{each.line}: imports `{each.name}`; only {DEVICE_DOOR} knows which devices "
        "there are"
        for source in read_sources(root)
        if source.path != DEVICE_DOOR
        for each in find_imports(source.tree)
        for package in DEVICE_PACKAGES
        if _is_inside(each.name, package) and not _is_inside(source.module, package)
    ]


def check_private_jax(root: pathlib.Path) -> list[str]:
    """Law 4: private names of JAX are touched in one file per layer only."""
    return [
        f"{source.path}:{each.line}: touches private `{each.name}`; only {', '.join(JAX_DOORS)} may"
        for source in read_sources(root)
        if source.path not in JAX_DOORS
        for each in [*find_imports(source.tree), *_find_jax_attributes(source.tree)]
        if _is_private_jax(each.name)
    ]


def _is_private_jax(name: str) -> bool:
    first, *rest = name.split(".")
    named = [part for part in rest if not part.startswith("__")]
    if first == "jaxlib":
        return bool(named)
    has_private_part = any(part.startswith("_") for part in named)
    return first == "jax" and (named[:1] == ["extend"] or has_private_part)


def _find_jax_attributes(tree: ast.Module) -> list[Import]:
    names: dict[str, str] = {}
    for node in list_nodes(tree):
        if isinstance(node, ast.Import):
            names |= dict(_bind_import(alias) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return [
        Import(".".join((names[chain[0]], *chain[1:])), node.lineno)
        for node in list_nodes(tree)
        if isinstance(node, ast.Attribute)
        if (chain := _dotted(node)) and chain[0] in names
    ]


def _bind_import(alias: ast.alias) -> tuple[str, str]:
    """Returns the local name that an import statement binds, and what it names."""
    first = alias.name.split(".")[0]
    return (alias.asname, alias.name) if alias.asname else (first, first)


def _dotted(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if not isinstance(node, ast.Attribute):
        return ()
    inner = _dotted(node.value)
    return (*inner, node.attr) if inner else ()


def check_pure_places(root: pathlib.Path) -> list[str]:
    """Law 5: the memory planners reach neither JAX nor CUDA, not even through our own modules."""
    sources = read_sources(root)
    modules = _module_names(sources)
    outside = {
        source.module: {
            each.name.split(".")[0] for each in find_imports(source.tree, modules)
        }.intersection(IMPURE_MODULES)
        for source in sources
    }
    edges = _own_edges(sources)
    return [
        f"{source.path}: reaches {', '.join(sorted(outside[module]))} through {module}"
        for source in sources
        if source.path.startswith(PURE_PLACES)
        for module in _reachable(source.module, edges)
        if outside[module]
    ]


def _reachable(start: str, edges: dict[str, list[str]]) -> list[str]:
    found = [start]
    for module in found:
        found += [target for target in edges[module] if target not in found]
    return found


def check_file_lengths(root: pathlib.Path) -> list[str]:
    """Law 6: at most 400 lines, in tests too, or the reason is in the docstring at the top."""
    paths = sorted(path for folder in (*LAYERS, "tests") for path in (root / folder).rglob("*.py"))
    return [
        f"{path.relative_to(root).as_posix()}: {count} lines, more than {LINE_LIMIT} without a "
        "reason at its top"
        for path in paths
        if (count := len((text := path.read_text(encoding="utf-8")).splitlines())) > LINE_LIMIT
        if LINE_EXCUSE not in _flatten(ast.get_docstring(ast.parse(text)))
    ]


def _flatten(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


def check_module_names(root: pathlib.Path) -> list[str]:
    """Law 7: no module of the front end is named like a public function or class."""
    surface = next(s for s in read_sources(root) if s.path == "tracegraph/__init__.py")
    objects = {
        alias.asname or alias.name
        for node in surface.tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "tracegraph"
        for alias in node.names
    }
    objects |= {node.name for node in surface.tree.body if isinstance(node, ast.FunctionDef)}
    places = [*(root / "tracegraph").iterdir(), root / "lowering", root / "runtime"]
    return [
        f"{path.relative_to(root).as_posix()}: named like the public `{path.stem}`"
        for path in sorted(places)
        if path.stem in objects and (path.suffix == ".py" or (path / "__init__.py").is_file())
    ]


def check_records(root: pathlib.Path) -> list[str]:
    """Section 4: records are frozen and have at most six fields, or say why they have more."""
    return [
        f"{source.path}:{node.lineno}: {problem}"
        for source in read_sources(root)
        for node in list_nodes(source.tree)
        if isinstance(node, ast.ClassDef)
        for problem in _find_record_problems(node)
    ]


def _find_record_problems(node: ast.ClassDef) -> Iterator[str]:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    dataclass_decorators = [each for each in decorators if "dataclass" in each.split("(")[0]]
    if not dataclass_decorators:
        return
    if "frozen=True" not in dataclass_decorators[0]:
        yield f"dataclass `{node.name}` is not frozen"
    fields = [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
    ]
    if len(fields) > FIELD_LIMIT and FIELD_EXCUSE not in _flatten(ast.get_docstring(node)):
        yield f"record `{node.name}` has {len(fields)} fields, more than {FIELD_LIMIT}"


RULES: tuple[Rule, ...] = (
    check_layers,
    check_local_imports,
    check_cycles,
    check_rooms,
    check_driver,
    check_devices,
    check_private_jax,
    check_pure_places,
    check_file_lengths,
    check_module_names,
    check_records,
    check_type_names,
    check_error_names,
)
