"""Captures over CPU devices of two processes, which `jax.distributed` connects."""

from __future__ import annotations

from tests.several_processes import run_together

PROGRAM = """
from tracegraph.capturing import agreement

# 1. A train step equals that of jax.jit on every device, with its state in place.
w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
x = put(np.arange(24, dtype=np.float32).reshape(8, 3) / 8, split)
step, twin = tg.capture(train, donate_argnums=0), jax.jit(train, donate_argnums=0)
ours, theirs = put(w, whole), put(w, whole)
for _ in range(3):
    ours, value = step(ours, x)
    theirs, wanted = twin(theirs, x)
    assert read((ours, value)) == read((theirs, wanted))
assert step.cache_info().misses == 1

# 2. Different programs, then one that fails in one process: refused in both.
def scale(x):
    return x.sum() * (2 + own)

def fail(x):
    if own:
        raise ValueError("planted")
    return x.sum()

refuse(tg.capture, scale, x)
refuse(tg.capture, fail, x, kind=Exception)

# 3. One process does not come; its next capture is in step all the same.
agreement.WAIT_S = 0.01
if not own:
    refuse(tg.capture, lambda x: x.sum() * 3, x)
agreement.WAIT_S = 400.0
wait_for("refused")
assert float(tg.capture(lambda x: x.sum() * 4)(x).addressable_data(0)) == 4 * 276 / 8
# 4. The devices of the other process alone are none to capture for.
theirs_alone = jax.sharding.Mesh([d for d in jax.devices() if d.process_index != own], "data")
refuse(tg.capture, lambda x: x * 2, put(w, jax.NamedSharding(theirs_alone, jax.P())))
"""

OF_FIRST = [
    "`scale` is not captured: process 1 captures another program, `scale`",
    "`fail` is not captured: process 1 failed: ValueError: planted",
    "`<lambda>` is not captured: process 1 has not come to it within 0 seconds",
]
OF_SECOND = [
    "`scale` is not captured: process 0 captures another program, `scale`",
    "planted",
]


def test_two_processes_capture_together_or_not_at_all() -> None:
    first, second = run_together(PROGRAM)
    assert first[:3] == OF_FIRST
    assert second[:2] == OF_SECOND
    for own, line in ((0, first[3]), (1, second[2])):
        assert line == "argument 0 `x` is on the devices of another process", (own, line)
