"""Assembly refuses steps beyond a buffer, and programs that contradict themselves."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes.gpu_programs import CODE, ONE_BLOCK, allocation, kernel, spec, use
from tests.lowering.test_assemble import CONTENT, OUTPUT, PARAMETER, TEMP, X, Y, place
from tests.oracles.error_lines import match
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode, TensorMap
from tracegraph.runtime.errors import InternalError, UnsupportedError


def fill_range(target: BufferUse) -> DeviceStep:
    return DeviceStep(FillNode("a", target), (), (target,))


def copy_range(source: BufferUse, target: BufferUse) -> DeviceStep:
    return DeviceStep(CopyNode("a", source, target), (source,), (target,))


def multiply(**operands: BufferUse) -> DeviceStep:
    """Returns a matmul of 4 x 4 matrices of `#p` and `#q`, with some other operands."""
    uses = {"a": use("#p"), "b": use("#q"), "d": use("#t"), "workspace": use("#t[256:512]")}
    uses |= operands
    layout = MatrixLayout("float32", 4, 4, 4)
    matmul = Matmul(layout, layout, layout, layout, 1.0, 0.0, "32F", "float32")
    written = [use for role, use in uses.items() if role in MatmulNode.WRITTEN]
    read = [use for role, use in uses.items() if role not in MatmulNode.WRITTEN]
    return DeviceStep(MatmulNode("a", matmul, tuple(uses.items())), tuple(read), tuple(written))


def tile(target: BufferUse) -> DeviceStep:
    """Returns a kernel that reads `#p` through a tensor map and writes a range."""
    tensor_map = TensorMap(use("#p[0:128]"), 4, (32,), (), (32,), (1,))
    node = KernelNode("a", CODE, ONE_BLOCK, (tensor_map, target), (False, True))
    return DeviceStep(node, (), (target,))


HUGE = 2**63
# Allocations: `#p` has 128 bytes of which the argument `x` has 64, `#t` has 512, `#o` has 64.
OUTSIDE: dict[str, tuple[DeviceStep, str]] = {
    "a memset beyond a donated input": (fill_range(use("#p[0:128]")), "memset 0 128 #p 64"),
    "a memset beyond a temporary": (fill_range(use("#t[256:513]")), "memset 256 513 #t 512"),
    "a memset below": (fill_range(BufferUse("#t", -4, 8)), "memset -4 4 #t 512"),
    "a memset of less than nothing": (fill_range(BufferUse("#t", 8, -4)), "memset 8 4 #t 512"),
    "a memset of no bytes behind": (fill_range(BufferUse("#t", 513, 0)), "memset 513 513 #t 512"),
    "a memset of 2**63 bytes": (fill_range(BufferUse("#t", 0, HUGE)), f"memset 0 {HUGE} #t 512"),
    "a memset at 2**63": (fill_range(BufferUse("#t", HUGE, -HUGE)), f"memset {HUGE} 0 #t 512"),
    "a memcpy from beyond an input": (
        copy_range(use("#p[64:128]"), use("#t[0:64]")),
        "memcpy 64 128 #p 64",
    ),
    "a memcpy to beyond a result": (
        copy_range(use("#t[0:64]"), use("#o[8:72]")),
        "memcpy 8 72 #o 64",
    ),
    "a kernel's argument": (kernel("a", "#t #p[60:68]", "#o"), "kernel 60 68 #p 64"),
    "a kernel's result": (kernel("a", "#p", "#o[0:65]"), "kernel 0 65 #o 64"),
    "a tensor map": (tile(use("#o")), "kernel 0 128 #p 64"),
    "a matmul's operand": (multiply(b=use("#q[32:96]")), "matmul 32 96 #q 64"),
    "a matmul's scale": (multiply(a_scale=use("#q[64:68]")), "matmul 64 68 #q 64"),
    "a matmul's result": (multiply(d=use("#o[16:80]")), "matmul 16 80 #o 64"),
    "a matmul's workspace": (multiply(workspace=use("#t[64:1024]")), "matmul 64 1024 #t 512"),
}


@pytest.mark.parametrize("fault", OUTSIDE)
@pytest.mark.parametrize("has_range_in_step", [True, False])
def test_a_step_beyond_a_buffer_is_refused(fault: str, has_range_in_step: bool):
    step, expected = OUTSIDE[fault]
    kind, begin, end, name, size = expected.split()
    if not has_range_in_step:
        step = dataclasses.replace(step, reads=(), writes=())
    more = [allocation("#o", OUTPUT), TEMP]
    with pytest.raises(UnsupportedError) as raised:
        place([step], more, [("#o", spec("n"))], in_place=1, parameter_bytes=128)
    text = "the program that XLA compiled reaches out of a buffer: "
    text += f"bytes {int(begin):,} to {int(end):,} of `{name}`, which has {int(size):,}"
    match(raised.value, text, f"{kind} `a` of `r`", "the bytes behind", "use jax.jit")


def test_ranges_up_to_the_end_of_a_buffer_are_taken():
    steps = [
        fill_range(use("#p")),
        copy_range(use("#p[60:64]"), use("#t[508:512]")),
        fill_range(BufferUse("#t", 512, 0)),
        multiply(),
        kernel("a", "#t[448:512]", "#o"),
    ]
    more = [allocation("#o", OUTPUT), TEMP]
    assert place(steps, more, [("#o", spec("n"))], in_place=1, parameter_bytes=128).steps


def test_a_memcpy_of_two_sizes_is_refused():
    step = copy_range(use("#p"), use("#t[0:32]"))
    with pytest.raises(UnsupportedError, match="a memcpy from 64 to 32 bytes"):
        place([step], [TEMP], [])


def test_a_result_beyond_an_argument_is_refused():
    with pytest.raises(UnsupportedError, match="bytes 0 to 100 of `#p`, which has 64") as raised:
        place([], [], [("#p", spec("n", 100))], parameter_bytes=128)
    assert raised.value.where == "result `n` of `r`"


@pytest.mark.parametrize("number", [-1, 2, HUGE])
def test_a_parameter_that_the_region_does_not_have(number: int):
    wrong = allocation("#w", PARAMETER, parameter=number)
    with pytest.raises(InternalError, match=r"has parameters .* of 2"):
        place([], [wrong], [])


def break_node() -> DeviceStep:
    step = kernel("a", "#p", "#t")
    return dataclasses.replace(step, writes=())


FAULTS = {
    "an unknown allocation": (kernel("a", "#p", "#x"), [], "unknown allocations are used: #x"),
    "an unknown result": (kernel("a", "#p", "#t"), [("#x", spec("n"))], "unknown allocations"),
    "a range that only the node knows": (break_node(), [], "`a` neither reads nor writes"),
    "a write to an input": (kernel("a", "#p", "#q"), [], "`a` writes `y`, which is not donated"),
    "a write to a constant": (kernel("a", "#p", "#c"), [], "which is not donated"),
    "copies in a circle": (kernel("a", "#p", "#t"), [("#q", X), ("#p", Y)], "in a circle"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_contradicts_itself_is_an_error_of_ours(fault: str):
    step, results, text = FAULTS[fault]
    with pytest.raises(InternalError, match=text) as raised:
        place([step], [CONTENT, TEMP], results, in_place=1)
    assert raised.value.fix.startswith("internal error")
