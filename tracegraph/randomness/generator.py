"""Generator: a stateful source of JAX keys."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.randomness.draws import check_outside, draw_key
from tracegraph.randomness.errors import make_device_error, make_generator_error
from tracegraph.randomness.generator_state import GeneratorState

_SEED_BYTES = 8


class Generator:
    """A source of JAX keys: each call of `next_key` gives another one.

    Inside of `tg.capture` and `tg.graph`, replay number k draws the keys that the k-th eager run
    would draw; replays and eager draws may alternate. The state is a few words on the host.

    Args:
        seed: an int of 64 bits, signed or not.
        device: a JAX device that eager keys are put on; None for the default device. Keys of a
            capture are where it is.

    Raises:
        ConfigError: the seed is no such int, or JAX does not know the device.

    Example:
        >>> gen = tg.random.Generator(7)
        >>> noise = tg.capture(lambda x: x + jax.random.normal(gen.next_key(), x.shape))
        >>> first, second = noise(jnp.zeros(2)), noise(jnp.zeros(2))
        >>> _ = gen.manual_seed(7)
        >>> bool((first == jax.random.normal(gen.next_key(), (2,))).all())
        True
        >>> bool((second == jax.random.normal(gen.next_key(), (2,))).all())
        True
    """

    def __init__(self, seed: int = 0, device: Any = None) -> None:
        self._state = GeneratorState(seed)
        self._device = _check_device(device)

    def __repr__(self) -> str:
        return f"<Generator seed={self._state.seed}>"

    @property
    def device(self) -> Any:
        """The JAX device that eager keys are put on; None for the default device."""
        return self._device

    @hides_own_frames
    def next_key(self) -> jax.Array:
        """Returns a typed key that was not drawn before, of shape (), and advances the state.

        Under `jax.vmap` and `jax.grad` it is the key that would be drawn without them.

        Raises:
            CaptureError: JAX traces a function of its own around the call (`jax.jit`, the body of a
                `jax.lax.scan`), or another thread captures with this generator.

        Example:
            >>> jax.random.uniform(tg.random.Generator(0).next_key(), (3,)).shape
            (3,)
        """
        if self._device is None:
            return draw_key(self._state)
        with jax.default_device(self._device):
            return draw_key(self._state)

    @hides_own_frames
    def manual_seed(self, seed: int) -> Generator:
        """Begins anew with a seed; returns the generator.

        Args:
            seed: an int of 64 bits, signed or not.

        Raises:
            ConfigError: the seed is no such int.
            CaptureError: it is called inside a capture.
        """
        check_outside("manual_seed")
        self._state.reseed(seed)
        return self

    @hides_own_frames
    def seed(self) -> int:
        """Begins anew with a seed that the system has drawn; returns it.

        Raises:
            CaptureError: it is called inside a capture.
        """
        check_outside("seed")
        self._state.reseed(int.from_bytes(os.urandom(_SEED_BYTES), "little"))
        return self._state.seed

    def initial_seed(self) -> int:
        """Returns the seed, as an int without a sign.

        Example:
            >>> tg.random.Generator(3).initial_seed()
            3
        """
        return self._state.seed

    @hides_own_frames
    def get_state(self) -> np.ndarray[Any, Any]:
        """Returns seed, counter and key data as a new uint32 array; all that there is to save.

        Raises:
            CaptureError: it is called inside a capture.

        Example:
            >>> gen = tg.random.Generator(3)
            >>> state, key = gen.get_state(), gen.next_key()
            >>> _ = gen.set_state(state)
            >>> bool(gen.next_key() == key)
            True
        """
        check_outside("get_state")
        return self._state.read()

    @hides_own_frames
    def set_state(self, state: Any) -> Generator:
        """Takes a state that `get_state` has returned; returns the generator.

        Args:
            state: a uint32 array, as of `get_state`.

        Raises:
            ConfigError: it is no such array.
            CaptureError: it is called inside a capture.
        """
        check_outside("set_state")
        self._state.write(state)
        return self

    @hides_own_frames
    def clone_state(self) -> Generator:
        """Returns a generator that will draw the same keys, on its own.

        Raises:
            CaptureError: it is called inside a capture.
        """
        check_outside("clone_state")
        return self._join(self._state.copy())

    def graphsafe_get_state(self) -> Generator:
        """Returns a generator that shares the state: a draw from one advances both.

        Example:
            >>> gen = tg.random.Generator(3)
            >>> shared = gen.graphsafe_get_state()
            >>> bool(gen.next_key() == shared.next_key())
            False
        """
        return self._join(self._state)

    @hides_own_frames
    def graphsafe_set_state(self, state: Generator) -> Generator:
        """Shares the state of another generator from now on; returns the generator.

        Inside a capture the keys that follow are drawn from that state, in each replay.

        Args:
            state: the other generator.

        Raises:
            ConfigError: it is no generator.
        """
        if not isinstance(state, Generator):
            raise make_generator_error(state)
        self._state = state._state
        return self

    def _join(self, state: GeneratorState) -> Generator:
        new = Generator(device=self._device)
        new._state = state
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state.read(), "device": self._device}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        Generator.__init__(self)
        self._state.write(saved["state"])
        self._device = saved["device"]

    def __copy__(self) -> Generator:
        return self._join(self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generator:
        new = memo[id(self)] = self._join(self._state.copy())
        return new


def _check_device(device: Any) -> Any:
    """Returns a device, or a platform's name, that JAX can make the default one; None for none."""
    if device is None:
        return None
    try:
        with jax.default_device(device):
            return device
    except ValueError:
        raise make_device_error(device) from None
