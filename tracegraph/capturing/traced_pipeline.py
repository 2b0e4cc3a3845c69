"""TracedPipeline: the pipeline of captures for a jaxpr that is there already.

From the trace on, all is as for a captured function. What was recorded cannot be run a second time,
so there is no second trace to compare with; the passes are verified all the same.
"""

from __future__ import annotations

from typing import Any

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.pipeline import CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.meshes import check_context_mesh
from tracegraph.ir.graph import Origin
from tracegraph.jax_internals import make_function
from tracegraph.precision.apply_flags import apply_flags
from tracegraph.precision.flags import find_flags
from tracegraph.probing.collect_probes import collect_probes
from tracegraph.probing.probe import has_probes
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import FirstTrace
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.trace import JaxTrace


class TracedPipeline(CapturePipeline):
    """The phases of the capture of a jaxpr.

    Args:
        jaxpr: closed; its inputs are the leaves of the call.
        out_tree: the tree that its results make.
        where: the user's line that it begins at.
        prepared: the call that it stands for.
        device: that it is captured for.
        pool: that the memory of the graph comes from.
        progress: is notified of each phase.
    """

    # Constructed once per capture.
    def __init__(
        self,
        jaxpr: Any,
        out_tree: Any,
        where: str,
        prepared: PreparedCall,
        device: Device,
        pool: FunctionPool,
        progress: Progress,
    ) -> None:
        super().__init__(prepared, device, pool, progress)
        self._recorded, self._out_tree, self._where = jaxpr, out_tree, where

    def trace(self) -> JaxTrace:
        """Returns what was recorded."""
        self._progress.enter("trace")
        name = self._prepared.options.name
        check_context_mesh(name, self._device.jax_device)
        flags = find_flags(self._prepared.signature.settings)
        jaxpr, probes = self._recorded, ()
        if has_probes(jaxpr):
            jaxpr, probes = collect_probes(jaxpr)
        self._jaxpr = apply_flags(jaxpr, flags)
        bind = make_function(self._jaxpr)
        return JaxTrace(self._jaxpr, self._out_tree, bind, name, Origin(self._where), probes)

    def finish_checks(self, first: FirstTrace) -> None:
        """Verifies what the passes made."""
        first.rewritten.verify()
