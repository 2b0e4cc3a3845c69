"""What the arguments of a call can break, leaf by leaf."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.processes import run_program
from tracegraph.constraints import ArgumentLeaf, check_arguments, describe_mismatch

DEVICE = jax.devices()[0]
PLACE = "  where: test_arguments.py:N in check, "


class OtherDevice:
    def __str__(self):
        return "other:0"


def check(*leaves, device=DEVICE, takes_static=True):
    return check_arguments(leaves, device=device, takes_static=takes_static)


def to_text(violation):
    return re.sub(r"[\w/]*/(\w+\.py):\d+", r"\1:N", str(violation))


def leaf(value, *, path="argument 0 `x`", is_donated=False):
    return ArgumentLeaf(path, value, is_donated)


@pytest.mark.parametrize(
    "value",
    [
        True,
        1,
        1.5,
        2j,
        np.float32(1),
        np.bool_(True),
        np.zeros(3),
        np.zeros(3, np.int8),
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros(3, ml_dtypes.float8_e4m3fn),
        np.zeros(3, ml_dtypes.int4),
        np.zeros((0, 2)),
        jnp.zeros(3),
        jax.random.key(0),
        jax.device_put(jnp.zeros(3), DEVICE),
    ],
)
def test_arrays_and_numbers_are_fine(value):
    assert check(leaf(value), leaf(value)) == ()
    assert check(leaf(value, is_donated=True)) == ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", "str"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
        (np.str_("a"), "str_ of <U1"),
    ],
)
def test_without_static_leaves_other_objects_are_refused(value, kind):
    place = "argument 1 `state['w']`"
    (violation,) = check(leaf(value, path=place), takes_static=False)
    assert to_text(violation) == (
        f"{place} is a {kind}, not an array\n" + PLACE + f"{place}\n"
        "  why:   static_leaves='refuse' takes arrays and numbers only\n"
        "  fix:   leave static_leaves out, or pass the argument as static: static_argnames=..."
        "          python -m tracegraph error non-array-argument"
    )


def test_deleted_array():
    value = jnp.zeros(3)
    value.delete()
    (violation,) = check(leaf(value))
    assert to_text(violation) == (
        "argument 0 `x` has been deleted\n" + PLACE + "argument 0 `x`\n"
        "  why:   its buffer was given up: donated to an earlier call, or freed by x.delete()\n"
        "  fix:   pass what that call returned in its place; make it anew if x.delete() freed it"
        "          python -m tracegraph error deleted-argument"
    )


def test_same_array_donated_twice():
    value = jnp.zeros(3)
    (violation,) = check(
        leaf(value, path="argument 0 `a`", is_donated=True),
        leaf(value, path="argument 1 `b`", is_donated=True),
    )
    assert to_text(violation) == (
        "argument 1 `b` is the same array as argument 0 `a`, and both are donated\n"
        + PLACE
        + "argument 1 `b`\n"
        "  why:   a donated buffer is overwritten by the call; it cannot be another argument as "
        "well\n"
        "  fix:   pass a copy for one of the two: jnp.array(x, copy=True)"
        "          python -m tracegraph error donated-twice"
    )


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_same_array_donated_and_kept(first, second):
    value = jnp.zeros(3)
    (violation,) = check(
        leaf(value, path="argument 0 `a`", is_donated=first),
        leaf(value, path="argument 1 `b`", is_donated=second),
    )
    donated, kept = ("0 `a`", "1 `b`") if first else ("1 `b`", "0 `a`")
    assert violation.what == f"argument {donated} is donated, and argument {kept} is the same array"


def test_two_arrays_on_one_buffer_are_the_same():
    value = jnp.arange(3)
    other = jax.make_array_from_single_device_arrays(value.shape, value.sharding, [value])
    assert other is not value
    (violation,) = check(leaf(value, is_donated=True), leaf(other))
    assert violation.rule == "donated-twice"


@pytest.mark.parametrize("value", [1.0, np.float32(1), np.zeros(3), jnp.zeros((0,))])
def test_donating_what_has_no_buffer_to_give_is_fine(value):
    same = value if not isinstance(value, jax.Array) else jnp.zeros((0,))
    assert check(leaf(value, is_donated=True), leaf(same, is_donated=True)) == ()


def test_same_array_twice_without_donation_is_fine():
    value = jnp.zeros(3)
    assert check(leaf(value), leaf(value)) == ()


def test_array_on_another_device():
    value = jax.device_put(jnp.zeros(3), DEVICE)
    (violation,) = check(leaf(value), device=OtherDevice())
    assert to_text(violation) == (
        f"argument 0 `x` is on another device: wanted other:0, got {DEVICE}\n"
        + PLACE
        + "argument 0 `x`\n"
        "  why:   a graph's buffers and kernels belong to one device, the current one of the call\n"
        "  fix:   move it first: jax.device_put(x, device), or call it in `with tg.device(0):`"
        "          python -m tracegraph error other-device"
    )


def test_array_that_is_not_committed_may_be_anywhere():
    assert check(leaf(jnp.zeros(3)), device=OtherDevice()) == ()


def test_array_over_several_devices():
    program = """
