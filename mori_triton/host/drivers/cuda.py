"""NVIDIA GPUs, through libcuda: the primary context of a device, which torch and Triton use too."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from mori_triton.errors import DriverError
from mori_triton.host.drivers import cuda_api, dlpack
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.gpu import Gpu, GpuDriver
from mori_triton.host.drivers.library import Library, load


def _describe(library: Library, status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    if library.status("error_name", status, ctypes.byref(name)) or name.value is None:
        return f"unknown error {status}"
    library.status("error_string", status, ctypes.byref(text))
    return f"{name.value.decode()}: {(text.value or b'no text').decode()}"


@functools.cache
def open_library() -> Library:
    """libcuda, initialised. `DriverError` without one, or without a GPU it can use."""
    library = Library(
        "libcuda", load(cuda_api.LIBRARY_NAMES), cuda_api.FUNCTIONS, _describe, optional=cuda_api.OPTIONAL
    )
    library.call("init", 0)
    return library


def device_count() -> int:
    """How many NVIDIA GPUs this process sees; 0 without a driver."""
    count = ctypes.c_int()
    try:
        open_library().call("device_count", ctypes.byref(count))
    except DriverError:
        return 0
    return count.value


class CudaGpu(Gpu):
    """A GPU by its index among those visible. Keeps the primary context alive."""

    name = "cuda"
    api = cuda_api

    def __init__(self, library: Library, index: int) -> None:
        super().__init__(library, index)
        device, context = ctypes.c_int(), cuda_api.Handle()
        library.call("device", ctypes.byref(device), index, about=str(self))
        library.call("context_retain", ctypes.byref(context), device.value, about=str(self))
        self.device, self.context = device.value, context.value
        weakref.finalize(self, library.status, "context_release", device.value).atexit = False

    @contextmanager
    def current(self) -> Iterator[None]:
        # pushed and popped, so that torch's current device in this thread is what it was
        self.library.call("context_push", self.context, about=str(self))
        try:
            yield
        finally:
            old = cuda_api.Handle()
            self.library.call("context_pop", ctypes.byref(old), about=str(self))

    def set_current(self) -> None:
        self.library.call("context_set", self.context, about=str(self))


class CudaDriver(GpuDriver):
    """`Driver` for an NVIDIA GPU. `device_index`: as torch counts them.

    Device memory has no uncached kind here: what other devices write is coherent, and kernels of this package order
    their accesses with system-scope releases and acquires. FINE_GRAINED memory is pinned host memory, mapped at the
    same address.
    """

    name = "cuda"
    # the globaltimer register counts nanoseconds
    ticks_per_second = 1_000_000_000
    dlpack_device = dlpack.CUDA

    def __init__(
        self, device_index: int = 0, *, heap_mode: str = "static_heap", library: Library | None = None
    ) -> None:
        super().__init__(CudaGpu(open_library() if library is None else library, device_index), heap_mode)

    def _alloc_device(self, num_bytes: int, kind: MemoryKind) -> int:
        return self._gpu.output("mem_alloc", cuda_api.DevicePointer, num_bytes, about=f"{num_bytes} bytes")

    def _alloc_host(self, num_bytes: int) -> int:
        flags = cuda_api.MEMHOSTALLOC_PORTABLE | cuda_api.MEMHOSTALLOC_DEVICEMAP
        return self._gpu.output(
            "host_alloc", ctypes.c_void_p, num_bytes, flags, about=f"{num_bytes} bytes of host memory"
        )

    def _copy_on(self, stream: int, dst: int, src: int, num_bytes: int) -> None:
        self._gpu.call("memcpy", dst, src, num_bytes, stream, about=f"{num_bytes} bytes from {src:#x} to {dst:#x}")

    def _reach_device(self, index: int) -> None:
        assert isinstance(self._gpu, CudaGpu)
        peer = CudaGpu(self._gpu.library, index)
        can = self._gpu.output("can_access_peer", ctypes.c_int, self._gpu.device, peer.device)
        if not can:
            raise DriverError(
                f"{self._gpu} cannot load from and store to memory of {peer}: no peer access between them"
            )
        with self._gpu.current():
            status = self._gpu.library.status("enable_peer_access", peer.context, 0)
        if status != cuda_api.ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self._gpu.library.check(status, "enable_peer_access", f"{self._gpu} to {peer}")
