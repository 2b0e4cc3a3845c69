"""Mutated programs of XLA: each is read, or refused by an error of ours, and none is built wrong.

By hand, with as many as wanted, and with programs of your own that JAX serialized:

    python -m tests.fuzz.program_mutations --count 6000 --seed 1 [FILE ...]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from tests.fakes.riegeli_writer import varint, write_program
from tests.fuzz import wire
from tests.fuzz.program_subjects import Subject, build, find_stray, make_subject, make_subjects
from tests.fuzz.wire import BYTES, FIXED32, FIXED64, VARINT, Field, Message
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.schema import EXECUTABLE, load_schema
from tracegraph.runtime.errors import TracegraphError

ODD_NUMBERS = (0, 1, 2, 3, 5, 7, 31, 33, 255, 256, 4096, 2**31 - 1, 2**31, 2**32 - 1)
ODD_NUMBERS += (2**62, 2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1)
# Element types that no XLA has, among them -1 as a writer of 64 and of 32 bits writes it.
ODD_ENUMS = (-1 % 2**64, -1 % 2**32, 999, 2**31 - 1, 16, 33, 77)
UNKNOWN_NUMBER = 1023


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutated program.

    Attributes:
        mutation: what was done to it.
        end: ``built``, or the error's type.
        seconds: until then.
    """

    mutation: str
    end: str
    seconds: float


def run_mutation(subject: Subject, name: str, rng: random.Random) -> Outcome:
    """Mutates a program, and reads and builds what it became.

    Raises:
        Exception: what is raised and is no error of ours.
        AssertionError: a range is not within its buffer.
    """
    mutated = MUTATIONS[name](subject, rng)
    begin, end, lines = time.perf_counter(), "built", 4
    try:
        program = decode_executable(read_executable(mutated, subject.schema), name=subject.name)
        definition = build(program, subject)
        assert not find_stray(definition), find_stray(definition)
    except TracegraphError as error:
        end, lines = type(error).__name__, len(str(error).splitlines())
    assert lines >= 4
    assert end != "built" or name not in REFUSED, "an unknown field was passed over"
    return Outcome(name, end, time.perf_counter() - begin)


def flip_byte(subject: Subject, rng: random.Random) -> bytes:
    """Changes one to three bytes of the file."""
    data = bytearray(subject.serialized)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    return bytes(data)


def flip_inner_byte(subject: Subject, rng: random.Random) -> bytes:
    """Changes one to three bytes of the message, behind compression."""
    data = bytearray(subject.encoded)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    return _write(subject, bytes(data), rng)


def cut(subject: Subject, rng: random.Random) -> bytes:
    """Ends the file early."""
    return subject.serialized[: rng.randrange(len(subject.serialized))]


def cut_inner(subject: Subject, rng: random.Random) -> bytes:
    """Ends the message early."""
    return _write(subject, subject.encoded[: rng.randrange(len(subject.encoded))], rng)


