"""Words of objects are read as they are now, few or many."""

from __future__ import annotations

from typing import Any

import pytest

from tracegraph.replaying.dict_tags import DictTags, has_tags
from tracegraph.replaying.holders import can_count
from tracegraph.replaying.object_words import make_reader, pack_words, read_word

pytestmark = pytest.mark.skipif(not can_count(), reason="objects are laid out in another way here")


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 100])
def test_a_reader_returns_what_is_packed(count: int):
    objects = [object() for _ in range(count)]
    addresses = list(map(id, objects))
    read = make_reader(addresses)
    words = list(map(read_word, addresses))
    assert read() == pack_words(words)
    for index in {0, count - 1} if count else ():
        held = [objects[index]]
        assert read() != pack_words(words), index
        held.clear()
        assert read() == pack_words(words)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_each_change_of_a_dict_changes_what_its_tag_says(count: int):
    if not has_tags():
        pytest.skip("this Python does not number the states of dicts")
    mappings: list[dict[str, Any]] = [{"a": 1, "b": 2} for _ in range(count)]
    tags = DictTags(mappings)
    assert (tags.counted, tags.uncounted) == (mappings, [])
    last = mappings[-1]
    changes = [
        lambda: last.update(a=3),
        lambda: last.update({"c": 3}),
        lambda: last.pop("c"),
        lambda: last.setdefault("d", 4),
        lambda: last.popitem(),
        lambda: last.__ior__({"e": 5}),
        lambda: exec("a = 9", {}, last),
        last.clear,
        lambda: last.update({"f": 6, "g": 7}),
    ]
    for change in changes:
        before = tags.read()
        assert last.get("a") is None or sorted(last)
        assert tags.read() == before
        change()
        assert tags.read() != before
