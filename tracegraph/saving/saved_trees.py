"""Structures of JAX's trees: to records that a file holds, and back.

Note [Nodes in a file]. A tree is a list of its nodes, each behind its children, as JAX itself keeps
it: neither its depth nor what parts share can make a small file large. A node of a user's class is
written by the name of the class, and by the names of its fields where it has such: a class whose
fields have changed since is refused. Where only the class knows its fields, the paths of the
leaves are compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import jax

from tracegraph.jax_internals import find_dataclass_fields, list_registered_types
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.saving.plain_values import (
    NamedObject,
    Names,
    UnknownNameError,
    name_object,
    pack_static,
    pack_value,
    unpack_value,
)
from tracegraph.tracing.static_leaves import StaticLeaf, wrap_static_leaves

MAX_DEPTH = 512
TreeKind: TypeAlias = Literal["leaf", "none", "tuple", "list", "dict", "static", "node"]
_BUILT_IN: dict[type, TreeKind] = {type(None): "none", tuple: "tuple", list: "list", dict: "dict"}
_KINDS = {name: kind for kind, name in _BUILT_IN.items()}
_LEAF = jax.tree_util.tree_structure(0)


@dataclasses.dataclass(frozen=True)
class TreeNode:
    """One node of a tree, or a leaf.

    Attributes:
        kind: what it is; ``node`` for one of a user's class.
        arity: how many children it has.
        data: keys of a dict, the value of a static leaf, or what the class keeps beside the
            children.
        name: of the class.
        fields: names of the children, and of what is in ``data``, where JAX knows them.
    """

    kind: TreeKind
    arity: int = 0
    data: Any = None
    name: NamedObject | None = None
    fields: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class SavedTree:
    """The structure of a tree.

    Attributes:
        nodes: children before the node that they belong to, see Note [Nodes in a file].
        paths: of the leaves, where a class alone knows what its children are.
    """

    nodes: tuple[TreeNode, ...]
    paths: tuple[str, ...] = ()


TREE_TYPES: tuple[type, ...] = (TreeNode, SavedTree)


def pack_tree(tree: Any) -> SavedTree:
    """Returns the record of a structure.

    Args:
        tree: JAX's; static leaves are in it.

    Raises:
        SaveProblem: it has a node that only this process has.
    """
    nodes: list[TreeNode] = []
    _add_nodes(tree, nodes)
    paths = _list_paths(tree) if any(map(_hides_fields, nodes)) else ()
    saved = SavedTree(tuple(nodes), paths)
    try:
        is_same = unpack_tree(saved, Names()) == tree
    except (UnknownNameError, ContentProblem):
        is_same = False
    if not is_same:
        raise SaveProblem(f"the tree {tree} is not equal to what a file would hold of it")
    return saved


def unpack_tree(saved: SavedTree, names: Names) -> Any:
    """Returns the structure of a record.

    Args:
        saved: as it came from a file.
        names: of classes.

    Raises:
        ContentProblem: it is not as `pack_tree` writes it.
        UnknownNameError: it names a class that this process does not have, or has with other
            fields.
    """
    # With each tree how deep it is.
    stack: list[tuple[Any, int]] = []
    for node in saved.nodes:
        if not 0 <= node.arity <= len(stack):
            raise ContentProblem("a tree", f"a node has {node.arity} children")
        first = len(stack) - node.arity
        children, stack[first:] = stack[first:], []
        depth = 1 + max((each for _, each in children), default=0)
        if depth > MAX_DEPTH:
            raise ContentProblem("a tree", f"it is more than {MAX_DEPTH} deep")
        stack.append((_make_node(node, [tree for tree, _ in children], names), depth))
    if len(stack) != 1:
        raise ContentProblem("a tree", f"it has {len(stack)} roots")
    tree = stack[0][0]
    _check_made(tree, saved)
    return tree


def join_trees(args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the structure of positional and keyword arguments from those of each argument."""
    keys = sorted(kwargs)
    named = _make_def((dict, keys), [kwargs[key] for key in keys])
    return _make_def((tuple, None), [_make_def((tuple, None), args), named])


