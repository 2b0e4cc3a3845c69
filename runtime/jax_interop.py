"""The runtime's one door to private JAX names.

JAX has no public way to (a) register another array type, (b) wrap memory that we wrote as an array
with a given abstract value, (c) build a typed key around key data without computing, (d) find the
handlers of `jax.ffi` that are registered for a GPU, see Note [Registered handlers], (e) tell if JAX
has opened its backends, (f) make a compiled function of what XLA serialised without a pickle, which
runs any code. The tables below say for each private name why it is needed. They are the same from
JAX 0.10 to 0.12. A JAX without one of them is refused when tracegraph is imported, by name.

This file is past 400 lines because it is the one door.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.extend
import numpy as np
from jax.experimental.layout import Format, Layout

from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.saved_executable import ArrayAval, SavedExecutable

SUPPORTED_JAX = "jax>=0.10,<0.13"
# JAX's kinds of memory that are the host's.
HOST_KINDS = ("pinned_host", "unpinned_host")

PRIVATE_NAMES = {
    "jax._src.compilation_cache.extract_executable_and_time": "see Note [Code of JAX's cache]",
    "jax._src.array.ArrayImpl": "the type of plain arrays; `jax.Array` also covers tracers",
    "jax._src.core.ShapedArray": "abstract values; the public alias does not take a weak type",
    "jax._src.core.eval_trace": "what computes an op at once, see `computing`",
    "jax._src.core.set_current_trace": "the same",
    "jax._src.core.pytype_aval_mappings": "tracing asks it for an argument's abstract value",
    "jax._src.dtypes.register_canonicalize_value_handler": "turns operands into plain arrays",
    "jax._src.interpreters.pxla.shard_arg_handlers": "puts the arguments of `jax.jit` on devices",
    "jax._src.interpreters.mlir.register_constant_handler": "lowers arrays that are closed over",
    "jax._src.interpreters.mlir.register_lowering": "a mark in a trace lowers to nothing",
    "jax._src.effects.Effect": "a mark without an effect is dropped with what is unused",
    "jax._src.effects.lowerable_effects": "the effect of marks may be in a program of `jax.jit`",
    "jax._src.effects.control_flow_allowed_effects": "and in the body of a loop, to be refused",
    "jax._src.effects.custom_derivatives_allowed_effects": "and in a function with a derivative",
    "jax._src.effects.remat_allowed_effects": "and in a function under `jax.checkpoint`",
    "jax._src.interpreters.mlir.get_constant_handler": "how a plain array is lowered there",
    "jaxlib.xla_client.batched_device_put": "host memory to array in 3 us, not 30",
    "jax._src.random.prng.PRNGKeyArray": "typed keys; `wrap_key_data` would read its operand",
    "jax._src.random.prng.KeyTy": "the dtype of typed keys",
    "jax._src.config.config_states": "a thread's settings; no public call copies them",
    "jax._src.config.config_ext": "what a setting holds that a thread has not set",
    "jax._src.xla_bridge.backends_are_initialized": "any public call would open the backends",
    "jax._src.interpreters.pxla.UnloadedMeshExecutable": "what a compiled function is made of",
    "jaxlib.xla_client.DeviceList": "the devices that XLA's code is loaded for",
    "jaxlib.xla_client.CompileOptions": "where it runs, if not where it was compiled for, and "
    "XLA's flags as it has read them",
    "jaxlib.xla_client.DeviceAssignment": "the same",
    "jaxlib.lapack._lapack": "finds LAPACK for code that was compiled in another process",
    "jaxlib.xla_client.custom_call_targets": "the handlers of the CPU, which has no plugin",
    "jaxlib.xla_client.xla_platform_names": "how a platform is called where handlers are kept",
    "jaxlib.xla_client._custom_callback": "handlers that wait for their plugin",
    "jaxlib.xla_client._custom_callback_handler": "where handlers are passed on to a plugin",
    "jaxlib.xla_client._custom_type_id": "types of their states that wait",
    "jaxlib.xla_client._custom_type_id_handler": "where these types are passed on",
}


def load_private(path: str, reason: str, *, door: str = "runtime/jax_interop.py") -> Any:
    """Returns a private JAX name.

    Args:
        path: module and attribute, as ``jax._src.core.ShapedArray``.
        reason: what it is needed for.
        door: the file that needs it.

    Raises:
        UnsupportedError: this JAX has no such name.
    """
    module_name, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"JAX {jax.__version__} has no `{path}`",
            where=f"{door}, at `import tracegraph`",
            why=f"JAX has no public name for it: {reason}",
            fix=f'install a supported version: pip install "{SUPPORTED_JAX}"',
            anchor="unsupported-jax",
        ) from error


_private: dict[str, Any] = {
    path.rpartition(".")[2]: load_private(path, reason) for path, reason in PRIVATE_NAMES.items()
}
ArrayImpl: Any = _private["ArrayImpl"]
PRNGKeyArray: Any = _private["PRNGKeyArray"]
KeyTy: Any = _private["KeyTy"]
_ShapedArray: Any = _private["ShapedArray"]
_batched_device_put: Any = _private["batched_device_put"]
_config_states: Any = _private["config_states"]
_UNSET: Any = _private["config_ext"].unset

# Handlers of `jax.ffi`, and the types of their states; see Note [Registered handlers].
find_cpu_targets: Callable[[str], dict[str, Any]] = _private["custom_call_targets"]
platform_names: dict[str, str] = _private["xla_platform_names"]
waiting_targets: dict[str, list[Any]] = _private["_custom_callback"]
waiting_types: dict[str, list[Any]] = _private["_custom_type_id"]

# True once JAX has opened its backends, and with them CUDA, in this process.
has_backends: Callable[[], bool] = _private["backends_are_initialized"]


# What `jax.set_mesh` sets where there is none.
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Has JAX compute at once what this thread calls in a block, whatever is traced around it.

    JAX asks for the value of an array of ours wherever it meets one: also between the ops of a
    trace, which would record our own calls. A mesh of the user's does not count in the block: our
    calls are each on one device.
    """
    with _private["set_current_trace"](_private["eval_trace"]):
        if jax.sharding.get_mesh().empty:
            yield
            return
        with jax.set_mesh(_NO_MESH):
            yield


