"""The options of `capture`, checked when the function is decorated."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from tracegraph.constraints.frames import locate_function
from tracegraph.runtime.errors import CaptureError, ConfigError, count_noun
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream import Stream, default_stream
from tracegraph.user_memory.mem_pool import MemPool

MODES = ("whole", "partial")
OUTPUTS = ("fresh", "static")
# Of recorded blocks; no option of `capture`.
LIVE_OUTPUTS = "live"
STATIC_LEAVES = ("auto", "refuse")
CONTROL_FLOW = ("allow", "refuse")
PREFERENCES = ("auto", "graph")
NUMERICS = ("xla", "equivalent")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for.

    More than six fields because it mirrors the keywords of `capture` one to one.
    """

    static_argnums: frozenset[int]
    static_argnames: frozenset[str]
    donate_argnums: frozenset[int]
    donate_argnames: frozenset[str]
    mode: str
    outputs: str
    pool: PoolId | None
    stream: Stream
    verify: bool
    name: str
    static_leaves: str
    control_flow: str
    prefer: str
    numerics: str
    debug_nans: bool
    warm: bool

    @property
    def takes_static_leaves(self) -> bool:
        """True when leaves that are no arrays are static by themselves."""
        return self.static_leaves == "auto"

    @property
    def is_cut(self) -> bool:
        """True when what no graph holds may run between two graphs."""
        return self.mode == "partial"

    @property
    def takes_control_flow(self) -> bool:
        """True when loops and branches of lax may take paths that depend on data."""
        return self.control_flow == "allow"


def read_options(function: Callable[..., Any], given: dict[str, Any]) -> Options:
    """Checks the keywords of `capture` against each other and against the function.

    Args:
        function: what is captured.
        given: the keywords, with defaults filled in; unknown ones are refused here.

    Raises:
        ConfigError: a keyword is unknown or has a value that is not allowed.
        CaptureError: the capturing stream is the default stream.
    """
    where = locate_function(function)
    known = {field.name for field in dataclasses.fields(Options)}
    for keyword in given:
        if keyword not in known:
            raise_option_error(
                f"capture has no option `{keyword}`", where, f"the options are {_join(known)}"
            )
    if given["mode"] not in MODES:
        raise_option_error(
            f"mode={given['mode']!r} is unknown", where, f"the modes are {_join(MODES)}"
        )
    if given["outputs"] not in OUTPUTS:
        raise_option_error(
            f"outputs={given['outputs']!r} is unknown", where, f"they are {_join(OUTPUTS)}"
        )
    for keyword, words in (
        ("static_leaves", STATIC_LEAVES),
        ("control_flow", CONTROL_FLOW),
        ("prefer", PREFERENCES),
        ("numerics", NUMERICS),
    ):
        if given[keyword] not in words:
            raise_option_error(
                f"{keyword}={given[keyword]!r} is unknown", where, f"they are {_join(words)}"
            )
    for keyword in ("verify", "debug_nans", "warm"):
        check_flag(keyword, given[keyword], where)
    _check_warm(given, where)
    pool = read_pool(given["pool"], where)
    if given["name"] is not None and not isinstance(given["name"], str):
        raise_option_error(
            f"name={given['name']!r} is not a text", where, "the name appears in messages"
        )
    stream = _read_stream(given["stream"], where)
    parameters = _read_parameters(function)
    statics = _resolve(parameters, given, "static", where)
    donated = _resolve(parameters, given, "donate", where)
    if statics[0] & donated[0] or statics[1] & donated[1]:
        raise_option_error(
            "an argument is static and donated", where, "a static argument has no buffer"
        )
    return Options(
        *statics,
        *donated,
        mode=given["mode"],
        outputs=given["outputs"],
        pool=pool,
        stream=stream,
        verify=given["verify"],
        name=given["name"] or getattr(function, "__name__", type(function).__name__),
        static_leaves=given["static_leaves"],
        control_flow=given["control_flow"],
        prefer=given["prefer"],
        numerics=given["numerics"],
        debug_nans=given["debug_nans"],
        warm=given["warm"],
    )