def _add_nodes(tree: Any, nodes: list[TreeNode]) -> None:
    children = tree.children()
    for child in children:
        _add_nodes(child, nodes)
    nodes.append(_describe_node(tree.node_data(), len(children)))


def _describe_node(content: tuple[type, Any] | None, arity: int) -> TreeNode:
    if content is None:
        return TreeNode("leaf")
    kind, data = content
    if kind is dict:
        return TreeNode("dict", arity, pack_value(tuple(data)))
    if kind in _BUILT_IN:
        return TreeNode(_BUILT_IN[kind], arity)
    if kind is StaticLeaf:
        return TreeNode("static", 0, pack_static(data.value))
    name = name_object(kind)
    if name is None:
        raise SaveProblem(f"a node of it is a {kind.__qualname__}, which no module has by its name")
    return TreeNode("node", arity, pack_value(data), name, _find_fields(kind))


def _find_fields(kind: type) -> tuple[tuple[str, ...], ...]:
    fields = find_dataclass_fields(kind)
    if fields is not None:
        return fields
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return () if names is None else (tuple(names),)


def _hides_fields(node: TreeNode) -> bool:
    return node.kind == "node" and not node.fields


def _make_node(node: TreeNode, children: list[Any], names: Names) -> Any:
    if children and node.kind in ("leaf", "none", "static"):
        raise ContentProblem("a tree", f"a {node.kind} has children")
    if node.kind == "leaf":
        return _LEAF
    data = unpack_value(node.data, names)
    if node.kind == "static":
        return jax.tree_util.tree_structure(StaticLeaf(data))
    if node.kind == "node":
        return _make_def((_find_class(node, names, data), data), children)
    if node.kind != "dict":
        return _make_def((_KINDS[node.kind], None), children)
    if type(data) is not tuple or len(data) != len(children):
        raise ContentProblem("a tree", "a dict has not one key per value")
    return _make_def((dict, list(data)), children)


def _find_class(node: TreeNode, names: Names, data: Any) -> type:
    """Returns the class of a node that has the children and the data of this one."""
    if node.name is None:
        raise ContentProblem("a tree", "a node of a class has no name")
    kind = names.find(node.name)
    fields = _find_fields(kind) if isinstance(kind, type) else ()
    if not fields and not (isinstance(kind, type) and _is_registered(kind)):
        raise UnknownNameError(node.name, "is not registered with JAX as a node of trees")
    if fields != node.fields:
        raise UnknownNameError(node.name, "has other fields than when the file was saved")
    # JAX takes these as they are, see `find_dataclass_fields`.
    given = (node.arity, len(data) if type(data) is tuple else -1)
    if any(len(wanted) != count for wanted, count in zip(fields, given, strict=False)):
        raise ContentProblem(f"a node of {node.name}", "it has not one value per field")
    return kind


def _is_registered(kind: type) -> bool:
    return kind not in _BUILT_IN and kind in list_registered_types()


def _make_def(content: tuple[type, Any], children: list[Any]) -> Any:
    registry: Any = jax.tree_util.default_registry
    make: Any = jax.tree_util.PyTreeDef.from_node_data_and_children
    return make(registry, content, children)


def _check_made(tree: Any, saved: SavedTree) -> None:
    """Refuses what JAX would not make of an object, as a dict with a key twice."""
    try:
        made = wrap_static_leaves(jax.tree_util.tree_unflatten(tree, range(tree.num_leaves)))
        is_same = jax.tree_util.tree_structure(made) == tree
        paths = _list_paths(tree) if saved.paths else ()
    except Exception as error:  # noqa: BLE001 a class makes its own objects here
        raise ContentProblem("a tree", f"no object has it: {error}") from None
    if not is_same:
        raise ContentProblem("a tree", "an object with its nodes has others")
    if paths == saved.paths:
        return
    hidden = [each.name for each in saved.nodes if _hides_fields(each) and each.name is not None]
    if not hidden:
        raise ContentProblem("a tree", "it has paths of leaves, and no class that hides them")
    raise UnknownNameError(hidden[0], "has other children than when the file was saved")


def _list_paths(tree: Any) -> tuple[str, ...]:
    blank = tree.unflatten(range(tree.num_leaves))
    return tuple(
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(blank)
    )
