"""JAX's settings that a signature depends on: to records that a file holds, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracegraph.jax_internals import list_setting_names, read_settings
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.saving.plain_values import Names, pack_value, unpack_value

# A graph belongs to the device that it is loaded on, which is the default one there.
_DEVICE = "jax_default_device"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of JAX, or of tracegraph beside them.

    Attributes:
        name: as JAX reports it.
        value: packed, see `pack_value`.
        is_plain: False where it is what a process has that sets nothing, and no plain value.
    """

    name: str
    value: Any
    is_plain: bool = True


# Of a process that has only imported tracegraph.
_neutral: dict[str, Any] = dict(zip(list_setting_names(), read_settings(), strict=True))


def pack_settings(values: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Returns the records of the settings of a signature.

    Raises:
        SaveProblem: one of them is an object of this process, as a mesh.
    """
    return tuple(map(_pack, list_setting_names(), values))


def unpack_settings(saved: tuple[Setting, ...], names: Names) -> tuple[Any, ...]:
    """Returns the settings of a signature, as this process orders them.

    One that the file does not know is as it is now: another library may have brought it.

    Raises:
        ContentProblem: JAX has no such setting here, or it has no such value.
        UnknownNameError: a value is of a class that this process does not have.
    """
    current = dict(zip(list_setting_names(), read_settings(), strict=True))
    given = {each.name: each for each in saved}
    unknown = given.keys() - current.keys()
    if unknown or len(given) < len(saved):
        raise ContentProblem("the settings", f"JAX has no setting {', '.join(sorted(unknown))}")
    return tuple(
        _unpack(given[name], now, names) if name in given else now for name, now in current.items()
    )


def _pack(name: str, value: Any) -> Setting:
    if name == _DEVICE:
        return Setting(name, None, is_plain=False)
    try:
        return Setting(name, pack_value(value))
    except SaveProblem:
        if name not in _neutral or value != _neutral[name]:
            raise SaveProblem(f"JAX's setting {name} is {value}, an object of this process") from (
                None
            )
        return Setting(name, None, is_plain=False)


def _unpack(saved: Setting, now: Any, names: Names) -> Any:
    if saved.is_plain:
        return unpack_value(saved.value, names)
    return now if saved.name == _DEVICE else _neutral.get(saved.name, now)
