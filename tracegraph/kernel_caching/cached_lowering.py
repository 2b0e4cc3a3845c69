"""Cached lowerings: what lowering gave for a program, kept in files under the program's key.

Note [Kernel cache]
After tracing and checking, the key of the program is looked up. A hit gives the lowering as it was:
no region is compiled, decoded, planned or built, and the graph is not compared again with XLA's
executable, since it was, bit for bit, when it was stored. So only captures that were verified are
stored. A file that does not hold together is a miss. What the second trace shows is checked all the
same, hit or miss.

On a GPU the executables of XLA are not stored. Who asks for one, as `cost_analysis` does, compiles
the program then.

Note [Sketches]
A key is written in 20 to 50 ms, which a first capture would wait for to learn that its program is
not there. So keys begin with a sketch of the program: what a function is called, the shapes of its
inputs, and how many ops it has. Where no file begins so, XLA starts at once, and the key is made
while it compiles. Without the shapes, each new shape of a function waited for the file of the last.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.ir.graph import Graph, Value
from tracegraph.kernel_caching.program_key import NoKey, make_key
from tracegraph.kernel_caching.storing import store_behind, wait_for_stores
from tracegraph.kernel_caching.surroundings import describe_surroundings, find_own_version
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.late_executable import LateExecutable, LateRegions
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.saved_lowering import SaveProblem, decode_lowered, encode_lowered
from tracegraph.lowering.tuning import Tuning
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.saving.kernel_store import KernelStore, find_store
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.report import VerificationReport

LOGGER = logging.getLogger("tracegraph")
# More than a program has; a file that claims more is damaged.
MAX_REGIONS = 1 << 16
# See Note [Sketches].
SKETCH_DIGITS = 16

_codec = RecordCodec([VerificationReport])
_lock = threading.Lock()
_counts: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class CachedLowering:
    """What the cache has for a program.

    Attributes:
        lowered: the lowering.
        verification: what its comparison found when it was stored.
    """

    lowered: Lowered
    verification: VerificationReport


def find_usable_store() -> KernelStore | None:
    """Returns the store; None where the cache is off, or where no key would name this version."""
    store = find_store()
    if store is None or find_own_version() is not None:
        return store
    _warn_of_changed_files()
    return None


@functools.cache
def _warn_of_changed_files() -> None:
    LOGGER.warning(
        "the kernel cache is not used: files of tracegraph have changed since it was imported"
    )


def read_counts() -> dict[str, int]:
    """Returns how often this process found a program, did not, and stored one."""
    wait_for_stores()
    with _lock:
        return {name: _counts[name] for name in ("hits", "misses", "stores")}


def _count(name: str) -> None:
    with _lock:
        _counts[name] += 1


def find_slot(
    prepared: PreparedCall,
    graph: Graph,
    embedded: Mapping[Value, Any],
    device: Device,
    *,
    shares_arguments: bool,
    tuning: Tuning,
) -> CacheSlot | None:
    """Returns the place of a program in the cache; None where the cache is off.

    In checking mode it is off: what that mode is to find would be found once, and not again.

    Args:
        prepared: the call.
        graph: of it, checked and optimised.
        embedded: those of its constants that are part of XLA's program.
        device: that it is lowered for.
        shares_arguments: see `share_arguments`.
        tuning: how it is lowered.
    """
    store = find_store()
    if store is None or not prepared.options.verify or read_check_replay():
        return None

    def write_key() -> str:
        if find_usable_store() is None:
            raise NoKey("files of tracegraph have changed since it was imported")
        surroundings = describe_surroundings(
            prepared, device, shares_arguments=shares_arguments, tuning=tuning
        )
        return make_key(graph, embedded, surroundings)

    return CacheSlot(store, prepared.options.name, make_sketch(graph), write_key)


def make_sketch(graph: Graph) -> str:
    """Returns the beginning of a program's key, see Note [Sketches].

    Args:
        graph: checked and optimised.
    """
    counts = [*map(len, (graph.constants, graph.ops, graph.outputs))]
    text = f"{graph.name} {[each.aval.shape for each in graph.inputs]} {counts}"
    return hashlib.sha256(text.encode()).hexdigest()[:SKETCH_DIGITS]


class CacheSlot:
    """The place of one program in the cache.

    Args:
        store: the files.
        name: of the function, for the log.
        sketch: of the program.
        write_key: returns the rest of its key, or raises `NoKey`; called once at most.

    Attributes:
        store: the same.
    """

    def __init__(
        self, store: KernelStore, name: str, sketch: str, write_key: Callable[[], str]
    ) -> None:
        self.store, self._name, self._sketch = store, name, sketch
        # It holds the arguments of the call.
        self._write_key: Callable[[], str] | None = write_key
        self._key: str | None = None

    def find_key(self) -> str | None:
        """Returns the key of the program, made the first time; None where it has none."""
        write, self._write_key = self._write_key, None
        if write is not None:
            try:
                self._key = f"{self._sketch}{write()}"
            except NoKey as problem:
                LOGGER.debug("`%s` is not in the kernel cache: %s", self._name, problem)
        return self._key

    def find(
        self, device: Device, compile_regions: Callable[[], tuple[CompiledRegion, ...]]
    ) -> CachedLowering | None:
        """Returns what is stored, or None; then `note_miss` is to be called.

        Args:
            device: that it is lowered for.
            compile_regions: compiles the regions where a file has no executables.
        """
        wait_for_stores(self.store.path, self._sketch)
        key = self.find_key() if self.store.holds(self._sketch) else None
        file = None if key is None else self.store.find(key)
        if key is None or file is None:
            return None
        try:
            found = _decode(key, file.content, file.blobs, device, compile_regions)
        except ContentProblem as problem:
            self.store.drop(key, str(problem))
            return None
        _count("hits")
        return found

    def note_miss(self) -> None:
        """Counts that the program was not found, unless it has no key."""
        if self.find_key() is not None:
            _count("misses")

    def add(self, lowered: Lowered, verification: VerificationReport) -> None:
        """Stores a lowering whose graph was compared with XLA's executable: Note [Stored behind].

        Args:
            lowered: the lowering.
            verification: what the comparison found.
        """
        key = self.find_key()
        if key is not None and not verification.skipped:
            store = functools.partial(_store, self.store, key, lowered, verification)
            store_behind(self.store.path, key, store)


def _store(
    store: KernelStore, key: str, lowered: Lowered, verification: VerificationReport
) -> None:
    try:
        encoded = encode_lowered(lowered)
    except SaveProblem as problem:
        LOGGER.debug("not in the kernel cache: %s", problem)
        return
    report = _codec.encode(verification, blobs=encoded.blobs)
    content = {
        "key": key,
        "lowering": encoded.tree,
        "regions": len(lowered.regions),
        "stored": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "verification": report.tree,
    }
    if store.add(key, content, report.blobs):
        _count("stores")


@hold_collector
def _decode(
    key: str,
    content: Any,
    blobs: Any,
    device: Device,
    compile_regions: Callable[[], tuple[CompiledRegion, ...]],
) -> CachedLowering:
    names = {"key", "lowering", "regions", "stored", "verification"}
    if not isinstance(content, dict) or content.keys() != names or content["key"] != key:
        raise ContentProblem("the content", "it is not that of this program")
    count, stored = content["regions"], content["stored"]
    if type(count) is not int or not 0 <= count <= MAX_REGIONS or type(stored) is not str:
        raise ContentProblem("the content", "its regions or its date are damaged")
    late = LateRegions(compile_regions)
    stand_ins = [LateExecutable(late, index) for index in range(count)]
    jax_device = device.jax_device
    lowered = decode_lowered(content["lowering"], blobs, jax_device, stand_ins)
    report = _codec.decode(content["verification"], blobs, VerificationReport)
    note = f"compared when it was stored in the kernel cache, on {stored[:10]}"
    note = f"{report.note}; {note}" if report.note else note
    return CachedLowering(lowered, dataclasses.replace(report, note=note))
