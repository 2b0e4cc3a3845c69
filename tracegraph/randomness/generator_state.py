"""GeneratorState: seed and counter of a generator, on the host; and the key of each count.

Note [Counted keys]. The key of count n is the key of the seed, folded with n. So a state is a few
words, what a program draws is known by how many keys it draws, and a replay takes the words as an
ordinary input: it draws what so many eager calls would draw, and its results need no state.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.jax_internals import eval_trace, run_in
from tracegraph.randomness.errors import make_seed_error, make_state_error

_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1
_LONG_MASK = (1 << 64) - 1
# Words of the seed and of the counter, the high one first.
_SEED_WORDS = _COUNT_WORDS = 2


class GeneratorState:
    """Seed and counter; several generators may share one.

    Args:
        seed: an int of 64 bits.

    Attributes:
        lock: is held while keys are drawn, also by a replay: see `hold_states`.
        capture: the thread and the name of the capture that draws from it; None without one.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.capture: tuple[int, str] | None = None
        # Of the key of the seed; made at the first draw, since that starts JAX.
        self._words: np.ndarray[Any, Any] | None = None
        self._impl = ""
        self._seed = self._count = 0
        self.reseed(seed)

    @property
    def seed(self) -> int:
        """The seed, as an int without a sign."""
        return self._seed

    def reseed(self, seed: Any) -> None:
        """Begins anew with a seed."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise make_seed_error(seed)
        if not -(1 << 63) <= seed <= _LONG_MASK:
            raise make_seed_error(seed)
        with self.lock:
            self._seed, self._count, self._words = int(seed) & _LONG_MASK, 0, None

    def copy(self) -> GeneratorState:
        """Returns a state of its own that draws the same keys."""
        with self.lock:
            new = GeneratorState(self._seed)
            new._count, new._words, new._impl = self._count, self._words, self._impl
        return new

    def read(self) -> np.ndarray[Any, Any]:
        """Returns seed, counter and key as words: all that there is to save."""
        with self.lock:
            words = self.read_input()
            return np.concatenate([_split(self._seed), words])

    def write(self, given: Any) -> None:
        """Takes what `read` returned."""
        value = np.asarray(given)
        with self.lock:
            size = self.read_input().size + _SEED_WORDS
            wanted = f"a uint32 array of shape ({size},)"
            if value.dtype != np.uint32 or value.shape != (size,):
                raise make_state_error(f"{value.dtype} of shape {value.shape}", wanted)
            self._seed = _join(value[:_SEED_WORDS])
            self._count = _join(value[_SEED_WORDS : _SEED_WORDS + _COUNT_WORDS])
            self._words = value[_SEED_WORDS + _COUNT_WORDS :].copy()

    def read_input(self) -> np.ndarray[Any, Any]:
        """Returns counter and key as words: what a replay takes."""
        with self.lock:
            if self._words is None:
                self._words, self._impl = _make_words(self._seed)
            return np.concatenate([_split(self._count), self._words])

    def advance(self, count: int) -> None:
        """Counts keys that were drawn."""
        with self.lock:
            self._count = (self._count + count) & _LONG_MASK

    def derive(self, words: Any, number: int) -> jax.Array:
        """Returns a key.

        Args:
            words: of `read_input`; a traced value in a capture.
            number: of keys that were drawn since.
        """
        return _derive_key(words, np.uint32(number), self._impl)

    def draw(self) -> jax.Array:
        """Returns the next key and counts it."""
        with self.lock:
            key = self.derive(self.read_input(), 0)
            self.advance(1)
        return key


def _make_words(seed: int) -> tuple[np.ndarray[Any, Any], str]:
    """Returns the words of a seed's key, and what JAX calls the kind of key."""
    with run_in(eval_trace):
        key = jax.random.key(np.uint32(seed & _WORD_MASK))
        if seed > _WORD_MASK:
            key = jax.random.fold_in(key, np.uint32(seed >> _WORD_BITS))
        return np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))


@functools.partial(jax.jit, static_argnums=2)
def _derive_key(words: Any, number: Any, impl: str) -> jax.Array:
    low = words[1] + number
    high = words[0] + (low < number).astype(jnp.uint32)
    key = jax.random.wrap_key_data(words[_COUNT_WORDS:], impl=impl)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)


def _split(value: int) -> np.ndarray[Any, Any]:
    return np.array([value >> _WORD_BITS, value & _WORD_MASK], np.uint32)


def _join(words: Any) -> int:
    return int(words[0]) << _WORD_BITS | int(words[1])
