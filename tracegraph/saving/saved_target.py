"""What a file says of the machine and the versions that it is for, and whether they are here.

Plain JSON, apart from all else in the file, so that other versions can read it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import jax

from tracegraph.runtime.definition.code_target import CodeTarget, print_cuda
from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.saving.saved_file import ANCHOR, raise_damage

_JAXLIB = importlib.metadata.version("jaxlib")
# Features are named in messages up to this many.
MAX_FEATURES = 5


@dataclasses.dataclass(frozen=True)
class FileOrigin:
    """What a file was made with.

    Attributes:
        target: what its code is compiled for; ``driver`` is the oldest that runs it.
        tracegraph: version.
        jax: version.
        jaxlib: version.
    """

    target: CodeTarget
    tracegraph: str
    jax: str
    jaxlib: str

    def __str__(self) -> str:
        target = f"{self.target.name} ({self.target.architecture})"
        return f"{target}, JAX {self.jax}, tracegraph {self.tracegraph}"


def describe_origin(target: CodeTarget, version: str) -> dict[str, Any]:
    """Returns what a file says that is written here.

    Args:
        target: of the device that its graphs are for.
        version: of tracegraph.
    """
    # Code of a version of CUDA runs with every driver of the same major version.
    origin = FileOrigin(
        dataclasses.replace(target, driver=target.compiler // 1000 * 1000),
        version,
        jax.__version__,
        _JAXLIB,
    )
    return dataclasses.asdict(origin)


def read_origin(content: Any, source: str) -> FileOrigin:
    """Returns what a file says.

    Args:
        content: of JSON.
        source: what messages call the file.

    Raises:
        SavedFileError: it says nothing, or other things than `describe_origin`.
    """
    place = "the header, origin"
    wanted = {each.name for each in dataclasses.fields(FileOrigin)}
    if not isinstance(content, dict) or content.keys() != wanted:
        raise_damage(source, place, f"it has not {', '.join(sorted(wanted))}")
    target = content["target"]
    types = {"features": list, "compiler": int, "driver": int}
    fields = {each.name: types.get(each.name, str) for each in dataclasses.fields(CodeTarget)}
    if not isinstance(target, dict) or {k: type(v) for k, v in target.items()} != fields:
        raise_damage(source, place, f"its target has not {', '.join(sorted(fields))}")
    texts = [*target["features"], *(content[name] for name in wanted - {"target"})]
    if not all(type(each) is str for each in texts):
        raise_damage(source, place, "a version or a feature is not a text")
    features = tuple(target["features"])
    return FileOrigin(**{**content, "target": CodeTarget(**{**target, "features": features})})


def check_origin(origin: FileOrigin, target: CodeTarget, source: str) -> None:
    """Refuses a file for another machine or another JAX.

    Args:
        origin: what the file says.
        target: of the device that it is loaded on.
        source: what messages call the file.

    Raises:
        SavedFileError: it is for another one; both are named.
    """
    problem = _find_problem(origin, target)
    if problem is None:
        return
    wanted, got, why, fix = problem
    raise SavedFileError(
        f"{source} is for {wanted}, and here is {got}",
        where=f"{source}, saved with {origin}",
        why=why,
        fix=fix,
        anchor=ANCHOR,
    )


def _find_problem(origin: FileOrigin, target: CodeTarget) -> tuple[str, str, str, str] | None:
    """Returns what the file is for, what is here, why that matters, and what to do."""
    saved = origin.target
    if (saved.platform, saved.architecture) != (target.platform, target.architecture):
        wanted, got = _name_machine(saved), _name_machine(target)
        return wanted, got, "it holds machine code", "save it on a machine like this one"
    missing = sorted(set(saved.features) - set(target.features))
    if missing:
        shown = ", ".join(missing[:MAX_FEATURES])
        return (
            f"a CPU with {shown}",
            "one without" if len(missing) <= MAX_FEATURES else f"one without {len(missing)} such",
            "it holds machine code that uses all that its CPU could",
            "save it on this machine, or on an older CPU",
        )
    if target.platform == "cuda" and target.driver < saved.driver:
        return (
            f"a driver of CUDA {print_cuda(saved.driver)} or later",
            f"one of CUDA {print_cuda(target.driver)}",
            "its kernels are compiled for that version of CUDA",
            "install a newer NVIDIA driver, or save it with the JAX plugin of an older CUDA",
        )
    if target.platform == "cpu" and origin.jaxlib != _JAXLIB:
        return (
            f"jaxlib {origin.jaxlib}",
            f"jaxlib {_JAXLIB}",
            "on a CPU it holds programs of XLA, which no other version reads",
            f"save it with this one, or pip install jaxlib=={origin.jaxlib}",
        )
    if _name_series(origin.jax) != _name_series(jax.__version__):
        return (
            f"JAX {origin.jax}",
            f"JAX {jax.__version__}",
            "trees, types and settings of JAX are compared with those of the file",
            f"save it with this one, or pip install jax=={origin.jax}",
        )
    return None


def _name_machine(target: CodeTarget) -> str:
    if target.platform == "cuda":
        return f"a GPU of compute capability {target.architecture} ({target.name})"
    return f"a CPU of {target.architecture}"


def _name_series(version: str) -> str:
    """Returns what versions share that may differ in nothing that matters, as ``0.12``."""
    return ".".join(version.split(".")[:2])
