"""What becomes of a function on its way to a CUDA graph, and of many of them in a table."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

from tests.conformance import harnesses
from tests.deviceless import pipeline
from tracegraph.lowering import read_region
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.schema import load_schema
from tracegraph.lowering.xla.thunks import read_kind
from tracegraph.runtime.errors import CaptureError, UnsupportedError

SAMPLE_CASES = 480
SHARDS = 8
CUSTOM_CALL = "custom_call"


class Outcome(enum.Enum):
    """How far a function came."""

    BUILT = "built"
    REFUSED = "refused"
    NOT_CAPTURED = "not captured"
    NOT_COMPILED = "not compiled"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What became of one function.

    Attributes:
        name: of the case.
        outcome: how far it came.
        reason: the first line of the refusal; empty when built.
        kinds: thunks of each kind in XLA's program, custom calls by their target.
        nodes: of the graph.
        edges: of the graph.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nodes: int = 0
    edges: int = 0


def measure(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device: Any,
    donate_argnums: Sequence[int] = (),
) -> tuple[Figures, Lowered | None]:
    """Captures, compiles, decodes, plans and builds one function.

    Args:
        name: of the case.
        function: takes and returns trees of arrays.
        arguments: only their types are read.
        device: what to compile for; may be one that is only described.
        donate_argnums: positions of the arguments that are given up.

    Returns:
        The figures, and what came out of lowering when it came to an end.

    Raises:
        Exception: anything but a refusal of ours, or a program that XLA refuses.
    """
    with _recorded_programs() as programs, warnings.catch_warnings():
        # Harnesses use deprecated dtypes and casts on purpose, Pallas its older form.
        warnings.simplefilter("ignore")
        try:
            # Where a GPU is, it is the default: JAX keeps a trace for the default that it had.
            with jax.default_device(device):
                request = pipeline.make_capture_request(function, arguments, donate_argnums)
        except (CaptureError, UnsupportedError) as error:
            return Figures(name, Outcome.NOT_CAPTURED, _first_line(error)), None
        try:
            lowered = pipeline.lower_for_gpu(request, device)
        except UnsupportedError as error:
            kinds = _count_kinds(programs)
            return Figures(name, Outcome.REFUSED, _first_line(error), kinds), None
        except (ValueError, RuntimeError, NotImplementedError) as error:
            if programs:
                raise
            return Figures(name, Outcome.NOT_COMPILED, _first_line(error)), None
    definition = lowered.definition
    counts = definition.node_count, definition.edge_count
    return Figures(name, Outcome.BUILT, "", _count_kinds(programs), *counts), lowered


def draw_cases(shard: int | None = None) -> tuple[harnesses.Case, ...]:
    """Returns the fixed sample of JAX's harnesses, or every eighth of it."""
    cases = harnesses.sample_cases(harnesses.load_cases("gpu"), SAMPLE_CASES, seed=0)
    return cases if shard is None else cases[shard::SHARDS]


def format_table(figures: Sequence[Figures]) -> str:
    """Returns counts by outcome, programs and thunks by kind, and every refusal once."""
    outcomes = collections.Counter(f.outcome for f in figures)
    compiled = [f for f in figures if f.outcome in (Outcome.BUILT, Outcome.REFUSED)]
    kinds = sorted({kind for f in compiled for kind in f.kinds})
    rows = [
        (
            kind,
            sum(kind in f.kinds for f in compiled),
            sum(f.kinds.get(kind, 0) for f in compiled),
            sum(kind in f.kinds and f.outcome is Outcome.BUILT for f in compiled),
        )
        for kind in kinds
    ]
    width = max([len("thunk kind"), *(len(kind) for kind in kinds)])
    lines = [f"{'cases':<{width}}{len(figures):>10}"]
    lines += [f"{outcome.value:<{width}}{outcomes[outcome]:>10}" for outcome in Outcome]
    lines += ["", f"{'thunk kind':<{width}}{'programs':>10}{'thunks':>10}{'built':>10}"]
    lines += [f"{kind:<{width}}{a:>10}{b:>10}{c:>10}" for kind, a, b, c in rows]
    built = [f for f in figures if f.outcome is Outcome.BUILT]
    nodes, edges = sum(f.nodes for f in built), sum(f.edges for f in built)
    lines += ["", f"graphs: {len(built)} with {nodes} nodes and {edges} edges", ""]
    others = [f for f in figures if f.outcome is not Outcome.BUILT]
    reasons = collections.Counter((f.outcome.value, _shorten(f)) for f in others)
    lines += [
        f"{count:>4} {outcome}: {reason}"
        for (outcome, reason), count in sorted(
            reasons.items(), key=lambda item: (item[0][0], -item[1], item[0][1])
        )
    ]
    return "\n".join(lines)


def is_expected(figures: Figures) -> bool:
    """True for a case that was built; or that XLA itself does not compile."""
    return figures.outcome in (Outcome.BUILT, Outcome.NOT_COMPILED)


def _shorten(figures: Figures) -> str:
    """Returns a reason without what distinguishes cases of one kind."""
    text = figures.reason.partition("`region0` has work that cannot be lowered: ")
    return text[2] or f"{figures.name}: {figures.reason}"


@contextlib.contextmanager
def _recorded_programs() -> Iterator[list[bytes]]:
    """Gives the bytes of every program that lowering reads, the refused ones included."""
    found: list[bytes] = []
    read_program = read_region.read_program

    def read(serialized: bytes, *, name: str, **device: Any) -> Any:
        found.append(serialized)
        return read_program(serialized, name=name, **device)

    with mock.patch.object(read_region, "read_program", read):
        yield found


def _count_kinds(programs: Sequence[bytes]) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for serialized in programs:
        executable: Any = read_executable(serialized, load_schema())
        counts.update(list_kinds(executable.thunks))
    return dict(counts)


def list_kinds(value: Any) -> Iterator[str]:
    """Yields the kind of every thunk in a message or in several; a custom call's has its target."""
    if isinstance(value, str | bytes | int | float):
        return
    if not hasattr(value, "ListFields"):
        for inner in value:
            yield from list_kinds(inner)
        return
    if value.DESCRIPTOR.full_name == "xla.gpu.ThunkProto":
        kind = read_kind(value)
        is_call = kind == CUSTOM_CALL
        yield f"{kind} {value.custom_call_thunk.target_name}" if is_call else kind
    for _, inner in value.ListFields():
        yield from list_kinds(inner)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
