"""SpreadGraph: one signature of a captured function that several GPUs replay together.

Each GPU has the same graph over its own parts; collectives are kernels in it. The rest is that of
any captured graph: state is resident on each GPU, results keep their value, and a call is one
launch per GPU.
"""

from __future__ import annotations

from tracegraph.lowering.compile_spread import SpreadProgram
from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall


class SpreadGraph(CapturedGraph):
    """The replay of one signature on several GPUs.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        lowered: what each GPU does.
        replay: the instantiated definition.
        program: of XLA, for all of them.
    """

    __slots__ = ("program",)

    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
        program: SpreadProgram,
    ) -> None:
        self.program = program
        super().__init__(prepared, checked, lowered, replay)