def replace_piece(subject: Subject, rng: random.Random) -> bytes:
    """Replaces some bytes of the file by others, more or fewer."""
    data = bytearray(subject.serialized)
    begin = rng.randrange(len(data))
    data[begin : begin + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
    return bytes(data)


def repeat_field(subject: Subject, rng: random.Random) -> bytes:
    """Writes a field twice."""

    def change(message: Message, field: Field) -> None:
        message.insert(rng.randint(0, len(message)), field)

    return _mutate(subject, rng, change)


def drop_field(subject: Subject, rng: random.Random) -> bytes:
    """Leaves a field out."""
    return _mutate(subject, rng, lambda message, field: message.remove(field))


def swap_fields(subject: Subject, rng: random.Random) -> bytes:
    """Writes the fields of a message in another order."""
    return _mutate(subject, rng, lambda message, field: rng.shuffle(message))


def lengthen_numbers(subject: Subject, rng: random.Random) -> bytes:
    """Writes numbers and lengths with more bytes than they need."""

    def change(message: Message, field: Field) -> None:
        field.padding = rng.randint(1, 9)

    return _mutate(subject, rng, change, rng.randint(1, 6))


def change_number(subject: Subject, rng: random.Random) -> bytes:
    """Sets a number, a flag, an enum value, an offset or a size to an odd one."""

    def change(message: Message, field: Field) -> None:
        is_enum = field.descriptor is not None and field.descriptor.enum_type is not None
        field.value = rng.choice(ODD_ENUMS if is_enum else ODD_NUMBERS)

    return _mutate(subject, rng, change, rng.randint(1, 2), lambda field: field.wire_type == VARINT)


def change_element_type(subject: Subject, rng: random.Random) -> bytes:
    """Sets an element type, of a shape or a matrix, to one that XLA does not have."""

    def change(message: Message, field: Field) -> None:
        field.value = rng.choice(ODD_ENUMS)

    return _mutate(subject, rng, change, rng.randint(1, 3), _is_enum)


def change_bytes(subject: Subject, rng: random.Random) -> bytes:
    """Replaces the value of a text, a list or a message by noise."""

    def change(message: Message, field: Field) -> None:
        field.value = rng.randbytes(rng.randint(0, 12))

    return _mutate(subject, rng, change, 1, lambda field: field.wire_type == BYTES)


def change_wire_type(subject: Subject, rng: random.Random) -> bytes:
    """Says that a value is written in another way than it is."""

    def change(message: Message, field: Field) -> None:
        field.wire_type = rng.choice((VARINT, FIXED64, BYTES, 3, 4, FIXED32, 6, 7))

    return _mutate(subject, rng, change)


def insert_unknown(subject: Subject, rng: random.Random) -> bytes:
    """Adds fields that the schema does not have."""

    def change(message: Message, field: Field) -> None:
        message.insert(rng.randint(0, len(message)), make_unknown(rng))

    # In a computation that is not looked into it changes nothing.
    return _mutate(subject, rng, change, opens_computations=False)


def hide_unknown(subject: Subject, rng: random.Random) -> bytes:
    """Adds an unknown field, and shortens others by about as many bytes.

    By sizes alone it is not seen: what is read and written again has as many bytes as before.
    """
    schema = subject.schema.message_class(EXECUTABLE).DESCRIPTOR
    fields = wire.parse(subject.encoded, schema, opens_computations=False)
    found = list(wire.walk(fields))
    messages = [fields, *(field.value for _, field in found if isinstance(field.value, list))]
    rng.choice(messages).append(make_unknown(rng))
    # -1 in 5 bytes is read as -1, and written again in 10.
    for _, field in rng.sample([each for each in found if _is_enum(each[1])], 2):
        field.value = 2**32 - 1
    # A map's entry without its key and value, which are written in any case.
    maps = [
        (message, field)
        for message, field in found
        if field.descriptor is not None
        and field.descriptor.message_type is not None
        and field.descriptor.message_type.GetOptions().map_entry
    ]
    for message, field in maps[: rng.randint(0, 2)]:
        message.append(dataclasses.replace(field, value=b""))
    for _, field in rng.sample(found, 4):
        field.padding = rng.randint(0, 2)
    return _write(subject, wire.write(fields), rng)


def make_unknown(rng: random.Random) -> Field:
    """Returns a field that no message has."""
    if rng.random() < 0.5:
        return Field(UNKNOWN_NUMBER, VARINT, rng.randrange(1 << rng.randint(1, 60)))
    return Field(UNKNOWN_NUMBER, BYTES, rng.randbytes(rng.randint(0, 6)))


def nest(subject: Subject, rng: random.Random) -> bytes:
    """Puts a sequence of thunks into itself, up to a thousand deep."""
    thunk = subject.schema.message_class("xla.gpu.ThunkProto").DESCRIPTOR
    number = thunk.fields_by_name["sequential_thunk"].number
    inner = b""
    for _ in range(rng.choice((3, 20, 45, 60, 1000))):
        body = b"\x0a" + varint(len(inner)) + inner
        inner = varint(number << 3 | BYTES) + varint(len(body)) + body
    schema = subject.schema.message_class(EXECUTABLE).DESCRIPTOR
    tag = varint(schema.fields_by_name["thunks"].number << 3 | BYTES)
    return _write(subject, subject.encoded + tag + varint(len(inner)) + inner, rng)


def _is_enum(field: Field) -> bool:
    if field.wire_type != VARINT or field.descriptor is None:
        return False
    return field.descriptor.enum_type is not None


def _mutate(
    subject: Subject,
    rng: random.Random,
    change: Callable[[Message, Field], None],
    count: int = 1,
    is_meant: Callable[[Field], bool] = lambda field: True,
    *,
    opens_computations: bool = True,
) -> bytes:
    """Returns the program with some of its fields changed, each by itself."""
    schema = subject.schema.message_class(EXECUTABLE).DESCRIPTOR
    fields = wire.parse(subject.encoded, schema, opens_computations=opens_computations)
    found = [each for each in wire.walk(fields) if is_meant(each[1])]
    for message, field in rng.sample(found, min(count, len(found))):
        change(message, field)
    return _write(subject, wire.write(fields), rng)


class _Encoded:
    """Bytes that stand for a message, for the writer of split protos."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802, the writer's name for it
        return self._data


def _write(subject: Subject, message: bytes, rng: random.Random) -> bytes:
    return write_program(subject.schema, [_Encoded(message)], rng.choice(("", "s")))


MUTATIONS: Mapping[str, Callable[[Subject, random.Random], bytes]] = {
    each.__name__: each
    for each in (
        flip_byte,
        flip_inner_byte,
        cut,
        cut_inner,
        replace_piece,
        repeat_field,
        drop_field,
        swap_fields,
        lengthen_numbers,
        change_number,
        change_element_type,
        change_bytes,
        change_wire_type,
        insert_unknown,
        hide_unknown,
        nest,
    )
}


# These add what the schema does not have, so that no program may be read any more.
REFUSED = ("insert_unknown", "hide_unknown")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs mutations, prints how they ended, and what must not have happened; 1 if anything did."""
    parser = argparse.ArgumentParser(description="Mutates programs of XLA and reads them.")
    parser.add_argument("--count", type=int, default=6000, help="mutated programs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="programs for this plugin")
    options = parser.parse_args(arguments)
    subjects = make_subjects()
    subjects += [make_subject(f.stem, f.read_bytes(), load_schema()) for f in options.files]
    names = list(MUTATIONS)
    ends: collections.Counter[str] = collections.Counter()
    slowest, failures = 0.0, 0
    for number in range(options.count):
        subject = subjects[number % len(subjects)]
        name = names[number // len(subjects) % len(names)]
        try:
            outcome = run_mutation(subject, name, random.Random(f"{options.seed}.{number}"))
        except Exception:  # noqa: BLE001, each of them is a failure
            failures += 1
            print(f"{subject.name}, {name}, seed {options.seed}.{number}:")
            traceback.print_exc()
            continue
        slowest = max(slowest, outcome.seconds)
        ends[f"{name:20} {outcome.end}"] += 1
    print("\n".join(f"{end:45} {count:6}" for end, count in sorted(ends.items())))
    print(f"{failures} wrong ends of {options.count}; the slowest took {slowest:.3f} s")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
