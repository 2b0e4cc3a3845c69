"""Execution plans of cuDNN: a convolution as XLA describes it to cuDNN, a graph as XLA kept it.

Note [The engine that XLA chose]
    XLA keeps of a convolution the number of an engine and the values of its knobs. They mean the
    same in the library that XLA has measured them with, for the same description: so the library is
    the one that XLA has loaded, and tensors, their numbers, their alignment and the operations are
    described as XLA does it. An engine or a knob that the library does not know is refused.

    Where XLA has measured none, the first engine is taken that cuDNN recommends and that fits into
    the workspace. As in XLA, none that rounds its input to fewer bits, and none on the tensor cores
    for float32 where the program asks for the highest precision.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tracegraph.runtime.cuda.libraries.cudnn_backend import (
    Attribute,
    CudnnBackend,
    CudnnError,
    Kind,
    Values,
)
from tracegraph.runtime.cuda.libraries.cudnn_convolutions import describe_convolution
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph, Convolution, CudnnCall

# cudnnBackendHeurMode_t: the recommended one, and what is left when it has nothing.
_HEURISTIC_MODES = (3, 2)
# cudnnBackendNumericalNote_t.
_TENSOR_CORE, _DOWN_CONVERT_INPUTS = 0, 1
_NOTE_COUNT = 32


@dataclasses.dataclass(frozen=True)
class PlanParts:
    """The descriptors of a plan, which live as long as it.

    Attributes:
        plan: the plan's own.
        others: what it was made of, the first made first.
        workspace_bytes: what it needs.
    """

    plan: int
    others: tuple[int, ...]
    workspace_bytes: int


class PlanMaker:
    """Makes one plan; destroys what it has made when that fails.

    Args:
        backend: the library.
        handle: of the context that the plan is for.
    """

    def __init__(self, backend: CudnnBackend, handle: int) -> None:
        self._backend, self._handle = backend, handle
        self._made: list[int] = []

    def make_plan(self, call: CudnnCall) -> PlanParts:
        """Returns the plan of a call.

        Raises:
            CudnnError: the library does not know the engine, a knob or the form of a graph, or
                needs more workspace than there is.
        """
        self._backend.forget_messages()
        with contextlib.ExitStack() as undo:
            undo.callback(self._destroy_made)
            if isinstance(call, CompiledGraph):
                plan = self._read_graph(call)
                permitted_bytes = call.workspace_bytes - call.own_bytes
            else:
                graph = describe_convolution(self._make, call, self._handle)
                plan = self._choose(call, graph)
                permitted_bytes = call.workspace_bytes
            needed_bytes = self._read_workspace(plan)
            if needed_bytes > permitted_bytes:
                raise CudnnError(
                    f"the plan needs {needed_bytes} bytes of workspace, not {permitted_bytes}"
                )
            undo.pop_all()
        return PlanParts(plan, tuple(each for each in self._made if each != plan), needed_bytes)

    def _make(self, kind: Kind, values: dict[Attribute, Values]) -> int:
        descriptor = self._backend.make(kind, values)
        self._made.append(descriptor)
        return descriptor

    def _destroy_made(self) -> None:
        for descriptor in reversed(self._made):
            self._backend.destroy(descriptor)

    def _read_workspace(self, plan: int) -> int:
        (nbytes,) = self._backend.read_numbers(plan, Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)
        return nbytes

    def _read_graph(self, graph: CompiledGraph) -> int:
        return self._make(
            Kind.EXECUTION_PLAN,
            {
                Attribute.EXECUTION_PLAN_HANDLE: self._handle,
                Attribute.EXECUTION_PLAN_JSON_REPRESENTATION: graph.plan,
            },
        )

    def _choose(self, call: Convolution, graph: int) -> int:
        """Returns the plan of the engine that XLA chose, or of the first that is recommended."""
        algorithm = call.algorithm
        if algorithm.engine is None:
            return self._recommend(call, graph)
        engine = self._make(
            Kind.ENGINE,
            {
                Attribute.ENGINE_OPERATION_GRAPH: graph,
                Attribute.ENGINE_GLOBAL_INDEX: algorithm.engine,
            },
        )
        knobs = [
            self._make(
                Kind.KNOB_CHOICE,
                {
                    Attribute.KNOB_CHOICE_KNOB_TYPE: knob,
                    Attribute.KNOB_CHOICE_KNOB_VALUE: value,
                },
            )
            for knob, value in algorithm.knobs
        ]
        config = self._make(
            Kind.ENGINECFG,
            {
                Attribute.ENGINECFG_ENGINE: engine,
                Attribute.ENGINECFG_KNOB_CHOICES: knobs or None,
            },
        )
        return self._make_plan(config)

    def _make_plan(self, config: int) -> int:
        return self._make(
            Kind.EXECUTION_PLAN,
            {
                Attribute.EXECUTION_PLAN_HANDLE: self._handle,
                Attribute.EXECUTION_PLAN_ENGINE_CONFIG: config,
            },
        )

    def _recommend(self, call: Convolution, graph: int) -> int:
        """Returns the first recommended plan that fits; see Note [The engine that XLA chose]."""
        refusals = []
        for config in self._list_recommended(graph):
            notes = self._read_notes(config)
            is_rounded = _TENSOR_CORE in notes and call.x.dtype == "float32"
            if _DOWN_CONVERT_INPUTS in notes or (is_rounded and not call.algorithm.allows_tf32):
                continue
            try:
                plan = self._make_plan(config)
            except CudnnError as error:
                refusals.append(str(error))
                continue
            needed_bytes = self._read_workspace(plan)
            if needed_bytes <= call.workspace_bytes:
                return plan
            refusals.append(f"{needed_bytes} bytes of workspace")
        reasons = "; ".join(dict.fromkeys(refusals)) or "cuDNN recommends none"
        raise CudnnError(
            f"no engine fits into {call.workspace_bytes} bytes of workspace: {reasons}"
        )

    def _list_recommended(self, graph: int) -> Iterator[int]:
        for mode in _HEURISTIC_MODES:
            heuristic = self._make(
                Kind.ENGINEHEUR,
                {
                    Attribute.ENGINEHEUR_OPERATION_GRAPH: graph,
                    Attribute.ENGINEHEUR_MODE: mode,
                },
            )
            count = self._backend.count_values(heuristic, Attribute.ENGINEHEUR_RESULTS)
            configs = self._make_empty(Kind.ENGINECFG, count)
            yield from self._backend.read_descriptors(
                heuristic, Attribute.ENGINEHEUR_RESULTS, configs
            )

    def _read_notes(self, config: int) -> list[int]:
        (engine,) = self._backend.read_descriptors(
            config, Attribute.ENGINECFG_ENGINE, self._make_empty(Kind.ENGINE, 1)
        )
        return self._backend.read_numbers(engine, Attribute.ENGINE_NUMERICAL_NOTE, _NOTE_COUNT)

    def _make_empty(self, kind: Kind, count: int) -> list[int]:
        """Returns descriptors for cuDNN to write into."""
        made = []
        for _ in range(count):
            with self._backend.open_descriptor(kind) as descriptor:
                made.append(descriptor)
                self._made.append(descriptor)
        return made
