"""The processes of a run share what XLA compiles, but not where XLA must compile as for users."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import shared_programs
from tests.optimized import compile_as_for_users
from tests.processes import run_program
from tests.shared_programs import FOLDER, UNFINISHED, UNOPTIMIZED, share_programs


def count_shared(name: str) -> int:
    """Returns how many programs of this name the folder of the run has."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        pytest.skip("programs are not shared on a machine with a GPU")
    return len([*pathlib.Path(folder).glob(f"jit_{name}-*-cache")])


def compile_named(name: str) -> None:
    def function(x: jax.Array) -> jax.Array:
        return x * 3 - 1

    function.__name__ = name
    jax.jit(function)(jnp.zeros(3))


def test_a_compiled_program_is_shared_but_not_as_for_users() -> None:
    name = f"planted_{os.getpid()}"
    with compile_as_for_users():
        assert not jax.config.read("jax_disable_most_optimizations")
        compile_named(name)
    assert count_shared(name) == 0
    compile_named(name)
    assert count_shared(name) == 1


def test_other_processes_share_too() -> None:
    name = f"elsewhere_{os.getpid()}"
    run_program(f"import jax\ndef {name}(x): return x * 5\njax.jit({name})(2.0)")
    assert count_shared(name) == 1


def test_workers_on_a_gpu_find_whole_programs(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "programs"
    program = (
        "import pathlib, sys, jax\n"
        "from tests.shared_programs import share_on_gpu\n"
        f"share_on_gpu(pathlib.Path({str(folder)!r}))\n"
        "def planted(x): return x * 7\n"
        "assert jax.jit(planted)(2.0) == 14\n"
    )
    for _ in range(2):
        run_program(program)
        (path,) = folder.glob("jit_planted-*")
        assert path.name.endswith("-cache")
    assert not list(folder.glob("*.draft"))


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    environment = {FOLDER: "/kept", UNOPTIMIZED: "0", "XLA_FLAGS": ""}
    share_programs(environment)
    assert environment == {FOLDER: "/kept", UNOPTIMIZED: "0", "XLA_FLAGS": ""}


@pytest.fixture
def begin_run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Begins a run of its own, whose folder is kept elsewhere; a run ends when the next begins."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(shared_programs, "KEPT", tmp_path)

    def end() -> None:
        for lock in claimed.values():
            lock.close()
        claimed.clear()

    def begin() -> dict[str, str]:
        end()
        environment: dict[str, str] = {}
        share_programs(environment)
        return environment

    claimed: dict[pathlib.Path, Any] = {}
    monkeypatch.setattr(shared_programs, "_claimed", claimed)
    yield begin
    end()


def start_worker(environment: dict[str, str], name: str) -> pathlib.Path:
    """Returns the folder of a worker of a run."""
    mine = {**environment, "PYTEST_XDIST_WORKER": name}
    share_programs(mine)
    return pathlib.Path(mine[FOLDER])


def test_each_worker_has_a_part_of_the_folder(begin_run: Any) -> None:
    environment = begin_run()
    folder = environment[FOLDER]
    share_programs(environment)
    assert environment[FOLDER] == folder
    part = start_worker(environment, "gw1")
    assert str(part) == f"{folder}/gw1"
    assert part.is_dir()


def test_a_run_has_the_programs_of_the_last_one(begin_run: Any) -> None:
    environment = begin_run()
    for name in ("gw0", "gw1"):
        (start_worker(environment, name) / f"jit_{name}-cache").write_text(name)
    shared_programs.finish_run()
    environment = begin_run()
    for name in ("gw0", "gw2"):
        part = start_worker(environment, name)
        assert (part / "jit_gw0-cache").read_text() == "gw0"
        assert (part / "jit_gw1-cache").read_text() == "gw1"


def test_what_a_killed_run_has_left_goes(begin_run: Any) -> None:
    folder = pathlib.Path(begin_run()[FOLDER])
    (folder / "jit_half-cache").write_text("ha")
    assert pathlib.Path(begin_run()[FOLDER]) == folder
    assert [path.name for path in folder.iterdir()] == [UNFINISHED]


def test_too_many_programs_go(begin_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pathlib.Path(begin_run()[FOLDER])
    (folder / "jit_large-cache").write_text("12345")
    shared_programs.finish_run()
    monkeypatch.setattr(shared_programs, "MAX_KEPT_BYTES", 5)
    begin_run()
    assert (folder / "jit_large-cache").exists()
    shared_programs.finish_run()
    monkeypatch.setattr(shared_programs, "MAX_KEPT_BYTES", 4)
    begin_run()
    assert not (folder / "jit_large-cache").exists()


def test_a_run_beside_another_has_a_folder_of_its_own(begin_run: Any) -> None:
    first = begin_run()
    second: dict[str, str] = {}
    share_programs(second)
    assert second[FOLDER] != first[FOLDER]
    pathlib.Path(second[FOLDER]).rmdir()


def test_candidates_are_shared_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    environment: dict[str, str] = {}
    share_programs(environment)
    assert [*environment] == ["XLA_FLAGS"]
    flag, folder = environment["XLA_FLAGS"].split("=")
    assert flag == "--xla_gpu_per_fusion_autotune_cache_dir"
    before = dict(environment)
    share_programs(environment)
    assert environment == before
    pathlib.Path(folder).rmdir()


def test_programs_are_lowered_in_few_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    make, made = mlir.JaxIrContext.__init__, []

    def note(context: object, *args: object, **kwargs: object) -> None:
        made.append(None)
        make(context, *args, **kwargs)

    monkeypatch.setattr(mlir.JaxIrContext, "__init__", note)
    texts = {jax.jit(lambda x, n=n: x + n).lower(1.0).as_text() for n in range(60)}
    assert len(texts) == 60
    assert 1 <= len(made) <= 20
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # What is computed while a program is lowered must not become a part of that.
        with mlir.make_ir_context() as context:
            assert mlir.make_ir_context() is not context
