"""Enum fields of XLA's messages, read by the names of their values: numbers may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tracegraph.lowering.xla.refusal import Refusal

T = TypeVar("T")


def read_name(message: Any, field: str) -> str:
    """Returns the name of an enum field's value, as ``BF16``; its number where it has no name."""
    number = getattr(message, field)
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(number)
    return str(number) if value is None else value.name


def read_names(message: Any, field: str) -> list[str]:
    """Returns the names of the values of a repeated enum field."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return [values[each].name if each in values else str(each) for each in getattr(message, field)]


def read_value(message: Any, field: str, table: Mapping[str, T]) -> T:
    """Returns what the name of an enum field's value means.

    Args:
        message: has the field.
        field: its name.
        table: the meaning by name.

    Raises:
        Refusal: the table does not have it.
    """
    name = read_name(message, field)
    if name not in table:
        raise Refusal(f"sets {message.DESCRIPTOR.full_name}.{field} to {name}")
    return table[name]
