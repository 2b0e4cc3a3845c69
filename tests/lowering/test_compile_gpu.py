"""Compile for a GPU: regions, donation, options and the programs that XLA writes for an H200."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import topology
from tests.fakes.compilers import NotedPhases, make_compiler
from tests.fakes.gpu_programs import allocation, kernel
from tests.optimized import optimized as optimized
from tracegraph.lowering import compile_gpu, plan_program, read_region
from tracegraph.lowering.compile_gpu import compile_for_gpu
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.device_program import Copy, DeviceStep, ExecutableCall
from tracegraph.lowering.lower import lower_request
from tracegraph.lowering.request import (
    BufferSpec,
    CaptureRequest,
    InputSpec,
    OutputSpec,
    Place,
    Region,
    Role,
)
from tracegraph.lowering.xla.program import AllocationKind, XlaProgram
from tracegraph.lowering.xla.refusal import make_refused_error
from tracegraph.lowering.xla.thunks import _REFUSED
from tracegraph.runtime.errors import CaptureError, RefusedWork, UnsupportedError

jax.config.update("jax_platforms", "cpu")
FLOAT = np.dtype(np.float32)


def spec(name: str, *shape: int) -> BufferSpec:
    return BufferSpec(name, shape or (4,), FLOAT)


def region(name: str, function: Any, reads: str, writes: str, place: Place | None = None) -> Region:
    inputs, outputs = (tuple(map(spec, names.split())) for names in (reads, writes))
    return Region(name, function, inputs, outputs, place if place is not None else Place())


def request(*regions: Region, outputs: Any = (("n", "s"),)) -> CaptureRequest:
    """Returns a request with the inputs ``x`` (copied) and ``s`` (donated)."""
    roles = (("x", Role.COPIED), ("s", Role.DONATED))
    return CaptureRequest(
        "f",
        regions,
        tuple(InputSpec(spec(name), role) for name, role in roles),
        tuple(OutputSpec(spec(name), alias) for name, alias in outputs),
    )


class FakeReader:
    """Stands for XLA's program of a GPU: one kernel that reads all and updates what is donated."""

    def __init__(self) -> None:
        self.in_place: dict[str, int] = {}
        self.refusals: list[str] = []

    def __call__(
        self,
        serialized: bytes,
        *,
        name: str,
        check_call: Any,
        plan_call: Any,
        reads_loops: bool,
        partitions: int,
        has_choices: bool,
    ) -> XlaProgram:
        assert (reads_loops, partitions, has_choices) == (False, 1, True)
        assert callable(check_call)
        assert callable(plan_call)
        assert isinstance(serialized, bytes)
        if self.refusals:
            texts = self.refusals.pop(0).split("; ")
            refused = [RefusedWork(name, "planted", text) for text in texts]
            raise make_refused_error(texts[-1], where="here", why="planted", refused=refused)
        counts = {"update": (2, 1), "make": (1, 1), "two": (2, 2)}
        input_count, output_count = counts[name.rstrip("0123456789")]
        in_place = self.in_place.get(name, 0)
        inputs = [f"#{i}" for i in range(input_count)]
        outputs = inputs[:in_place] + [f"#o{i}" for i in range(in_place, output_count)]
        kinds = [
            allocation(n, AllocationKind.PARAMETER, 16, parameter=i) for i, n in enumerate(inputs)
        ]
        kinds += [allocation(n, AllocationKind.OUTPUT, 16) for n in outputs if n not in inputs]
        step = kernel(name, *(" ".join(f"{n}[0:16]" for n in names) for names in (inputs, outputs)))
        return XlaProgram(name, tuple(kinds), (step,), tuple(outputs))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> FakeReader:
    fake = FakeReader()
    monkeypatch.setattr(read_region, "read_program", fake)
    # Here a CPU compiles, which does not know XLA's options of every first compilation.
    legal = frozenset(option for _, (option, _) in compile_gpu.PLAIN_KERNELS)
    monkeypatch.setattr(compile_gpu, "legal_compile_options", lambda: legal)
    return fake


