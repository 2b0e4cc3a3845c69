"""Joint collectives over four CPU devices, in the place of GPUs, against NumPy."""

from __future__ import annotations

from tests.processes import run_program

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TF_CPP_MIN_LOG_LEVEL": "2"}

PROGRAM = """
import functools
import jax, ml_dtypes, numpy as np
import pytest
from tests.fakes.cuda_on_host import STREAM, make_device
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind as Kind, CollectiveNode, Exchange, JointCollectiveNode)
from tracegraph.runtime.cuda import joint_collectives
from tracegraph.runtime.definition.nodes import BufferUse

patch = pytest.MonkeyPatch()
gpus = [make_device(patch, index=index) for index in range(4)]
compile_joint = joint_collectives._compile

def compile_behind(*args):
    call, sharding = compile_joint(*args)
    def run(*arrays):
        for gpu in gpus:
            gpu.driver.finish(STREAM)
        results = jax.block_until_ready(call(*arrays))
        gpus[0].driver.jax_memory.extend(results)
        return results
    return run, sharding

patch.setattr(joint_collectives, "_compile", compile_behind)
rng = np.random.default_rng(3)
DTYPES = {"F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16, "F16": np.float16,
          "S32": np.int32, "U8": np.uint8, "S64": np.int64}
PAIRS, ALL = ((0, 2), (1, 3)), ((0, 1, 2, 3),)
JOIN = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}

def draw(exchange):
    values = np.abs(rng.normal(size=(4, exchange.count)) * 4)
    return [each.astype(DTYPES[exchange.dtype]) for each in values]

def compute(exchange, sources):
    "What each GPU gets."
    results = []
    for number in range(4):
        group = exchange.find_group(number)
        parts, rank, size = [sources[each] for each in group], group.index(number), len(group)
        cut = [np.split(each, size)[rank] for each in parts] if len(parts[0]) % size == 0 else []
        if exchange.kind is Kind.ALL_REDUCE:
            results.append(functools.reduce(JOIN[exchange.reduction], parts))
        elif exchange.kind is Kind.REDUCE_SCATTER:
            results.append(functools.reduce(JOIN[exchange.reduction], cut))
        elif exchange.kind is Kind.ALL_GATHER:
            results.append(np.concatenate(parts))
        elif exchange.kind is Kind.ALL_TO_ALL:
            results.append(np.concatenate(cut))
        else:
            sender = exchange.find_sender(number)
            results.append(np.zeros_like(parts[0]) if sender is None else sources[sender])
    return results

def exchange_all(exchanges, in_place=False):
    "Does them together, and compares every byte of every GPU, those around the targets included."
    sources = [draw(each) for each in exchanges]
    wanted = [compute(*pair) for pair in zip(exchanges, sources)]
    memory, nodes = {}, []
    for index, exchange in enumerate(exchanges):
        nbytes = sources[index][0].nbytes, wanted[index][0].nbytes
        for number in range(4):
            memory[number, f"s{index}"] = np.pad(sources[index][number].view(np.uint8), 8)
            memory[number, f"t{index}"] = np.full(nbytes[1] + 16, 7, np.uint8)
        target = "s" if in_place else "t"
        nodes.append(CollectiveNode("x", exchange, BufferUse(f"s{index}", 8, nbytes[0]),
                                    BufferUse(f"{target}{index}", 8, nbytes[1])))
    def locate(number, use):
        return memory[number, use.buffer].ctypes.data + use.offset
    contexts = {number: gpu.context for number, gpu in enumerate(gpus)}
    devices = [gpu.jax_device for gpu in gpus]
    stage = joint_collectives.JointStage(JointCollectiveNode(tuple(nodes)), devices, contexts,
                                         locate)
    for _ in range(1 if in_place else 2):
        stage.launch()
    for gpu in gpus:
        gpu.driver.finish(STREAM)
    for index in range(len(exchanges)):
        for number in range(4):
            found = memory[number, f"{target}{index}"]
            edge = 0 if in_place else 7
            assert {*found[:8], *found[-8:]} == {edge}, exchanges[index]
            assert found[8:-8].tobytes() == wanted[index][number].tobytes(), exchanges[index]

for dtype in DTYPES:
    for reduction in JOIN:
        groups = PAIRS if dtype != "S32" else ALL
        exchange_all([Exchange(Kind.ALL_REDUCE, dtype, 37, groups, reduction)])
        exchange_all([Exchange(Kind.REDUCE_SCATTER, dtype, 40, groups, reduction)])
for groups in (PAIRS, ALL):
    moves = [Exchange(kind, "U8", 16, groups) for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL)]
    exchange_all(moves)
shift = Exchange(Kind.PERMUTE, "U8", 24, ALL, pairs=((0, 1), (1, 2), (3, 0)))
exchange_all([shift, Exchange(Kind.ALL_REDUCE, "F32", 5, PAIRS, "SUM"), *moves])
exchange_all([Exchange(Kind.ALL_REDUCE, "F32", 64, PAIRS, "SUM")], in_place=True)

# A planted fault: groups in another order are another sum.
wrong = Exchange(Kind.ALL_REDUCE, "F32", 5, ((0, 1), (2, 3)), "SUM")
exchange = joint_collectives._compile
patch.setattr(joint_collectives, "_compile", lambda _, devices: exchange((wrong,), devices))
try:
    exchange_all([Exchange(Kind.ALL_REDUCE, "F32", 5, PAIRS, "SUM")])
except AssertionError:
    print("ok")
"""


def test_each_gpu_gets_what_numpy_computes() -> None:
    assert run_program(PROGRAM, **FOUR).splitlines() == ["ok"]