T = TypeVar("T")

_readers: dict[type, Callable[[Any], jax.Array]] = {}


def register_array_type(
    array_type: type, read: Callable[[Any], jax.Array], offer: Callable[[Any], Any]
) -> None:
    """Registers an array type with JAX, which gets the values by reading them.

    Args:
        array_type: a subclass of ``jax.Array`` with an attribute ``aval``.
        read: returns the plain array of an instance.
        offer: returns what JAX binds, and may hand to the user again: the same, or the instance.
    """
    _readers[array_type] = read
    _private["pytype_aval_mappings"][array_type] = _get_aval
    # Every bind passes here first, so that what JAX keeps (residuals of `jax.vjp`, constants of a
    # jaxpr) is the immutable value at that time and never the array in the pool itself.
    _private["register_canonicalize_value_handler"](array_type, offer)

    def shard_arguments(
        values: Sequence[Any], shardings: Any, layouts: Any, copy_semantics: Any
    ) -> Any:
        shard = _private["shard_arg_handlers"][ArrayImpl]
        return shard([read(value) for value in values], shardings, layouts, copy_semantics)

    def lower_constant(value: Any, aval: Any) -> Any:
        return _private["get_constant_handler"](ArrayImpl)(read(value), aval)

    # Both are reached without a bind: by the base array of a typed key, and by its constants.
    _private["shard_arg_handlers"][array_type] = shard_arguments
    _private["register_constant_handler"](array_type, lower_constant)


