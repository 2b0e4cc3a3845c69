"""Static values to records of a file and back: equal, by name, and without running anything."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.saving.plain_values import (
    VALUE_TYPES,
    EnumMember,
    FieldsValue,
    KeyDtype,
    NamedObject,
    Names,
    UnknownNameError,
    name_object,
    pack_dtype,
    pack_static,
    pack_value,
    unpack_dtype,
    unpack_value,
)
from tracegraph.tracing.static_leaves import StaticLeaf

codec = RecordCodec(VALUE_TYPES)
SENTINEL = object()


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int
    rates: tuple[float, ...] = ()
    total: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.heads + len(self.rates))


def activate(x: Any) -> Any:
    return x


def carry(value: Any, names: Names | None = None) -> Any:
    """Returns what a file would give for a value."""
    encoded = codec.encode(pack_static(value))
    return unpack_value(codec.decode(encoded.tree, encoded.blobs, Any), names or Names())


VALUES = [
    None, True, 1, 1.0, -0.0, float("inf"), 1 << 80, 2j, "text", b"bytes", (), (1, True, (1.0,)),
    frozenset({1, "a"}), Color.RED, Level.LOW, Pair(1, "b"), Sizes(2, (0.5,)), activate, jnp.sin,
    jax.nn.relu, jnp.float32, np.float32, np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), Sizes,
    (Sizes(1), Color.RED), int, sys.exit, Pair(Sizes(3), (activate,)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_equal_and_of_their_kind(value: Any) -> None:
    assert StaticLeaf(carry(value)) == StaticLeaf(value)


def test_a_single_object_of_its_kind_is_known_by_its_module() -> None:
    one = types.ModuleType("module_with_a_sentinel")
    kind = type("Missing", (), {"__module__": one.__name__})
    vars(one)["MISSING"] = kind()
    sys.modules[one.__name__] = one
    try:
        assert carry(vars(one)["MISSING"]) is vars(one)["MISSING"]
    finally:
        del sys.modules[one.__name__]


@pytest.mark.parametrize(
    "value",
    [lambda x: x, object(), Pair(1, lambda x: x), (1, object()), type("Local", (), {}), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_what_only_this_process_has_is_refused_by_its_value(value: Any) -> None:
    with pytest.raises(SaveProblem, match=r"no plain value|no module has|not equal to what"):
        pack_static(value)


def test_what_is_not_equal_to_itself_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Same:
        number: int

    Same.__qualname__ = "Same"
    vars(sys.modules[__name__])["Same"] = Same
    try:
        with pytest.raises(SaveProblem, match="is not equal to what a file would hold"):
            pack_static(Same(1))
    finally:
        del vars(sys.modules[__name__])["Same"]


def test_no_constructor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_static(Sizes(2, (0.5,)))
    monkeypatch.setattr(Sizes, "__post_init__", lambda self: pytest.fail("it was called"))
    monkeypatch.setattr(Sizes, "__init__", lambda self: pytest.fail("it was called"))
    assert unpack_value(packed, Names()).total == 3


def test_nothing_is_imported_or_looked_up_by_code() -> None:
    name = "email.mime.nothing_imports_this"
    with pytest.raises(UnknownNameError):
        Names().find(NamedObject(name, "f"))
    assert name not in sys.modules
    lazy = types.ModuleType("lazy_module")
    vars(lazy)["__getattr__"] = lambda name: pytest.fail("it was called")
    sys.modules["lazy_module"] = lazy
    try:
        with pytest.raises(UnknownNameError):
            Names().find(NamedObject("lazy_module", "f"))
        with pytest.raises(UnknownNameError):
            Names().find(NamedObject("tests.tracegraph.saving.test_plain_values", "SENTINEL.x"))
    finally:
        del sys.modules["lazy_module"]


def test_names_that_are_given_come_first() -> None:
    moved = NamedObject("__main__", "activate")
    assert Names([activate]).find(moved) is activate
    other: Any = types.FunctionType(activate.__code__, {}, "activate")
    other.__qualname__, other.__module__ = "activate", activate.__module__
    here = name_object(activate)
    assert here is not None
    assert Names([other]).find(here) is other
    with pytest.raises(UnknownNameError):
        Names([activate]).find(NamedObject("__main__", "deactivate"))


def test_a_class_that_has_changed_is_refused() -> None:
    kind = NamedObject(__name__, "Sizes")
    with pytest.raises(UnknownNameError) as caught:
        unpack_value(FieldsValue(kind, (("heads", 1),)), Names())
    assert caught.value.change == "has other fields than when the file was saved"
    with pytest.raises(UnknownNameError) as caught:
        unpack_value(EnumMember(NamedObject(__name__, "Color"), "BLUE"), Names())
    assert caught.value.change == "has no member BLUE"
    with pytest.raises(UnknownNameError):
        unpack_value(FieldsValue(NamedObject("builtins", "int"), ()), Names())


def test_values_that_no_file_has_are_refused() -> None:
    deep: Any = ()
    for _ in range(20):
        deep = (deep,)
    for packed in (deep, object(), KeyDtype("unknown")):
        with pytest.raises(ContentProblem):
            unpack_value(packed, Names())


def test_dtypes() -> None:
    dtypes = [np.dtype(bool), np.dtype(ml_dtypes.int4), jax.dtypes.float0]
    dtypes += [jax.random.key(0, impl=name).dtype for name in ("threefry2x32", "rbg")]
    for dtype in dtypes:
        encoded = codec.encode(pack_dtype(dtype))
        assert unpack_dtype(codec.decode(encoded.tree, encoded.blobs, Any)) == dtype
    for packed in (1, NamedObject("jax.numpy", "float32"), "float32"):
        with pytest.raises(ContentProblem):
            unpack_dtype(packed)


def test_what_a_class_keeps_beside_its_leaves_may_be_mutable() -> None:
    value = [1, {"a": [2]}, collections.OrderedDict]
    assert unpack_value(pack_value(value), Names()) == value