def compile_it(wanted: CaptureRequest) -> compile_gpu.CompiledForGpu:
    return compile_for_gpu(wanted, make_compiler())


def show(compiled: compile_gpu.CompiledForGpu) -> list[str]:
    return [
        f"{step.name}({' '.join(use.buffer for use in step.reads)})"
        f" -> {' '.join(use.buffer for use in step.writes)}"
        for step in compiled.program.steps
    ]


def update(x: Any, s: Any) -> tuple[Any]:
    return (x + s,)


def make(x: Any) -> tuple[Any]:
    return (x * 2,)


def test_state_is_updated_in_place_and_regions_are_kept_as_references(reader: FakeReader):
    reader.in_place = {"update": 1}
    phases = NotedPhases()
    wanted = request(
        region("make", make, "x", "t", Place(3)),
        region("update", update, "t s", "n", Place(0, ("make",))),
    )
    compiled = compile_for_gpu(wanted, make_compiler(phases=phases))
    assert phases == [
        ("compile", "make of 2"),
        ("lower", "make of 2"),
        ("compile", "update of 2"),
        ("lower", "update of 2"),
    ]
    assert show(compiled) == ["make(x) -> t", "update(s t) -> s"]
    assert [step.stream for step in compiled.program.steps] == [3, 0]
    assert compiled.program.edges == ((0, 1),)
    first, second = compiled.regions
    assert (first.inputs, first.outputs, first.in_place) == (("x",), ("t",), 0)
    assert (second.inputs, second.outputs, second.in_place) == (("s", "t"), ("n",), 1)
    assert (first.options, second.options) == ((), ())
    result = second.executable(jnp.ones(4), jnp.full(4, 2.0))
    np.testing.assert_array_equal(result, np.full(4, 3, np.float32))


def test_state_that_other_regions_read_before_is_updated_in_place(reader: FakeReader):
    reader.in_place = {"update": 1}
    wanted = request(region("make", make, "s", "t"), region("update", update, "t s", "n"))
    compiled = compile_it(wanted)
    assert compiled.regions[1].in_place == 1
    assert show(compiled) == ["make(s) -> t", "update(s t) -> s"]


def test_state_that_is_read_later_gets_its_new_value_at_the_end(reader: FakeReader):
    regions = region("update", update, "x s", "n"), region("make", make, "s", "t")
    compiled = compile_it(request(*regions, outputs=(("n", "s"), ("t", None))))
    assert compiled.regions[0].in_place == 0
    assert show(compiled) == ["update(x s) -> n", "make(s) -> t", "update_s(n) -> s"]
    assert isinstance(compiled.program.steps[-1], Copy)
    assert compiled.program.edges == ((0, 2), (1, 2))


def test_a_missing_wait_is_found_before_the_steps_are_put_in_levels(reader: FakeReader):
    wanted = request(region("make", make, "x", "t"), region("update", update, "t s", "n", Place(1)))
    reader.in_place = {"update": 1}
    with pytest.raises(CaptureError, match="`update` on stream 1 reads `t` without waiting"):
        compile_it(wanted)


def make_branches(reader: FakeReader) -> CaptureRequest:
    """Returns a request of a chain and a step that is between its steps in the serial order."""
    reader.in_place = {"update": 1}
    return request(
        region("make1", make, "x", "t"),
        region("make2", make, "x", "u"),
        region("two1", update, "t u", "v w"),
        region("update", update, "v s", "n"),
        outputs=(("n", "s"), ("w", None)),
    )


def test_steps_stand_side_by_side_where_the_memory_allows(
    reader: FakeReader, monkeypatch: pytest.MonkeyPatch
):
    compiled = compile_it(make_branches(reader))
    assert compiled.program.edges == ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    # No room for bytes that rest.
    monkeypatch.setattr(plan_program, "ROOMY_LIMIT", 0)
    assert compile_it(make_branches(reader)).program.edges == ((0, 2), (1, 2), (2, 3))