def to_plain(value: Any) -> Any:
    """Returns the plain immutable array of an array in a pool, and any other value unchanged.

    Args:
        value: anything; a typed key around an array in a pool becomes one around its value.

    Example:
        >>> to_plain(3.0)
        3.0
    """
    if type(value) is PRNGKeyArray:
        return PRNGKeyArray(value._impl, to_plain(value._base_array))
    read = _readers.get(type(value))
    return value if read is None else read(value)


def make_aval(shape: Sequence[int], dtype: Any, *, weak_type: bool = False) -> Any:
    """Returns JAX's abstract value of a physical array.

    Args:
        shape: static shape.
        dtype: NumPy dtype.
        weak_type: True for values that adopt the dtype of what they meet, as Python scalars.

    Example:
        >>> print(make_aval((2, 3), np.dtype("float32")).str_short())
        float32[2,3]
    """
    return _ShapedArray(tuple(shape), np.dtype(dtype), weak_type=weak_type)


def find_sharding(device: Any) -> Any:
    """Returns the sharding that JAX gives to arrays on one device; a sharding as it is."""
    return device if isinstance(device, jax.sharding.Sharding) else _find_sharding(device)


@functools.cache
def _find_sharding(device: Any) -> Any:
    return jax.device_put(np.zeros((), np.uint8), device).sharding


def is_read_guarded() -> bool:
    """True where JAX is to log or refuse reads by the host: `jax.transfer_guard_device_to_host`."""
    # JAX declares its options at run time.
    guard = getattr(jax.config, "jax_transfer_guard_device_to_host")  # noqa: B009
    return guard not in (None, "allow")


def is_host_place(place: Any) -> bool:
    """True for one device whose memory is the host's, not for a sharding over several."""
    return not isinstance(place, jax.sharding.Sharding) and place.platform == "cpu"


@functools.cache
def is_default_device(device: Any) -> bool:
    """True for the device where uncommitted arrays live.

    A result of `jax.jit` on uncommitted arguments is uncommitted, and so are ours; on any other
    device they must be committed, or JAX would move the work away from them.
    """
    return device == jax.local_devices()[0]


def uncommit(array: Any) -> Any:
    """Returns a plain array over the same memory that is not committed to its device."""
    return ArrayImpl(array.aval, array.sharding, [array], committed=False)


def join_parts(aval: Any, sharding: Any, parts: Sequence[Any]) -> Any:
    """Returns one array over several devices of the plain arrays on each.

    `jax.make_array_from_single_device_arrays` does so, too, but knows neither weak types nor types
    with a sharding in them.

    Args:
        aval: the array's abstract value.
        sharding: where it is.
        parts: one per device, in any order.
    """
    return ArrayImpl(aval, sharding, [*parts], committed=True)


def list_parts(array: Any) -> list[Any]:
    """Returns the plain array of each device of this process that an array has a part on.

    They are in the order of its sharding. ``addressable_shards``, which is public, makes an object
    per part and looks up which piece it is.
    """
    return array._arrays


def to_immutable(copy: np.ndarray[Any, Any], aval: Any, device: Any) -> jax.Array:
    """Returns a private copy as an immutable JAX array, without copying where JAX can alias it.

    Args:
        copy: memory that is never written again, of the shape and dtype of ``aval``. JAX aliases it
            when it is aligned to 64 bytes, and copies it otherwise.
        aval: the array's abstract value, weak type included.
        device: a JAX device that reads host memory.
    """
    return _batched_device_put(
        aval,
        find_sharding(device),
        [copy],
        [device],
        not is_default_device(device),
        # The dtype is settled; without this JAX would narrow 64-bit values where x64 is off.
        enable_x64=True,
    )


_row_major_layouts: dict[Any, bool] = {}