def list_keywords(options: Options) -> dict[str, Any]:
    """Returns the keywords of `capture` that make these options again."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def make_block_options(where: str, *, pool: Any, stream: Any) -> Options:
    """Returns the options of a block that is recorded.

    Args:
        where: the line that opens it.
        pool: as of `capture`.
        stream: as of `capture`.

    Raises:
        ConfigError: one of them is not allowed.
        CaptureError: the capturing stream is the default stream.
    """
    return Options(
        static_argnums=frozenset(),
        static_argnames=frozenset(),
        donate_argnums=frozenset(),
        donate_argnames=frozenset(),
        mode="whole",
        outputs=LIVE_OUTPUTS,
        pool=read_pool(pool, where, "tg.graph"),
        stream=_read_stream(stream, where, "tg.graph"),
        verify=True,
        name="graph",
        static_leaves="refuse",
        control_flow="allow",
        prefer="graph",
        numerics="xla",
        debug_nans=False,
        warm=True,
    )


def _check_warm(given: dict[str, Any], where: str) -> None:
    """Refuses what a call that runs as `jax.jit` cannot do."""
    if given["warm"]:
        return
    for keyword, default, why in (
        ("outputs", "fresh", "static results are the graph's own buffers"),
        ("debug_nans", False, "it looks at the results of replays"),
    ):
        if given[keyword] != default:
            raise ConfigError(
                f"{keyword}={given[keyword]!r} is given with warm=False",
                where=f"{where}, tg.capture",
                why=f"{why}, and the first calls have no graph yet",
                fix=f"leave warm=False out, or {keyword}=",
                anchor="lazy-capture",
            )


def read_pool(given: Any, where: str, function: str = "tg.capture") -> PoolId | None:
    """Returns the id of the pool that a user gives for graphs; None for one of their own.

    Args:
        given: a pool, its id, or None.
        where: the user's line.
        function: that it is given to.

    Raises:
        ConfigError: it is no pool.
    """
    pool = given.id if isinstance(given, MemPool) else given
    if pool is not None and not isinstance(pool, PoolId):
        raise_option_error(
            "pool= is not a pool",
            where,
            "a pool is what `pool()` of a captured function, `tg.graph_pool_handle()` and "
            "`tg.memory.MemPool()` give",
            function,
        )
    return pool


def _read_stream(given: Any, where: str, function: str = "tg.capture") -> Stream:
    stream = given if given is not None else Stream()
    if not isinstance(stream, Stream):
        raise_option_error(
            "stream= is not a tg.Stream",
            where,
            "work is captured on a stream of tracegraph",
            function,
        )
    if stream is default_stream():
        raise CaptureError(
            "the capture is asked for on the default stream",
            where=where,
            why="JAX's own work is on the default stream and would be captured with it",
            fix="leave stream= out, or pass a stream made by tg.Stream()",
            anchor="default-stream",
        )
    return stream


def check_flag(keyword: str, value: Any, where: str, function: str = "tg.capture") -> None:
    """Refuses what is neither True nor False.

    Args:
        keyword: of the user's.
        value: that it has.
        where: the user's line.
        function: that it is given to.

    Raises:
        ConfigError: it is no bool.
    """
    if not isinstance(value, bool):
        raise_option_error(
            f"{keyword}={value!r} is unknown", where, "it is True or False", function
        )


def check_timeout(value: Any, where: str, function: str) -> None:
    """Refuses what is neither None nor a number of seconds that a lock can wait.

    Args:
        value: of the keyword `timeout`.
        where: the user's line.
        function: that it is given to.

    Raises:
        ConfigError: it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value <= threading.TIMEOUT_MAX):
        why = f"it is None, or seconds up to {threading.TIMEOUT_MAX:.0f}"
        raise_option_error(f"timeout={value!r} is unknown", where, why, function)


def raise_option_error(what: str, where: str, why: str, function: str = "tg.capture") -> NoReturn:
    """Raises the error of an option that has a value which is not allowed.

    Args:
        what: names the option and its value.
        where: the user's line.
        why: what is allowed.
        function: that it is given to.
    """
    raise ConfigError(
        what,
        where=f"{where}, {function}",
        why=why,
        fix=f"correct the keyword; help({function}) lists all",
        anchor="unknown-option",
    )


def _join(words: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(words))


def _read_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        # Some callables written in C have no signature; positions then stand for themselves.
        return None


def _resolve(
    parameters: list[inspect.Parameter] | None, given: dict[str, Any], kind: str, where: str
) -> tuple[frozenset[int], frozenset[str]]:
    """Returns positions and names; each also names what the other gives, as in `jax.jit`."""
    positions = set(_as_tuple(given[f"{kind}_argnums"], int, f"{kind}_argnums", where))
    names = set(_as_tuple(given[f"{kind}_argnames"], str, f"{kind}_argnames", where))
    if parameters is None:
        return frozenset(positions), frozenset(names)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    resolved = {p: p + len(positional) if p < 0 and not has_variadic else p for p in positions}
    for wanted, position in sorted(resolved.items()):
        if position < 0 or (position >= len(positional) and not has_variadic):
            raise_option_error(
                f"{kind}_argnums has {wanted}",
                where,
                f"the function has {count_noun(len(positional), 'positional argument')}",
            )
    positions = set(resolved.values())
    by_name = {p.name: i for i, p in enumerate(positional)}
    for name in sorted(names):
        if name not in {p.name for p in parameters} and not takes_any_name:
            raise_option_error(
                f"{kind}_argnames has '{name}'",
                where,
                f"the arguments are {', '.join(p.name for p in parameters) or 'none'}",
            )
    named_positions = {by_name[name] for name in names if name in by_name}
    names |= {
        positional[p].name
        for p in positions
        if p < len(positional) and positional[p].kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    return frozenset(positions | named_positions), frozenset(names)


def _as_tuple(value: Any, kind: type, keyword: str, where: str) -> tuple[Any, ...]:
    """Returns one or more positions or names as a tuple; None stands for none, as in `jax.jit`."""
    values = () if value is None else (value,) if isinstance(value, kind) else value
    is_iterable = isinstance(values, Iterable) and not isinstance(values, str)
    values = tuple(values) if is_iterable else (value,)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in values):
        raise_option_error(
            f"{keyword}={value!r} is not allowed", where, f"it is one or more of {kind.__name__}"
        )
    return values
