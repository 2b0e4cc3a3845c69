"""Saved files that were changed, and what reading them ends in."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.program_subjects import build, find_stray, make_subjects
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.saving.check_definition import find_definition_problem
from tracegraph.runtime.saving.graph_records import GRAPH_TYPES
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.runtime.saving.saved_file import pack_file, parse_file

CODEC = RecordCodec(GRAPH_TYPES)
NUMBERS = (0, 1, -1, 2, 7, 8, 255, 65536, 1 << 31, 1 << 40, 1 << 64, -(1 << 63))
LEAVES = (*NUMBERS, None, True, False, "", "a", "r", 1.5, [], ["r", 0], ["b", 0], ["t"], {})


@dataclasses.dataclass(frozen=True)
class SavedGraph:
    """A graph and its file.

    Attributes:
        definition: of the graph.
        content: of the file.
        blobs: of the file.
        data: the file.
    """

    definition: GraphDefinition
    content: Any
    blobs: tuple[bytes, ...]
    data: bytes


def make_saved_graphs() -> list[SavedGraph]:
    """Returns the graphs of the programs that are mutated elsewhere, too, with their files."""
    return [save(build(each.program, each)) for each in make_subjects()]


def save(definition: GraphDefinition) -> SavedGraph:
    """Returns a graph with its file."""
    encoded = CODEC.encode(definition)
    data = b"".join(pack_file(encoded.tree, encoded.blobs))
    return SavedGraph(definition, encoded.tree, encoded.blobs, data)


def flip_byte(graph: SavedGraph, rng: random.Random) -> bytes:
    """Returns the file with another byte somewhere."""
    data = bytearray(graph.data)
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    return bytes(data)


def cut(graph: SavedGraph, rng: random.Random) -> bytes:
    """Returns the file without its end, or with more at its end."""
    if rng.random() < 0.2:
        return graph.data + rng.randbytes(rng.randrange(1, 64))
    return graph.data[: rng.randrange(len(graph.data))]


def change_leaf(graph: SavedGraph, rng: random.Random) -> bytes:
    """Returns a file with a right checksum and another value in one to three places."""
    content = copy.deepcopy(graph.content)
    for _ in range(rng.randrange(1, 4)):
        owner, key = rng.choice(list_places(content))
        old = owner[key]
        choices = NUMBERS if type(old) is int and rng.random() < 0.7 else LEAVES
        owner[key] = old + 1 if type(old) is int and rng.random() < 0.2 else rng.choice(choices)
    return seal(content, graph.blobs)


def exchange(graph: SavedGraph, rng: random.Random) -> bytes:
    """Returns a file with a right checksum in which two values have changed places."""
    content = copy.deepcopy(graph.content)
    (owner, key), (other, place) = rng.sample(list_places(content), 2)
    owner[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(owner[key])
    return seal(content, graph.blobs)


def drop(graph: SavedGraph, rng: random.Random) -> bytes:
    """Returns a file with a right checksum in which a value is missing or there twice."""
    content = copy.deepcopy(graph.content)
    owner, key = rng.choice(list_places(content))
    if isinstance(owner, list) and rng.random() < 0.5:
        owner.insert(key, copy.deepcopy(owner[key]))
    else:
        del owner[key]
    return seal(content, graph.blobs)


MUTATIONS: tuple[Callable[[SavedGraph, random.Random], bytes], ...] = (
    flip_byte,
    cut,
    change_leaf,
    exchange,
    drop,
)


def seal(content: Any, blobs: tuple[bytes, ...]) -> bytes:
    """Returns a file with a right checksum."""
    return b"".join(pack_file(content, blobs))


def list_places(tree: Any) -> list[tuple[Any, Any]]:
    """Returns every value of a tree as its owner and its key there."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree)
    places = [(tree, key) for key in keys]
    for key in keys:
        if isinstance(tree[key], list | dict):
            places += list_places(tree[key])
    return places


def read(data: bytes) -> GraphDefinition:
    """Returns the graph of a file, checked.

    Raises:
        SavedFileError: the file is damaged.
        ContentProblem: it holds no sound graph.
    """
    file = parse_file(data, "fuzz.tg")
    definition = CODEC.decode(file.content, file.blobs, GraphDefinition)
    if problem := find_definition_problem(definition):
        raise ContentProblem("the definition", problem)
    return definition


def run_file(graph: SavedGraph, data: bytes) -> str:
    """Reads a file: it is refused, equal, or another graph within its own arena.

    Raises:
        AssertionError: a graph that was taken reaches outside of its buffers.
    """
    try:
        found = read(data)
    except (SavedFileError, ContentProblem) as error:
        return type(error).__name__
    if found == graph.definition:
        return "equal"
    assert not find_stray(found)
    nodes = list_nested(node for stage in found.stages for node in stage.nodes)
    assert all(node.name is not None for node in nodes)
    assert str(found)
    return "sound"