def is_row_major(array: Any) -> bool:
    """True for a plain array in XLA's default layout, the one that compiled programs read.

    Any other was chosen through ``jax.experimental.layout``. The array's `format`, which is
    public, takes 2 us; what JAX makes it from takes a tenth of that.
    """
    layout = array._pjrt_layout
    is_default = _row_major_layouts.get(layout)
    if is_default is None:
        dims = array.format.layout
        is_default = dims is None or tuple(dims.major_to_minor) == tuple(range(array.ndim))
        _row_major_layouts[layout] = is_default
    return is_default


def is_in_memory_of(array: jax.Array, device: Any) -> bool:
    """True for a plain array in the memory of one device, False also for one in host memory."""
    return array.devices() == {device} and array.sharding.memory_kind not in HOST_KINDS


def leave_host(value: Any) -> Any:
    """Returns a plain array of host memory in the memory of its device, anything else as it is."""
    if not isinstance(value, jax.Array) or value.sharding.memory_kind not in HOST_KINDS:
        return value
    return jax.device_put(value, jax.memory.Space.Device)


def to_row_major(array: jax.Array) -> jax.Array:
    """Returns a plain array of the same value in XLA's default layout."""
    if is_row_major(array):
        return array
    default = Layout(tuple(range(array.ndim)))
    return jax.device_put(array, Format(default, array.sharding))


def alias_host_memory(view: np.ndarray[Any, Any], device: Any) -> jax.Array | None:
    """Returns a JAX array over the very bytes of a NumPy array, or None where JAX copies.

    Writing to the view changes the array, so the caller must own both.

    Args:
        view: host memory, aligned to 64 bytes.
        device: a JAX device that reads host memory.
    """
    array = to_immutable(view, make_aval(view.shape, view.dtype), device)
    is_alias = view.nbytes == 0 or array.unsafe_buffer_pointer() == view.ctypes.data
    return array if is_alias else None


def wrap_key(implementation: Any, array: Any) -> Any:
    """Returns a typed PRNG key whose key data is the given array.

    Args:
        implementation: a key dtype (``jax.random.key(0).dtype``) or what it implements.
        array: key data, ``uint32``; an array in a pool stays one, so that settling, detaching and
            consuming it do the same to the key.

    Raises:
        TypeError: the array is not key data of this implementation.

    Example:
        >>> key = jax.random.key(7)
        >>> wrap_key(key.dtype, jax.random.key_data(key)) == key
        Array(True, dtype=bool)
    """
    if isinstance(implementation, KeyTy):
        implementation = implementation._impl
    return PRNGKeyArray(implementation, array)


def unwrap_key(value: Any) -> Any:
    """Returns the key data inside a typed key, the same object that `wrap_key` got.

    Args:
        value: anything; a value that is not a typed key is returned unchanged.
    """
    return value._base_array if type(value) is PRNGKeyArray else value


class StreamOrder(_private["Effect"]):
    """The effect of a mark: it orders streams."""

    def __str__(self) -> str:
        return "StreamOrder"


