"""Holders: does anything but us hold one of the objects that we would return once more?

Note [Counting holders]. A set of leaves may be returned again only if no user can reach one of
them, see Note [Leaf sets]. CPython counts the references to each object. So we walk from our own
record to the leaves, through trees, dicts and lists, and count the references that we meet. If each
leaf, and each container on the way to one, has just that many references, all of them are known,
and no user holds any. Who holds a leaf, a container of it, a view of one, or anything that holds
these, makes a count higher; who takes a leaf out of its container has changed that, which a
`TreeWatch` sees. Where a node keeps its children in a way that we cannot see, the counts never
agree, and its set is not used again.

The walk is done once per set. From then on its counts are compared at the speed of C, in 3 ns per
object, see `object_words.py`. The first word of an object is its count, and where its type has weak
references, another word says whether there are any. Where objects are not laid out like that, as in
a Python without the interpreter's lock, no set is ever used again.
"""

from __future__ import annotations

import collections
import gc
import sys
import weakref
from collections.abc import Container, Sequence
from typing import Any

from tracegraph.replaying.identities import read_pointers
from tracegraph.replaying.object_words import WORD, make_reader, pack_words, read_word
from tracegraph.replaying.tree_watch import WATCH_TYPES, list_nodes
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.leaf_set import LeafSet

_ORDERED = collections.OrderedDict()
# Watches hold views of dicts.
_VIEWS = (type(view) for each in ({}, _ORDERED) for view in (each.keys(), each.values()))
# Of types whose objects have their attributes in themselves; CPython keeps their dict before them.
_HAS_MANAGED_DICT = 1 << 4
_DICT_OFFSET = -3 * WORD.itemsize
_PLAIN = frozenset((dict, list, tuple, *_VIEWS))
_OURS = frozenset((*WATCH_TYPES, LeafSet))


class HolderCounts:
    """The references to some leaves and to all that holds them, as far as they are ours.

    Args:
        owner: the object of ours from which the leaves are reached.
        trees: that the owner holds, with the leaves in them.

    Attributes:
        read: a function of C, which reads all counts.
        expected: what it returns while there are no other references.
        is_plain: True when nothing else must be looked at, as `are_all` does.
    """

    __slots__ = ("_nodes", "_objects", "_referents", "expected", "is_plain", "read")

    def __init__(self, owner: object, trees: Sequence[Any]) -> None:
        # What is in plain containers, watches see; other nodes are looked into at each time.
        self._nodes = tuple(node for tree in trees for node in _list_special_nodes(tree))
        found = _count_references(owner, self._nodes)
        self._objects = tuple(each for each, _ in found)
        counts = collections.Counter(map(id, self._nodes))
        # One more for the tuple of objects.
        words = [(id(each), count + counts[id(each)] + 1) for each, count in found]
        offsets = [(id(each), type(each).__weakrefoffset__) for each in self._objects]
        words += [(address + offset, 0) for address, offset in offsets if offset]
        words += _list_dict_words(self._nodes, {id(each) for each in self._objects})
        self.read = make_reader([address for address, _ in words])
        self.expected = pack_words([word for _, word in words])
        self._referents = self._read_referents()
        self.is_plain = not self._nodes

    def are_all(self) -> bool:
        """True when there are no other references; the trees must be unchanged."""
        if self._nodes and self._read_referents() != self._referents:
            return False
        return self.read() == self.expected

    def _read_referents(self) -> bytes:
        return read_pointers(tuple(gc.get_referents(*self._nodes)))


def can_count() -> bool:
    """True where the count of an object's references, and its weak ones, are where we read them."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)() or WORD.itemsize != 8:
        return False
    probes = (_Probe(), _SlottedProbe())
    before = [_read_words(probe) for probe in probes]
    held = [probes, *probes, *probes], [weakref.ref(probe) for probe in probes]
    after = [_read_words(probe) for probe in probes]
    del held
    is_counted = all(
        b[0] + 2 == a[0] and b[1] == 0 != a[1] for b, a in zip(before, after, strict=True)
    )
    word = read_word(id(probes[0]) + _DICT_OFFSET)
    return (
        is_counted
        and [_read_words(probe) for probe in probes] == before
        and bool(type(probes[0]).__flags__ & _HAS_MANAGED_DICT)
        and vars(probes[0]) == {}
        and read_word(id(probes[0]) + _DICT_OFFSET) != word
    )


def _list_dict_words(nodes: Sequence[Any], known: Container[int]) -> list[tuple[int, int]]:
    """Returns the addresses of words that change when attributes of a node get into other hands.

    The attributes of an object are in the object until its ``__dict__`` is looked at. Then they are
    in both: the collector does not walk to that dict, and no count tells of it.
    """
    words = []
    for node in nodes:
        if not type(node).__flags__ & _HAS_MANAGED_DICT:
            continue
        word = read_word(id(node) + _DICT_OFFSET)
        words.append((id(node) + _DICT_OFFSET, word))
        if word and word not in known and sys.version_info >= (3, 13):
            # The node holds it.
            words.append((word, 1))
    return words


def _list_special_nodes(tree: Any) -> list[Any]:
    """Returns the nodes of a tree, and the typed keys, whose parts no watch looks at."""
    return [node for node in list_nodes(tree) if type(node) not in _PLAIN]


def _count_references(owner: object, nodes: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns what holds leaves, and the leaves, with the number of references from the owner on.

    Types of ours are not in the list: no user holds their objects.
    """
    opened = {id(node) for node in nodes}
    holders: dict[int, list[Any]] = {}
    reached: dict[int, Any] = {id(owner): owner}
    leaves: list[Any] = []
    waiting = [owner]
    while waiting:
        holder = waiting.pop()
        for held in gc.get_referents(holder):
            kind = type(held)
            is_leaf = kind is Array
            if not is_leaf and kind not in _PLAIN and kind not in _OURS and id(held) not in opened:
                continue
            holders.setdefault(id(held), []).append(holder)
            if id(held) in reached:
                continue
            reached[id(held)] = held
            (leaves if is_leaf else waiting).append(held)
    # Back from the leaves: what does not lead to one does not count.
    leading = {id(leaf): leaf for leaf in leaves}
    waiting = leaves
    while waiting:
        for holder in holders.get(id(waiting.pop()), ()):
            if id(holder) not in leading:
                leading[id(holder)] = holder
                waiting.append(holder)
    return [
        (each, sum(id(holder) in leading for holder in holders[id(each)]))
        for each in leading.values()
        if each is not owner and type(each) not in _OURS
    ]


class _Probe:
    pass


class _SlottedProbe:
    __slots__ = ("__weakref__",)


def _read_words(value: object) -> list[int]:
    """Returns the number of an object's references, and the address of its first weak one."""
    return [read_word(id(value)), read_word(id(value) + type(value).__weakrefoffset__)]


CAN_COUNT = can_count()
