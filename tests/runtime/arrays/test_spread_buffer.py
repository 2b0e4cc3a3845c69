"""Buffers over two devices, whose parts note what is written into them."""

from __future__ import annotations

from tests.processes import run_program

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import tracegraph as tg
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.jax_interop import make_aval
from tracegraph.runtime.arrays.spread_buffer import SpreadBuffer, SpreadContext, SpreadValue

first, second = jax.devices()
mesh = Mesh(np.array(jax.devices()), ("i",))
split, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())

class Piece:
    "A copy of a part, as a GPU makes it."
    def __init__(self, array): self.array = array
    def copy(self): return Piece(self.array.copy())
    def to_jax(self): return self.array
    def block_until_ready(self): self.array.block_until_ready()
    def is_ready(self): return True

class Part:
    arena, address = None, 64
    def __init__(self, device): self.name, self.jax_device, self.written = "x", device, None
    def write(self, value):
        value = value.to_jax() if isinstance(value, Piece) else value
        assert value.devices() == {self.jax_device}, (value.devices(), self.jax_device)
        self.written = value
    def make_writer(self): return self.write
    def reads(self, array): return self.written is not None and np.array_equal(self.written, array)
    @property
    def view(self): return Piece(self.written)
    def snapshot(self): return Piece(self.written)

class Context:
    def __init__(self, idle): self.idle, self.waits = idle, 0
    def synchronize(self): self.waits += 1
    def is_idle(self): return self.idle

contexts = Context(True), Context(False)
context = SpreadContext(contexts)
assert not context.is_idle()
context.synchronize()
assert [each.waits for each in contexts] == [1, 1]

x = np.arange(8, dtype=np.float32)
def make(sharding):
    parts = Part(first), Part(second)
    aval = make_aval((8,), np.dtype(np.float32))
    return parts, SpreadBuffer(parts, aval, sharding, ReplayClock(), context)

def check(parts, values, sharding):
    wanted = values.reshape(2, 4) if sharding is split else [values, values]
    assert all(np.array_equal(part.written, piece) for part, piece in zip(parts, wanted))

for sharding in (split, whole):
    parts, buffer = make(sharding)
    take = buffer.make_writer()
    sources = [
        jax.device_put(x, sharding), jax.device_put(x, split), jax.device_put(x, whole),
        jax.device_put(x, second), jnp.asarray(x), jax.device_put(x, sharding),
    ]
    for number, source in enumerate(sources):
        take(source + number)
        check(parts, x + number, sharding)
        buffer.write(source * 2)
        check(parts, x * 2, sharding)
    buffer.write(x)
    check(parts, x, sharding)
    # Of a graph of one device, and a copy of its value.
    buffer.write(tg.capture(lambda a: a + 5)(x))
    check(parts, x + 5, sharding)
    buffer.write(Piece(jnp.asarray(x) + 6))
    check(parts, x + 6, sharding)
    # What it holds, for another one.
    others, other = make(sharding)
    other.write(buffer.snapshot())
    check(others, x + 6, sharding)
    copied = buffer.snapshot().to_jax()
    assert copied.sharding == sharding and np.array_equal(copied, x + 6)
    assert buffer.view.copy().is_ready()
    assert buffer.reads(copied) and not buffer.reads(copied + 1)
    assert not buffer.reads(jnp.asarray(x)), "one device has not all parts"
    assert not buffer.read_at(64) and buffer.address == 64 and buffer.memory is None

# Too few pieces are an error.
parts, buffer = make(split)
try:
    buffer.write(SpreadValue([Piece(jnp.zeros(4))], buffer.aval, split))
except ValueError:
    pass
else:
    raise SystemExit("written")

# A stream is of one device.
for refuse in (context.number_stream, lambda stream: context.hold(None, None, stream)):
    try:
        refuse(tg.Stream())
    except tg.UnsupportedError as error:
        assert error.anchor == "several-devices" and len(str(error).splitlines()) == 4
    else:
        raise SystemExit("taken")
print("ok")
"""


def test_a_buffer_has_a_part_on_each_device() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(PROGRAM, XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="2") == "ok\n"
