"""WatchedGraph: a captured graph of the checking mode, which refuses to replay old outer values."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.errors import ReplayError
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.outer_values import OuterValues, find_stale
from tracegraph.tracing.prepared_call import PreparedCall


class WatchedGraph(CapturedGraph):
    """A captured graph that looks before each replay at what its function read from around it.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
        outer: what the function read when it was traced.
    """

    __slots__ = ("_outer",)

    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
        outer: OuterValues,
    ) -> None:
        self._outer = outer
        super().__init__(prepared, checked, lowered, replay)

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on the arguments, or returns MISS if they have another signature.

        Raises:
            ReplayError: a value that the trace took is another one now.
        """
        stale = find_stale(self._outer, self._function)
        if stale:
            raise ReplayError(
                f"`{self.name}` would replay an old value: {stale[0]}",
                where=locate_caller(),
                why="what a function reads from around it is taken when it is captured",
                fix=f"pass it as an argument, or call `{self.name}.reset()` after a change",
                anchor="stale-value",
            )
        return super().try_call(args, kwargs, is_checked)
