"""Streams fork from the capturing stream, wait for what they use, and join it."""

import types

import jax
import numpy as np

from tracegraph.constraints import check_graph
from tracegraph.ir.graph import Constant, Graph, Op, Origin, Value

AVAL = jax.ShapeDtypeStruct((4,), np.float32)
WAIT, RECORD = "tg_wait", "tg_record"


class Program:
    """Writes a graph op by op; line numbers count the ops."""

    def __init__(self):
        self.ops = []
        self.numbers = 0
        self.input = self.define()
        self.constant = self.define()

    def define(self):
        self.numbers += 1
        return Value(self.numbers - 1, AVAL)

    def run(self, stream, *operands, scope="", backward_on=None):
        result = self.define()
        self.append("add", (result,), operands, {}, stream, scope, backward_on)
        return result

    def mark(self, name, stream, event):
        self.append(name, (), (), {"stream": stream, "event": event}, 0, "")

    def order(self, first, second, event):
        """Makes stream ``second`` wait for what stream ``first`` holds."""
        self.mark(RECORD, first, event)
        self.mark(WAIT, second, event)

    def append(self, name, results, operands, params, stream, scope, backward_on=None):
        source = f"a.py:{len(self.ops) + 1} in step"
        origin = Origin(source, scope=scope, stream=stream, backward_on=backward_on)
        primitive = types.SimpleNamespace(name=name)
        self.ops.append(Op(results, primitive, operands, params, (), origin))

    def check(self):
        constants = (Constant(self.constant, "c0", np.zeros(4, np.float32)),)
        return check_graph(Graph("step", (self.input,), constants, tuple(self.ops), ()))


def test_fork_wait_and_join_are_fine():
    program = Program()
    first = program.run(0, program.input)
    program.order(0, 3, event=0)
    second = program.run(3, first, program.constant)
    program.order(3, 0, event=1)
    program.run(0, first, second)
    assert program.check() == ()


def test_one_stream_needs_no_wait():
    program = Program()
    program.run(0, program.run(0, program.input), program.constant)
    assert program.check() == ()


def test_use_without_a_wait():
    program = Program()
    program.order(0, 3, event=0)
    made = program.run(3, program.input)
    program.run(0, made)
    program.order(3, 0, event=1)
    (violation,) = program.check()
    assert str(violation) == (
        "`step` uses a value of stream 3 on the capturing stream without a wait\n"
        "  where: a.py:4 in step, %3 = add %2\n"
        "  why:   %2 was made on stream 3 at a.py:3 in step, and nothing makes the capturing "
        "stream wait for it; the two run side by side in a CUDA graph\n"
        "  fix:   write `a.wait_stream(b)` before this line, where a is the capturing stream and b "
        "is stream 3          python -m tracegraph error stream-wait"
    )


def test_wait_that_came_too_early_does_not_cover():
    program = Program()
    program.order(0, 3, event=0)
    late = program.run(0, program.input)
    program.run(3, late)
    program.order(3, 0, event=1)
    (violation,) = program.check()
    assert (
        violation.what == "`step` uses a value of the capturing stream on stream 3 without a wait"
    )


def test_event_recorded_before_the_value_does_not_cover():
    program = Program()
    program.order(0, 3, event=0)
    program.run(3, program.input)
    program.mark(RECORD, 3, 1)
    late = program.run(3, program.input)
    program.mark(WAIT, 0, 1)
    program.run(0, late)
    program.order(3, 0, event=2)
    (violation,) = program.check()
    assert violation.rule == "stream-wait"
    assert violation.where.startswith("a.py:7 in step")


def test_wait_through_a_third_stream_covers():
    program = Program()
    program.order(0, 3, event=0)
    made = program.run(3, program.input)
    program.order(3, 4, event=1)
    used = program.run(4, made)
    program.order(4, 0, event=2)
    program.run(0, made, used)
    assert program.check() == ()


def test_two_side_streams_need_a_wait_between_them():
    program = Program()
    program.order(0, 3, event=0)
    program.order(0, 4, event=1)
    program.run(4, program.run(3, program.input))
    program.order(3, 0, event=2)
    program.order(4, 0, event=3)
    (violation,) = program.check()
    assert violation.what == "`step` uses a value of stream 3 on stream 4 without a wait"


def test_stream_that_has_not_forked():
    program = Program()
    program.run(3, program.input)
    program.run(3, program.input)
    program.order(3, 0, event=0)
    (violation,) = program.check()
    assert str(violation) == (
        "`step` works on stream 3 before the stream has forked\n"
        "  where: a.py:1 in step, %2 = add %0\n"
        "  why:   a stream belongs to a capture only after it has waited for the capturing stream\n"
        "  fix:   write `s.wait_stream(tg.current_stream())` before `with tg.stream(s)`, where s "
        "is stream 3          python -m tracegraph error stream-wait"
    )


