"""Devices of this process behind one protocol."""

from __future__ import annotations

from mori_triton.errors import StateError
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.drivers.cpu import CpuDriver

__all__ = ["CpuDriver", "Driver", "MemoryKind", "open_driver"]


def open_driver(device: str) -> Driver:
    """The driver of a process that is one PE: "cpu", and "auto" as long as that is the only one there is."""
    if device in ("auto", "cpu"):
        return CpuDriver(shared=True)
    raise StateError(f"MORI_TRITON_DEVICE={device}: there is no driver for it yet; want cpu")