_order = StreamOrder()
for _name in ("lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
    _private[f"{_name}_effects"].add_type(StreamOrder)


def make_mark(name: str) -> Callable[[int, Any], None]:
    """Returns a function that leaves a mark, an op without operands and results, in a trace.

    Args:
        name: the primitive's name; its parameters are ``stream`` and ``event``,
            both hashable.

    A named scope labels ops but has no place between two of them; only an op has. JAX drops an op
    without results when it differentiates a function under `jax.jit`, unless it has an effect.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda **_: [])
    primitive.def_effectful_abstract_eval(lambda **_: ([], {_order}))
    _private["register_lowering"](primitive, lambda *_, **__: [])

    def leave_mark(stream: int, event: Any) -> None:
        primitive.bind(stream=stream, event=event)

    return leave_mark


def _get_aval(value: Any) -> Any:
    return value.aval


def get_quick_call(compiled: Any) -> Callable[..., Any]:
    """Returns a compiled function's C++ call, without the Python frame of ``Compiled.__call__``.

    Args:
        compiled: a ``jax.stages.Compiled``; anything else is returned unchanged.
    """
    if not isinstance(compiled, jax.stages.Compiled):
        return compiled
    return compiled._executable.create_cpp_call(compiled._params) or compiled


# Note [Code of JAX's cache]. XLA:CPU writes the code of a program that it has compiled, not that
# of one that it has read. So what was read is kept beside the compiled function: by
# `load_executable`, and where JAX reads its own persistent cache, which asks this function.
_saved: weakref.WeakKeyDictionary[Any, SavedExecutable] = weakref.WeakKeyDictionary()
_cached_code: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


class _Reading(threading.local):
    """What a thread reads from JAX's persistent cache, while it is wanted."""

    is_wanted = False
    code: bytes | None = None


_reading = _Reading()


def _read_entry(entry: bytes) -> tuple[bytes, int]:
    code, seconds = _private["extract_executable_and_time"](entry)
    if _reading.is_wanted:
        _reading.code = code
    return code, seconds


_cache_module = importlib.import_module("jax._src.compilation_cache")
vars(_cache_module)["extract_executable_and_time"] = _read_entry


def keep_code(compile_program: Callable[[], T]) -> Callable[[], T]:
    """Returns what compiles the same such that `save_executable` takes it, wherever it comes from.

    Args:
        compile_program: returns a `jax.stages.Compiled`.
    """

    def run() -> T:
        _reading.is_wanted, _reading.code = True, None
        try:
            compiled = compile_program()
            if _reading.code is not None:
                _cached_code[compiled] = _reading.code
        finally:
            _reading.is_wanted, _reading.code = False, None
        return compiled

    return run


def save_executable(compiled: jax.stages.Compiled) -> SavedExecutable:
    """Returns what a function that was compiled for one CPU is made of.

    Args:
        compiled: of positional arguments, with one result or a tuple.

    Raises:
        ValueError: it cannot be kept; the text is a clause, as ``it calls back into Python``.
    """
    if compiled in _saved:
        return _saved[compiled]
    executable: Any = compiled._executable
    parts = executable._unloaded_executable
    effects = (parts.ordered_effects, parts.unordered_effects, parts.keepalive)
    if any(effects) or parts.host_callbacks:
        raise ValueError("it calls back into Python, by an address of this process")
    code = parts.xla_executable
    layouts = [*code.get_parameter_layouts(), *code.get_output_layouts()]
    avals = [*parts.input_avals, *parts.output_avals]
    orders = [Layout.from_pjrt_layout(each).major_to_minor for each in layouts]
    in_rows = all(o == tuple(range(aval.ndim)) for o, aval in zip(orders, avals, strict=True))
    if parts.mut or compiled._params.const_args or not in_rows:
        raise ValueError("it has arrays of its own, or some that are not in rows")
    try:
        written = _cached_code.get(compiled) or _serialize(code)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"XLA cannot write its code ({error})") from None
    return SavedExecutable(
        parts.name,
        written,
        tuple(map(_describe_aval, parts.input_avals)),
        tuple(map(_describe_aval, parts.output_avals)),
        tuple(sorted(parts.kept_var_idx)),
        compiled.in_tree.num_leaves,
        compiled.out_tree == jax.tree.structure(0),
        parts.committed,
    )


def _serialize(code: Any) -> bytes:
    # What is compiled for a device that is not here has no client.
    client = getattr(code, "client", None)
    return code.serialize() if client is None else client.serialize_executable(code)


def describe_xla_flags() -> str:
    """Returns a digest of XLA's flags as this process has read them.

    XLA reads ``XLA_FLAGS`` once, when JAX opens its first device. What is written there later has
    no effect.
    """
    options = _private["CompileOptions"]()
    return hashlib.sha256(options.SerializeAsString()).hexdigest()


