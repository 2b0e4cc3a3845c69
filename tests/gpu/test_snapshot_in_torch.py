"""PyTorch and tracegraph read each other's memory snapshots, and print the same table."""

import pickle
import random

import pytest

from tests.oracles.snapshot_viewer import check_opcodes, view
from tests.runtime.memory.snapshots.test_snapshot import make_recorded, run_at_random
from tracegraph.memory_pictures.timeline import draw_memory
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.snapshots.snapshot import (
    build_snapshot,
    read_snapshot,
    write_snapshot,
)
from tracegraph.runtime.memory.snapshots.summary import format_summary

pytestmark = pytest.mark.usefixtures("gpu", "untried")
MIB = 1 << 20


@pytest.fixture(scope="module")
def torch():
    """PyTorch; not imported where the tests are only collected, which each worker does."""
    return pytest.importorskip("torch", reason="needs PyTorch, which is not installed")


def skip_without_cuda(torch):
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch that is built for CUDA")


def record_in_torch(torch, path):
    """Allocates and frees with PyTorch while it records; writes its snapshot."""
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(stacks="python")
    rng = random.Random(0)
    live = []
    for _ in range(200):
        nbytes = rng.choice([100, 5000, 600_000, 3 * MIB, 12 * MIB])
        live.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        if rng.random() < 0.6:
            del live[rng.randrange(len(live))]
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    return live


@pytest.fixture
def ours(tmp_path):
    allocator = make_recorded(operations=400)
    run_at_random(allocator, random.Random(9), 100)
    path = tmp_path / "ours.pickle"
    write_snapshot(path, build_snapshot([allocator], AllocatorConfig()))
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("plot", ["segment_plot", "trace_plot"])
def test_torch_plots_ours(torch, ours, plot):
    page = getattr(torch.cuda._memory_viz, plot)(ours)
    assert "<html" in page or "<script" in page
    assert len(page) > 10_000


@pytest.mark.parametrize("text", ["segsum", "trace"])
def test_torch_prints_ours(torch, ours, text):
    printed = getattr(torch.cuda._memory_viz, text)(ours)
    assert len(printed.splitlines()) > 10


@pytest.mark.parametrize("flames", ["segments", "memory"])
def test_torch_makes_flames_of_ours(torch, ours, flames):
    printed = getattr(torch.cuda._memory_viz, flames)(ours, format_flamegraph=lambda lines: lines)
    total = sum(int(line.rsplit(" ", 1)[1]) for line in printed.splitlines())
    assert total == sum(segment["total_size"] for segment in ours["segments"])


def test_torch_compares_ours(torch, ours):
    compared = torch.cuda._memory_viz.compare(
        ours["segments"], ours["segments"], format_flamegraph=lambda lines: lines
    )
    assert isinstance(compared, str)


def test_ours_has_the_keys_of_torch(torch, ours, tmp_path):
    skip_without_cuda(torch)
    live = record_in_torch(torch, tmp_path / "theirs.pickle")
    theirs = read_snapshot(tmp_path / "theirs.pickle")
    assert set(theirs) <= set(ours)
    assert set(theirs["segments"][0]) == set(ours["segments"][0])
    assert set(theirs["segments"][0]["blocks"][0]) == set(ours["segments"][0]["blocks"][0])
    optional = {"compile_context", "user_metadata"}
    for entry in theirs["device_traces"][0]:
        assert set(entry) - optional <= set(ours["device_traces"][0][0]), entry
    settings = theirs["allocator_settings"]
    assert set(ours["allocator_settings"]) >= set(settings) - {"graph_capture_record_stream_reuse"}
    assert settings["max_split_size"] == ours["allocator_settings"]["max_split_size"]
    divisions = settings["roundup_power2_divisions"]
    assert divisions.keys() == ours["allocator_settings"]["roundup_power2_divisions"].keys()
    del live


def test_a_snapshot_of_torch_is_read_and_drawn(torch, tmp_path):
    skip_without_cuda(torch)
    path = tmp_path / "theirs.pickle"
    live = record_in_torch(torch, path)
    check_opcodes(path.read_bytes())
    theirs = read_snapshot(path)
    assert "test_snapshot_in_torch.py" in draw_memory(theirs)
    requested = sum(segment["requested_size"] for segment in theirs["segments"])
    assert view(theirs)[0]["sizes"][-1] == requested
    del live


@pytest.mark.parametrize("is_abbreviated", [False, True])
def test_the_table_is_that_of_torch(torch, is_abbreviated):
    skip_without_cuda(torch)
    live = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (99, 5 * MIB)]
    stats = torch.cuda.memory_stats()
    theirs = torch.cuda.memory_summary(abbreviated=is_abbreviated).splitlines()
    ours = format_summary(stats, is_abbreviated=is_abbreviated).splitlines()
    # All but the title and the two counters below it.
    assert ours[4:] == theirs[4:]
    del live
