"""The peer of `data_parallel.py`: sums by NCCL in a CUDA graph of PyTorch, one process per GPU.

    python benchmarks/nccl_peer.py --devices 2 --bytes 65536,1048576

Prints one JSON object: by bytes, the median microseconds of one more sum in a graph of many.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
from typing import Any

from absl import app, flags

_DEVICES = flags.DEFINE_integer("devices", 2, "how many GPUs", 2)
_BYTES = flags.DEFINE_list("bytes", ["65536"], "that each GPU adds")
SHORT, LONG, REPLAYS, REPEATS = 10, 60, 20, 7
PORT = "29517"


def time_sums(torch: Any, values: Any, count: int) -> float:
    """Returns the median microseconds of a replay of a graph with so many sums."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.distributed.all_reduce(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            torch.distributed.all_reduce(values)
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / REPLAYS * 1000)
    return statistics.median(found)


def run(rank: int, devices: int, sizes: list[int]) -> None:
    """Measures in one process; the first one prints."""
    torch: Any = importlib.import_module("torch")
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": PORT}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=devices)
    row = {}
    for nbytes in sizes:
        values = torch.zeros(nbytes // 4, device="cuda")
        short, long = (time_sums(torch, values, count) for count in (SHORT, LONG))
        row[nbytes] = round((long - short) / (LONG - SHORT), 2)
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        print(json.dumps({"torch": torch.__version__, "nccl": nccl, "sums": row}))
    torch.distributed.destroy_process_group()


def main(_: list[str]) -> None:
    """Starts a process per GPU."""
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    sizes = [int(each) for each in _BYTES.value]
    multiprocessing.spawn(run, args=(_DEVICES.value, sizes), nprocs=_DEVICES.value)


if __name__ == "__main__":
    app.run(main)