import jax, numpy as np
from tracegraph.constraints import ArgumentLeaf, check_arguments
first, second = jax.devices()
places = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
for place in (first, second, places):
    leaf = ArgumentLeaf("argument 0 `x`", jax.device_put(np.zeros(4), place), False)
    for violation in check_arguments([leaf], device=first):
        print(violation.what)
"""
    output = run_program(program, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    # The names of JAX's devices differ between versions.
    assert re.fullmatch(
        r"argument 0 `x` is on another device: wanted \w+[:_]0, got \w+[:_]1\n"
        r"argument 0 `x` is on another device: wanted \w+[:_]0, got \w+[:_]0, \w+[:_]1\n",
        output,
    )


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_traced_argument(transform):
    found = []

    def outer(x):
        found.extend(check(leaf(x)))
        return x * 1.0

    transform(outer)(jnp.ones((2,)) if transform is jax.vmap else 1.0)
    (violation,) = found
    assert to_text(violation) == (
        "argument 0 `x` has no value: it is left over from another trace\n"
        + PLACE
        + "argument 0 `x`\n"
        "  why:   what is computed while tracing has no value once the trace has ended, or outside "
        "of it\n"
        "  fix:   return it from the function that computes it, and pass what that call returns"
        "          python -m tracegraph error leaked-tracer"
    )


def test_all_leaves_are_reported_in_order():
    value = jnp.zeros(3)
    rules = [
        violation.rule
        for violation in check(
            leaf({"a"}), leaf(value, is_donated=True), leaf(value), leaf(np.array(["b"]))
        )
    ]
    assert rules == ["non-array-argument", "donated-twice", "non-array-argument"]


@pytest.mark.parametrize(
    ("wanted", "got", "text"),
    [
        (
            ("batch['x']", (32, 784), np.dtype("float32"), False),
            ("batch['x']", (16, 784), np.dtype("float32"), False),
            "batch['x']: wanted f32[32,784], got f32[16,784]",
        ),
        (
            ("x", (), np.dtype("float32"), False),
            ("x", (), np.dtype("int32"), True),
            "x: wanted f32[], got i32[] (weak type)",
        ),
        (
            ("x", (), "bfloat16", True),
            ("x", (), "bfloat16", False),
            "x: wanted bf16[] (weak type), got bf16[]",
        ),
        (
            ("x", (2,), np.dtype("float32"), False),
            ("y", (2,), np.dtype("float32"), False),
            "x: wanted f32[2], got nothing; y: wanted nothing, got f32[2]",
        ),
        (
            ("k", (2,), jax.random.key(0).dtype, False),
            ("k", (3,), jax.random.key(0).dtype, False),
            "k: wanted key<fry>[2], got key<fry>[3]",
        ),
    ],
)
def test_mismatch_shows_only_what_differs(wanted, got, text):
    same = ("same", (1,), np.dtype("float32"), False)
    assert describe_mismatch([same, wanted], [same, got]) == text
    assert describe_mismatch([same, wanted], [same, wanted]) == ""
