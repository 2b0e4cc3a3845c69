"""`cufft_plan_cache` of `tg.backends`: the plans of Fourier transforms that were used last."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.plan_cache import PlanCache, find_fft_plans


class CufftPlanCache:
    """The cuFFT plans of one device that were used last; captured functions share them.

    A captured function holds the plans of its own transforms: taking them out of the cache frees
    nothing that a replay needs. The host device has no plans.

    Args:
        device: a JAX device, the index of one, or None for the device that captures use.
    """

    __slots__ = ("_device",)

    def __init__(self, device: Any = None) -> None:
        self._device = device

    @property
    def size(self) -> int:
        """How many plans are in the cache now.

        Example:
            >>> tg.backends.cufft_plan_cache.size
            0
        """
        return self._find().size

    @property
    def max_size(self) -> int:
        """How many plans it holds at most; the ones that were not used for longest go first.

        A smaller value takes effect at once, 0 keeps none.

        Raises:
            ConfigError: another value than an int that is not negative was assigned.

        Example:
            >>> tg.backends.cufft_plan_cache.max_size
            4096
        """
        return self._find().max_size

    @max_size.setter
    def max_size(self, value: int) -> None:
        self._find().max_size = value

    def clear(self) -> None:
        """Takes every plan out of the cache, and frees those that no captured function holds.

        Example:
            >>> tg.backends.cufft_plan_cache.clear()
        """
        self._find().clear()

    def __repr__(self) -> str:
        name = find_any_device(self._device).name
        cache = find_fft_plans(name)
        return f"<cuFFT plans of {name}: {cache.size} of at most {cache.max_size}>"

    def _find(self) -> PlanCache[Any]:
        return find_fft_plans(find_any_device(self._device).name)


class CufftPlanCaches(CufftPlanCache):
    """`tg.backends.cufft_plan_cache`: that of the device that captures use, others by index.

    Example:
        >>> tg.backends.cufft_plan_cache[0].max_size = 10
        >>> tg.backends.cufft_plan_cache[jax.devices()[0]].max_size
        10
        >>> tg.backends.cufft_plan_cache[0].max_size = 4096
    """

    __slots__ = ()

    def __getitem__(self, device: Any) -> CufftPlanCache:
        """Returns the cache of another device.

        Args:
            device: a JAX device, or the index of one.

        Raises:
            ConfigError: there is no such device.
        """
        find_any_device(device)
        return CufftPlanCache(device)

    # Else Python would count through all devices.
    __iter__ = None

    def __reduce__(self) -> str:
        return "cufft_plan_cache"


cufft_plan_cache = CufftPlanCaches()
