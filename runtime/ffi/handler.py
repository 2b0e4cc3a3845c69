"""Handler: the registered functions of one target, called stage by stage with frames of ours."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

from tracegraph.runtime.ffi import c_api
from tracegraph.runtime.ffi.c_api import ExecutionStage
from tracegraph.runtime.ffi.context import (
    CallContext,
    find_table,
    forget_error,
    lend_context,
    make_interface_error,
    wait_for_future,
)
from tracegraph.runtime.ffi.frames import Frame


@dataclasses.dataclass(frozen=True)
class HandlerFacts:
    """What a handler says of itself.

    Attributes:
        version: of the interface that it was compiled against, as (0, 5).
        is_declared_capturable: True when it says that its calls may be captured and replayed.
    """

    version: tuple[int, int]
    is_declared_capturable: bool


@dataclasses.dataclass(frozen=True)
class Handler:
    """The functions of one target.

    Attributes:
        target: its name.
        stages: address of the function of each stage that it has.
    """

    target: str
    stages: tuple[tuple[ExecutionStage, int], ...]

    def has(self, stage: ExecutionStage) -> bool:
        """True when the handler has a function for a stage."""
        return stage in dict(self.stages)

    def run(self, stage: ExecutionStage, frame: Frame, context: CallContext) -> None:
        """Calls the function of a stage, and waits until it is done; nothing where it has none.

        Raises:
            InterfaceError: the handler returned an error.
            BaseException: what a function of ours raised while the handler called it.
        """
        address = dict(self.stages).get(stage)
        if address is None:
            return
        with lend_context(context) as number:
            given = c_api.CallFrame.new(api=find_table(), ctx=number, stage=stage)
            given.args, given.rets, given.attrs = frame.args, frame.rets, frame.attrs
            error = c_api.HANDLER(address)(ctypes.addressof(given)) or 0
            if given.future:
                error = wait_for_future(given.future) or error
        # No name for what is raised: it would hold this frame, which would hold it.
        if context.failure is not None:
            forget_error(error)
            try:
                raise context.failure
            finally:
                context.failure = None
        if error:
            raise make_interface_error(error)


@functools.lru_cache(maxsize=1024)
def read_facts(handler: Handler) -> HandlerFacts:
    """Returns what the handler's function for execution says of itself.

    Raises:
        InterfaceError: it does not answer.
    """
    metadata = c_api.Metadata.new()
    metadata.api_version = c_api.ApiVersion.new()
    extension = c_api.MetadataExtension(metadata=ctypes.pointer(metadata))
    extension.extension_base.struct_size = ctypes.sizeof(extension)
    extension.extension_base.type = c_api.EXTENSION_METADATA
    frame = c_api.CallFrame.new(
        extension_start=ctypes.addressof(extension), api=find_table(), stage=ExecutionStage.EXECUTE
    )
    frame.args, frame.rets = c_api.Args.new(), c_api.Rets.new()
    frame.attrs = c_api.Attrs.new()
    address = dict(handler.stages)[ExecutionStage.EXECUTE]
    error = c_api.HANDLER(address)(ctypes.addressof(frame)) or 0
    if error:
        raise make_interface_error(error)
    version = (metadata.api_version.major_version, metadata.api_version.minor_version)
    return HandlerFacts(version, bool(metadata.traits & c_api.COMMAND_BUFFER_COMPATIBLE))


def is_readable(facts: HandlerFacts) -> bool:
    """True for versions whose structures are known; see Note [Versions of the interface]."""
    major, minor = facts.version
    return major == c_api.MAJOR and 0 <= minor <= c_api.NEWEST