def load_executable(saved: SavedExecutable, device: Any) -> jax.stages.Compiled:
    """Returns the compiled function that `save_executable` took apart.

    Args:
        saved: its parts.
        device: of this process, of the kind that it was compiled for.

    Raises:
        jax.errors.JaxRuntimeError: XLA does not take the code.
        ValueError: the code has other parameters or results than the record says.
    """
    if b"lapack_" in saved.code:
        # JAX does so when it lowers a call of it; without, the call is one of address 0.
        _private["_lapack"].initialize()
    devices = _private["DeviceList"]((device,))
    options = _private["CompileOptions"]()
    options.device_assignment = _private["DeviceAssignment"].create(np.array([[device.id]]))
    code = device.client.deserialize_executable(
        saved.code, executable_devices=devices, compile_options=options
    )
    found = [Layout.from_pjrt_layout(each) for each in code.get_parameter_layouts()]
    results = [Layout.from_pjrt_layout(each) for each in code.get_output_layouts()]
    ranks = [len(each.major_to_minor) for each in (*found, *results)]
    if ranks != [len(each.shape) for each in (*saved.inputs, *saved.outputs)]:
        raise ValueError(f"the code of {saved.name} has other arrays than its record says")
    inputs, outputs = list(map(_make_aval, saved.inputs)), list(map(_make_aval, saved.outputs))
    sharding = find_sharding(device)
    parts = _private["UnloadedMeshExecutable"](
        xla_executable=code,
        device_list=devices,
        backend=device.client,
        input_avals=inputs,
        input_shardings=[sharding] * len(inputs),
        output_avals=outputs,
        output_shardings=[sharding] * len(outputs),
        committed=saved.is_committed,
        name=saved.name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(saved.kept),
        mut=None,
        xla_in_layouts=found,
        dispatch_in_layouts=[None] * len(inputs),
        xla_out_layouts=results,
        all_args_info=None,
        pgle_profiler=None,
    )
    args_info = ((0,) * saved.arguments, {})
    out_tree = jax.tree.structure(0 if saved.is_bare else (0,) * len(outputs))
    compiled = jax.stages.Compiled(parts.load(), [], args_info, out_tree, no_kwargs=True)
    _saved[compiled] = saved
    return compiled


def _make_aval(aval: ArrayAval) -> Any:
    return make_aval(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _describe_aval(aval: Any) -> ArrayAval:
    return ArrayAval(tuple(aval.shape), np.dtype(aval.dtype), bool(aval.weak_type))


def carry_settings(function: Callable[[], T]) -> Callable[[], T]:
    """Returns the function under JAX's settings of this thread as they are now, for any thread.

    Settings made by a with-block hold in the thread that made them, and only there.

    Example:
        >>> with jax.enable_x64(True):
        ...     read = carry_settings(lambda: jax.config.read("jax_enable_x64"))
        >>> read()
        True
    """
    settings = [(state, state.get_local()) for state in _config_states.values()]
    changed = [(state, value) for state, value in settings if value is not _UNSET]

    def run() -> T:
        previous = [(state, state.get_local()) for state, _ in changed]
        try:
            for state, value in changed:
                _set_in_thread(state, value)
            return function()
        finally:
            for state, value in previous:
                _set_in_thread(state, value)

    return run


def _set_in_thread(state: Any, value: Any) -> None:
    state.set_local(value)
    if state._update_thread_local_hook is not None:
        state._update_thread_local_hook(None if value is _UNSET else value)


def exchange_registrars(exchange: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Exchanges the dictionaries through which registrations for a platform go.

    Args:
        exchange: from what passes through (``target`` or ``type``) and jaxlib's dictionary to the
            one that is put in its place.
    """
    xla_client = importlib.import_module("jaxlib.xla_client")
    for kind, name in (("target", "_custom_callback_handler"), ("type", "_custom_type_id_handler")):
        setattr(xla_client, name, exchange(kind, _private[name]))
