"""Use of a GPU: the fraction of time in which it computed, by NVIDIA's management library (NVML)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress

import torch

EVERY_S = 1.0
"""Shortest time between two readings in seconds. NVML gives a mean over up to the last second."""


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _nvml(device: torch.device) -> Callable[[], float | None]:
    """Return a function that reads the fraction of time in which the device computes, from 0 to 1; None on error.
    Raises OSError if NVML does not know the device, for example a MIG slice."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, rates = ctypes.c_void_p(), _Rates()
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        raise OSError("NVML does not know the device")

    def read() -> float | None:
        failed = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        return None if failed else rates.gpu / 100

    return read


class DeviceUse:
    """Mean use of one GPU over an interval; unknown for other devices."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._device = clock, device
        self._read: Callable[[], float | None] | None = None
        if device.type == "cuda":
            with suppress(OSError, AttributeError):
                self._read = _nvml(device)
        self._at = 0.0
        self._found: list[float] = []

    def look(self) -> None:
        """Take a reading if the last reading is at least `EVERY_S` seconds old."""
        if self._read is not None and self._clock() - self._at >= EVERY_S:
            self._at = self._clock()
            found = self._read()
            self._found += [] if found is None else [found]

    def take(self) -> tuple[float | None, int | None]:
        """Return the mean use since the last call, from 0 to 1, and the bytes of memory in use now. Both are None if
        unknown."""
        found, self._found = self._found, []
        if not found:
            return None, None
        free, every = torch.cuda.mem_get_info(self._device)
        return sum(found) / len(found), every - free
