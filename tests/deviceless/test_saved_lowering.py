"""Lowerings for a described H200, written and read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deviceless.test_graph_data import BATCH, VECTOR, WEIGHTS, repeat, train
from tests.deviceless.test_partial import lower
from tracegraph.lowering.saved_lowering import decode_lowered, encode_lowered
from tracegraph.runtime.saving.record_codec import ContentProblem


@pytest.mark.parametrize(
    ("function", "arguments"), [(train, (WEIGHTS, BATCH)), (repeat, (VECTOR,))]
)
def test_a_graph_of_kernels_is_read_as_it_was(h200: Any, function: Any, arguments: Any) -> None:
    _, lowered = lower(function, arguments, h200, mode="whole")
    encoded = encode_lowered(lowered)
    tree = json.loads(json.dumps(encoded.tree))
    stand_ins = [region.executable for region in lowered.regions]
    assert decode_lowered(tree, encoded.blobs, h200, stand_ins) == lowered
    with pytest.raises(ContentProblem, match="there is no external"):
        decode_lowered(tree, encoded.blobs, h200)
