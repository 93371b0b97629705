"""Devices of this process behind one protocol."""

from __future__ import annotations

from mori_triton.errors import StateError, require
from mori_triton.host.drivers import cuda, hip
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.drivers.cuda import CudaDriver
from mori_triton.host.drivers.hip import HipDriver

__all__ = ["CpuDriver", "CudaDriver", "Driver", "HipDriver", "MemoryKind", "default_device", "open_driver"]

_GPUS = {"cuda": CudaDriver, "hip": HipDriver}


def open_driver(device: str = "auto", index: int | None = None, *, heap_mode: str = "static_heap") -> Driver:
    """The driver of a process that is one PE.

    Args:
        device: "cpu", "cuda", "hip"; "auto": the GPU that this build of torch is for if one is visible, else the CPU.
        index: which GPU; None: torch's current one. The CPU is one.
        heap_mode: how memory for other processes is made, on a GPU: `MORI_SHMEM_MODE`.

    Raises: `DriverError` when there is no such device; `StateError` when torch cannot use it.
    """
    if device == "auto":
        device = default_device()
    if device == "cpu":
        return CpuDriver(shared=True)
    require(device in _GPUS, "device", '"auto", "cpu", "cuda" or "hip"', repr(device))
    return _GPUS[device](_current_index(device) if index is None else index, heap_mode=heap_mode)


def default_device() -> str:
    """What "auto" stands for: "cuda", "hip" or "cpu". Asking makes no context on a GPU."""
    import torch

    # a GPU is of no use to a torch that was built for another kind, or for none
    if torch.version.cuda is not None and cuda.device_count():
        return "cuda"
    if torch.version.hip is not None and hip.device_count():
        return "hip"
    return "cpu"


def _current_index(device: str) -> int:
    import torch

    built_for = torch.version.cuda if device == "cuda" else torch.version.hip
    if built_for is None:
        raise StateError(f"device {device!r}: this torch ({torch.__version__}) was built without support for it")
    return torch.cuda.current_device()
