"""Calls of the CUDA driver about devices, which need no context, and about pairs of contexts."""

from __future__ import annotations

from tracegraph.runtime.cuda.driver.calls import DriverCalls


class DeviceCalls(DriverCalls):
    """Calls about devices, each known by its ordinal among those that CUDA sees."""

    def read_attribute(self, ordinal: int, name: str) -> int:
        """Returns a number that describes a device.

        Args:
            ordinal: of the device.
            name: the end of the driver's name of it, as ``WARP_SIZE``.
        """
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._get_device(ordinal)))

    def read_total_bytes(self, ordinal: int) -> int:
        """Returns how many bytes of memory a device has."""
        return int(self._call("cuDeviceTotalMem", self._get_device(ordinal)))

    def read_uuid(self, ordinal: int) -> bytes:
        """Returns the 16 bytes that identify a device."""
        return bytes(self._call("cuDeviceGetUuid", self._get_device(ordinal)).bytes)

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Returns True when one device can read and write the memory of another."""
        devices = self._get_device(ordinal), self._get_device(peer)
        return bool(self._call("cuDeviceCanAccessPeer", *devices))

    def allow_peer(self, peer: int) -> None:
        """Lets the GPU of the current context use the memory of another's; again does nothing.

        Args:
            peer: context of the other GPU.
        """
        (result,) = self._api.cuCtxEnablePeerAccess(peer, 0)
        done = self._api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        if result and result != done:
            self._raise_call_error(result, "cuCtxEnablePeerAccess", (peer, 0))