def test_an_eager_region_stays_a_call(reader: FakeReader):
    eager = Place(is_captured=False)
    wanted = request(region("make", make, "x", "t", eager), region("update1", update, "t s", "n"))
    reader.in_place = {"update1": 1}
    compiled = compile_it(wanted)
    call, step = compiled.program.steps
    assert isinstance(call, ExecutableCall)
    assert isinstance(step, DeviceStep)
    assert not call.is_captured
    np.testing.assert_array_equal(compiled.regions[0].executable(jnp.ones(4)), np.full(4, 2.0))


@pytest.mark.parametrize(
    ("refusal", "options"),
    [
        ("custom_call calls xla.gpu.ext.cub_sort_pairs", {"xla_gpu_enable_cub_radix_sort": False}),
        (
            "sets stream_executor.KernelLoaderSpecProto.in_process_symbol",
            {"xla_disable_hlo_passes": "topk-specializer"},
        ),
        *(
            (f"{kind} {_REFUSED[kind]}", {name: value})
            for kind, name, value in (
                ("select_k", "xla_disable_hlo_passes", "topk-specializer"),
                ("norm", "xla_gpu_enable_cudnn_layer_norm", False),
                ("gemm", "xla_gpu_enable_cublaslt", True),
            )
        ),
        # The text of the error names few of many reasons.
        (
            "calls xla.gpu.ext.cub_sort_keys; is unknown; is too large",
            {"xla_gpu_enable_cub_radix_sort": False},
        ),
    ],
)
def test_xla_is_asked_for_plain_kernels_where_it_has_them(
    reader: FakeReader, monkeypatch: pytest.MonkeyPatch, refusal: str, options: dict[str, Any]
):
    tried: list[Any] = []

    def compile_with(
        compiler: Any, *arguments: Any, count: int, options: Any = (), keep_known: Any = tuple
    ) -> Any:
        tried.append(dict(keep_known(options)))
        return original(compiler, *arguments, count=count)

    original = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", compile_with)
    reader.refusals = [refusal]
    compiled = compile_it(request(region("update", update, "x s", "n")))
    assert tried == [{}, options]
    assert dict(compiled.regions[0].options) == options
    # Options of every compilation come first, those that this XLA does not know left out.
    copies = ("xla_gpu_copy_insertion_use_region_analysis", True)
    monkeypatch.setattr(compile_gpu, "FIRST_OPTIONS", (copies, ("xla_gpu_unheard_of", True)))
    legal = compile_gpu.legal_compile_options() | {copies[0]}
    monkeypatch.setattr(compile_gpu, "legal_compile_options", lambda: legal)
    tried.clear()
    reader.refusals = [refusal]
    compiled = compile_it(request(region("update", update, "x s", "n")))
    assert tried == [dict([copies]), {**dict([copies]), **options}]
    assert dict(compiled.regions[0].options) == tried[1]


def test_what_stays_unsupported_is_refused(reader: FakeReader):
    wanted = request(region("update", update, "x s", "n"))
    reader.refusals = ["custom_call calls cusolver_potrf_ffi"]
    with pytest.raises(UnsupportedError, match="cusolver_potrf"):
        compile_it(wanted)
    reader.refusals = ["calls xla.gpu.ext.cub_sort_keys", "convolution (1)"]
    with pytest.raises(UnsupportedError, match="convolution"):
        compile_it(wanted)


def test_options_that_this_xla_does_not_know_are_not_used(
    reader: FakeReader, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compile_gpu, "legal_compile_options", frozenset)
    reader.refusals = ["calls xla.gpu.ext.cub_sort_keys"]
    with pytest.raises(UnsupportedError, match="cub_sort_keys"):
        compile_it(request(region("update", update, "x s", "n")))


