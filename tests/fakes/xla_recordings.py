"""Real programs of XLA for an H200, and the schema of the plugin that compiled them."""

from __future__ import annotations

import functools
import zlib

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from tests.paths import DATA
from tracegraph.lowering.xla.schema import Schema, build_schema

FOLDER = DATA / "xla"
PROGRAMS = ("mul2", "mm_f64")


def read_recording(name: str) -> bytes:
    """Returns a program of `PROGRAMS` as JAX serialized it."""
    return (FOLDER / f"{name}.bin").read_bytes()


def read_files() -> FileDescriptorSet:
    """Returns the descriptions of the schema, each file after those that it imports."""
    return FileDescriptorSet.FromString(zlib.decompress((FOLDER / "schema.bin").read_bytes()))


@functools.cache
def described_types() -> DescriptorPool:
    """Returns the message types of the recorded programs as XLA describes them."""
    pool = DescriptorPool()
    for file in read_files().file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@functools.cache
def recorded_schema() -> Schema:
    """Returns the message types of the recorded programs; needs no plugin."""
    return build_schema(read_files().file, "the recorded schema")
