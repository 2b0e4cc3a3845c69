"""Which arrays XLA was asked to define anew: none where the host reads from the stream itself."""

from __future__ import annotations

from typing import Any

import pytest

from tracegraph.runtime.cuda.jax_order import JaxOrder


def note_definitions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets each array that is defined anew."""
    found: list[Any] = []
    original = JaxOrder.define
    monkeypatch.setattr(JaxOrder, "define", lambda *args: found.append(args[1]) or original(*args))
    return found