def test_a_request_is_lowered_for_its_target(reader: FakeReader):
    reader.in_place = {"update": 1}
    wanted = request(region("update", update, "x s", "n"))
    gpu = lower_request(wanted, make_compiler(takes_kernels=True))
    host = lower_request(wanted, make_compiler())
    assert [node.kind for node in gpu.definition.stages[0].nodes] == ["kernel"]
    assert [node.kind for node in host.definition.stages[0].nodes] == ["call"]
    assert [region.name for region in gpu.regions] == ["update"]
    assert [region.name for region in host.regions] == ["update"]
    assert (gpu.takes_kernels, host.takes_kernels) == (True, False)
    assert gpu.results == host.results == ("n",)
    assert gpu.plan.offsets.keys() == {"x", "s"}


# From here on for an H200 that is only described.


@pytest.fixture(scope="module")
def h200() -> Any:
    obstacle = topology.find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    return topology.find_h200()


def lower(wanted: CaptureRequest, device: Any) -> Any:
    return lower_request(wanted, make_compiler(device, takes_kernels=True))


def test_regions_without_inputs_and_undefined_results(h200: Any):
    def nothing() -> tuple[Any, ...]:
        return jnp.arange(4.0), jnp.empty(4), jnp.zeros(4), jnp.zeros(4)

    wanted = request(region("r", nothing, "", "a e z w"), outputs=tuple((n, None) for n in "aezw"))
    lowered = lower(wanted, h200)
    nodes = lowered.definition.stages[0].nodes
    assert set("aezw") <= {name for node in nodes for name in node.results}
    assert "empty_e" in {node.name for node in nodes}


def test_a_sort_keeps_the_copy_that_it_works_on(h200: Any):
    rows = Region(
        "r", lambda x: (jnp.sort(x, axis=0) * 2,), (spec("m", 64, 64),), (spec("n", 64, 64),)
    )
    wanted = CaptureRequest(
        "f", (rows,), (InputSpec(rows.inputs[0], Role.COPIED),), (OutputSpec(rows.outputs[0]),)
    )
    copied, sort, *_ = lower(wanted, h200).definition.stages[0].nodes
    assert (copied.kind, sort.kind) == ("memcpy", "kernel")
    assert set(copied.results) <= set(sort.results)


def test_top_k_takes_another_way_than_xla_s_own(h200: Any):
    values = BufferSpec("v", (4, 8), FLOAT)
    indices = BufferSpec("i", (4, 8), np.dtype(np.int32))
    top = Region(
        "r", lambda x: tuple(jax.lax.top_k(x, 8)), (spec("m", 4, 1024),), (values, indices)
    )
    wanted = CaptureRequest(
        "f",
        (top,),
        (InputSpec(top.inputs[0], Role.COPIED),),
        (OutputSpec(values), OutputSpec(indices)),
    )
    lowered = lower(wanted, h200)
    plain = {"xla_disable_hlo_passes": "topk-specializer"}
    assert dict(lowered.regions[0].options) == {**dict(compile_gpu.FIRST_OPTIONS), **plain}
    assert lowered.definition.node_count > 0


def test_a_train_step_needs_no_more_memory_than_under_xla(h200: Any):
    def step(w: Any, x: Any) -> tuple[Any, ...]:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    w, x, new = (spec(name, 128, 128) for name in ("w", "x", "new"))
    value = BufferSpec("value", (), FLOAT)
    wanted = CaptureRequest(
        "step",
        (Region("r", step, (w, x), (new, value)),),
        (InputSpec(w, Role.DONATED), InputSpec(x, Role.COPIED)),
        (OutputSpec(new, "w"), OutputSpec(value)),
    )
    lowered = lower(wanted, h200)
    assert lowered.regions[0].in_place == 1
    memory = lowered.regions[0].executable.memory_analysis()
    bound = memory.argument_size_in_bytes + memory.output_size_in_bytes
    bound += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert lowered.definition.arena_bytes <= 1.05 * bound
    kernels = [node for node in lowered.definition.stages[0].nodes if node.kind == "kernel"]
    assert lowered.definition.stages[0].programmatic
    assert all(node.begins_with_wait for node in kernels)
