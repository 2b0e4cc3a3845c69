"""The processes of a run share what XLA compiles, but not where XLA must compile as for users."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from tests.optimized import compile_as_for_users
from tests.processes import run_program
from tests.shared_programs import FOLDER, UNOPTIMIZED, share_programs


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


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    environment = {FOLDER: "/kept", UNOPTIMIZED: "0", "XLA_FLAGS": ""}
    share_programs(environment)
    assert environment == {FOLDER: "/kept", UNOPTIMIZED: "0", "XLA_FLAGS": ""}


def test_each_worker_has_a_part_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    environment: dict[str, str] = {}
    share_programs(environment)
    folder = environment[FOLDER]
    share_programs(environment)
    assert environment[FOLDER] == folder
    environment["PYTEST_XDIST_WORKER"] = "gw1"
    share_programs(environment)
    assert environment[FOLDER] == f"{folder}/gw1"
    pathlib.Path(folder).rmdir()


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