def test_event_of_a_stream_that_has_not_forked():
    program = Program()
    program.order(3, 0, event=0)
    (violation,) = program.check()
    assert violation.what == "`step` works on stream 3 before the stream has forked"
    assert violation.where == "a.py:1 in step, tg_record"


def test_stream_that_has_not_joined():
    program = Program()
    program.order(0, 3, event=0)
    program.run(3, program.input)
    program.order(3, 0, event=1)
    program.run(3, program.input)
    (violation,) = program.check()
    assert str(violation) == (
        "`step` ends while stream 3 has not joined the capturing stream\n"
        "  where: a.py:6 in step, %3 = add %0\n"
        "  why:   this op is the last on stream 3, which forked at a.py:2 in step, and nothing in "
        "the capture waits for it\n"
        "  fix:   write `tg.current_stream().wait_stream(s)` at the end, where s is stream 3"
        "          python -m tracegraph error stream-join"
    )


def test_wait_for_an_event_that_was_never_recorded():
    program = Program()
    program.mark(WAIT, 0, 7)
    program.mark(RECORD, 0, 7)
    (violation,) = program.check()
    assert str(violation) == (
        "`step` makes the capturing stream wait for event 7, which was never recorded\n"
        "  where: a.py:1 in step, tg_wait\n"
        "  why:   an event orders nothing until it is recorded, in the same capture and before the "
        "wait; it is recorded later, at a.py:2 in step\n"
        "  fix:   call `record` on event 7 before this line; for one that work outside of the "
        "graph records, make it tg.Event(external=True)          "
        "python -m tracegraph error stream-wait"
    )


def test_backward_pass_orders_itself():
    program = Program()
    program.order(0, 3, event=0)
    forward = program.run(3, program.input, scope="jvp(tg_stream_3)")
    program.order(3, 0, event=1)
    loss = program.run(0, forward)
    backward = program.run(3, loss, forward, scope="transpose(jvp(tg_stream_3))", backward_on=0)
    program.run(0, backward)
    assert program.check() == ()


def test_backward_pass_is_work_of_the_stream_that_calls_it():
    program = Program()
    program.order(0, 3, event=0)
    forward = program.run(0, program.input, scope="jvp()")
    seed = program.run(0, program.input)
    backward = program.run(0, seed, forward, scope="tg_stream_3/transpose(jvp())", backward_on=3)
    program.run(0, backward)
    program.order(3, 0, event=1)
    before, after = program.check()
    assert before.where == "a.py:5 in step, %4 = add %3, %2"
    assert before.why.startswith("%3 was made on the capturing stream at a.py:4 in step, and")
    assert after.where == "a.py:6 in step, %5 = add %4"
    assert after.why.startswith("%4 was made on stream 3 at a.py:5 in step, and")


def test_backward_pass_joins_by_the_stream_that_calls_it():
    program = Program()
    program.order(0, 3, event=0)
    program.order(0, 4, event=1)
    forward = program.run(4, program.input, scope="jvp(tg_stream_4)")
    program.order(4, 0, event=2)
    program.run(4, forward, scope="tg_stream_3/transpose(jvp(tg_stream_4))", backward_on=3)
    (violation,) = program.check()
    assert violation.what == "`step` ends while stream 3 has not joined the capturing stream"


def test_what_is_read_before_a_fork_and_the_wait_that_comes_too_late_are_named():
    program = Program()
    made = program.run(0, program.input)
    program.run(3, made)
    program.order(0, 3, event=0)
    program.order(3, 0, event=1)
    (violation,) = program.check()
    assert violation.why.endswith(
        "; this op reads %2, made at a.py:1 in step; its first wait, at a.py:4 in step, comes later"
    )


def test_forward_pass_under_grad_does_not_order_itself():
    program = Program()
    program.order(0, 3, event=0)
    program.run(0, program.run(3, program.input, scope="jvp(tg_stream_3)"))
    program.order(3, 0, event=1)
    (violation,) = program.check()
    assert violation.rule == "stream-wait"


def test_all_violations_come_in_program_order():
    program = Program()
    program.run(3, program.input)
    program.mark(WAIT, 0, 7)
    program.order(0, 4, event=0)
    program.run(0, program.run(4, program.input))
    assert [violation.where.split(" ")[0] for violation in program.check()] == [
        "a.py:1",
        "a.py:1",
        "a.py:2",
        "a.py:6",
    ]
