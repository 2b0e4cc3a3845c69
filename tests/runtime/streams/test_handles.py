"""Handles: a copy is the same object, and a pickle is refused."""

import copy
import pickle

import pytest

from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.streams.handles import Handle


class Pen(Handle):
    pass


def test_copies_are_the_same_object():
    pen = Pen()
    assert copy.copy(pen) is pen
    assert copy.deepcopy([pen])[0] is pen


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused(protocol):
    with pytest.raises(ConfigError) as caught:
        pickle.dumps(Pen(), protocol)
    assert caught.value.what == "a Pen cannot be pickled"
    assert len(str(caught.value).splitlines()) == 4
