"""The precision flags: their values in the process and in a thread.

Note [Flags as a setting of JAX]
All flags together are one value of one setting beside JAX's own. JAX reads its settings at every
call of a captured function anyway, so that a call notices a changed flag without work of its own;
and the settings are part of the signature, so that a capture takes the flags of its call, whatever
another thread sets while it is made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tracegraph.constraints.frames import locate_caller
from tracegraph.jax_internals import make_setting
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.streams.stream import is_tracing

ANCHOR = "precision-flag"


class PrecisionFlags(NamedTuple):
    """What is allowed; None for a flag that is not set, where JAX and XLA decide.

    Attributes:
        matmul_tf32: matmuls of float32 and complex64 may round their operands to TF32.
        matmul_fp16_reduction: matmuls of float16 may add partial sums in float16.
        matmul_bf16_reduction: matmuls of bfloat16 may add partial sums in bfloat16.
        cudnn_tf32: convolutions of float32 and complex64 may round their operands to TF32.
    """

    matmul_tf32: bool | None = None
    matmul_fp16_reduction: bool | None = None
    matmul_bf16_reduction: bool | None = None
    cudnn_tf32: bool | None = None

    def __repr__(self) -> str:
        pairs = zip(SPELLINGS.values(), self, strict=True)
        return ", ".join(f"{name}={value}" for name, value in pairs if value is not None) or "unset"


# By field, how users write it behind `tg.backends.`.
SPELLINGS = {
    "matmul_tf32": "matmul.allow_tf32",
    "matmul_fp16_reduction": "matmul.allow_fp16_reduced_precision_reduction",
    "matmul_bf16_reduction": "matmul.allow_bf16_reduced_precision_reduction",
    "cudnn_tf32": "cudnn.allow_tf32",
}
UNSET = PrecisionFlags()

_setting = make_setting("tg.backends", UNSET)
# What a thread has that has no flags of its own, as this one has now.
_NOTHING = _setting.get_local()
# Held while a flag of the process is changed: the others keep their values.
_lock = threading.Lock()


def read_flags() -> PrecisionFlags:
    """Returns the flags of this thread."""
    return _setting.value


def find_flags(settings: Iterable[Any]) -> PrecisionFlags:
    """Returns the flags among the settings of a signature."""
    return next(value for value in settings if type(value) is PrecisionFlags)


def set_flag(field: str, value: bool | None) -> None:
    """Sets a flag: inside of `hold_flags` until its end, else in the process.

    Args:
        field: of `PrecisionFlags`.
        value: None to leave the decision to JAX again.

    Raises:
        ConfigError: the value is not allowed, or this thread traces a function for capture.
    """
    changes = {field: value}
    _check(changes)
    with _lock:
        if _setting.get_local() is not _NOTHING:
            _setting.set_local(_setting.value._replace(**changes))
        else:
            _setting.set_global(_setting.value._replace(**changes))


@contextlib.contextmanager
def hold_flags(changes: Mapping[str, bool | None]) -> Iterator[None]:
    """Sets flags for this thread while the context lasts; all flags are as before after it.

    Args:
        changes: values by field; the other flags keep theirs.

    Raises:
        ConfigError: a value is not allowed, or this thread traces a function for capture.
    """
    _check(changes)
    # In a thread that has no value of its own before, that is what is put back.
    before = _setting.swap_local(_setting.value._replace(**changes))
    try:
        yield
    finally:
        _setting.set_local(before)


def _check(changes: Mapping[str, Any]) -> None:
    for field, value in changes.items():
        name = SPELLINGS[field]
        # `is` and no `in`: 1 and NumPy's booleans are equal to True.
        if not (value is None or value is True or value is False):
            raise ConfigError(
                f"tg.backends.{name} is set to {value!r}",
                where=locate_caller(),
                why="the flag is True or False, or None where JAX decides",
                fix=f"tg.backends.{name} = False",
                anchor=ANCHOR,
            )
        if is_tracing():
            raise ConfigError(
                f"tg.backends.{name} is set while a function is traced for capture",
                where=locate_caller(),
                why="one capture has one set of flags: those that hold when it is called",
                fix="set it before the call, or use jax.default_matmul_precision in the function",
                anchor=ANCHOR,
            )
