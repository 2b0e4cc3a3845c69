"""Our caching allocator against PyTorch's, live: the same operations, the same answers.

PyTorch runs in processes of its own and records 20 random traces of 2000 operations, and those
whose recordings are in tests/data. Ours then gets the segments that PyTorch obtained, and must
return the same address at each step, with the same statistics, history and blocks.
"""

import concurrent.futures
import importlib.metadata
import importlib.util

import pytest

from tests.gpu import sharing
from tests.gpu.subprocesses import run_python
from tests.gpu.torch_allocator import LIVE, list_recordings
from tests.oracles.allocator_player import Player
from tests.oracles.allocator_traces import read_traces

pytestmark = pytest.mark.usefixtures("gpu")
# For later ones, requests to a private pool alone are no capture.
TORCH_VERSIONS = ("2.10.", "2.11.")
VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": ""}
# Most of the time goes to reading the statistics after each operation, in Python.
RECORDERS = 8
PROGRAM = f"""
import pathlib, sys
from tests.gpu.torch_allocator import list_live_recordings, list_recordings, record_files
part = int(sys.argv[2])
# The others come later, for some leave settings that a count of these depends on.
files = {{f"live_{{part}}": list_live_recordings()[part::{RECORDERS}]}}
files |= dict(list(list_recordings().items())[part::{RECORDERS}])
record_files(pathlib.Path(sys.argv[1]), files, preset=0)
"""
TIMEOUT_S = 540
OTHERS = [recording.name for file in list_recordings().values() for recording in file]
# See Note [Forgotten uses] in tests/fakes/recorded_events.py: seldom, if ever.
MOST_FORGOTTEN = 5


def find_obstacle():
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch, which is not installed"
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH_VERSIONS):
        return f"knows the rules of PyTorch {TORCH_VERSIONS}, not those of {version}"
    return ""


@pytest.fixture(scope="module")
def traces(gpu, turns, tmp_path_factory):
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    folder = sharing.find_shared_folder(tmp_path_factory) / "traces_of_torch"
    # Not while a test that is alone on the GPU counts its bytes.
    turns.take(alone=False)
    with sharing.hold_file(folder.with_suffix(".lock")):
        if not folder.exists():
            record(folder, tmp_path_factory.mktemp("traces"))
    return {trace.name: trace for path in folder.iterdir() for trace in read_traces(path)}


def record(folder, fresh):
    """Writes the traces of all recorders."""

    def run(part):
        command = ["-c", PROGRAM, fresh, part]
        return run_python(command, timeout_s=TIMEOUT_S, variables=VARIABLES)

    with concurrent.futures.ThreadPoolExecutor(RECORDERS) as pool:
        for ran in pool.map(run, range(RECORDERS)):
            assert ran.returncode == 0, ran.stdout + ran.stderr
    fresh.rename(folder)


def test_the_random_traces_are_what_they_should_be(traces):
    assert len(LIVE) == 20
    for name in LIVE:
        steps = traces[name].steps
        assert len(steps) >= 2000
        kinds = {step.operation[0] for step in steps}
        assert kinds >= {"record", "block", "pool_begin", "pool_release", "empty"}
        assert {step.operation[3] for step in steps if step.operation[0] == "alloc"} == {0, 1}


@pytest.mark.parametrize("name", [*LIVE, *OTHERS])
def test_ours_does_what_torch_does(name, traces):
    player = Player(traces[name])
    assert [str(difference) for difference in player.play()] == []
    assert player.events.forgotten_uses <= MOST_FORGOTTEN


def test_the_records_of_streams_matter(traces, monkeypatch):
    monkeypatch.setattr(Player, "_play_record", lambda *_: "recorded")
    assert any(Player(traces[name]).play() for name in LIVE)
