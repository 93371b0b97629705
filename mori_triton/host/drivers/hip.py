"""AMD GPUs, through libamdhip64: the copy of it that torch has loaded, since each copy has streams of its own."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mori_triton import env
from mori_triton.errors import DriverError
from mori_triton.host.drivers import dlpack, hip_api
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.gpu import Gpu, GpuDriver
from mori_triton.host.drivers.library import Library, load, loaded


def _describe(library: Library, status: int) -> str:
    # the library remembers the last error, and torch would report it as that of its own next launch
    library.status("last_error")
    name, text = (library.status(key, status) or b"unknown error" for key in ("error_name", "error_string"))
    return f"{name.decode()}: {text.decode()}"


@functools.cache
def open_library() -> Library:
    """libamdhip64, initialised. `DriverError` without one, or without a GPU it can use."""
    handle = load([*loaded(hip_api.LIBRARY_STEM), *hip_api.LIBRARY_NAMES])
    library = Library("libamdhip64", handle, hip_api.FUNCTIONS, _describe, optional=hip_api.OPTIONAL)
    library.call("init", 0)
    return library


def device_count() -> int:
    """How many AMD GPUs this process sees; 0 without a driver."""
    count = ctypes.c_int()
    try:
        open_library().call("device_count", ctypes.byref(count))
    except DriverError:
        return 0
    return count.value


class HipGpu(Gpu):
    """A GPU by its index among those visible."""

    name = "hip"
    api = hip_api

    def __init__(self, library: Library, index: int) -> None:
        super().__init__(library, index)
        self.device = index
        count, version = ctypes.c_int(), ctypes.c_int()
        library.call("device_count", ctypes.byref(count), about=str(self))
        if not 0 <= index < count.value:
            raise DriverError(f"{self}: there are {count.value} GPUs")
        library.call("version", ctypes.byref(version))
        self.version = version.value
        if self.version < hip_api.VERSION_MINIMUM:
            major, rest = divmod(self.version, 10_000_000)
            raise DriverError(f"{self}: this is HIP {major}.{rest // 100_000}; want 6.0 or newer")

    @contextmanager
    def current(self) -> Iterator[None]:
        old = ctypes.c_int()
        self.library.call("device_get", ctypes.byref(old), about=str(self))
        if old.value == self.index:
            yield
            return
        self.set_current()
        try:
            yield
        finally:
            self.library.call("device_set", old.value, about=f"{self.name}:{old.value}")

    def set_current(self) -> None:
        self.library.call("device_set", self.index, about=str(self))

    def mapping_type(self, kind: MemoryKind) -> int:
        uncached = kind is MemoryKind.UNCACHED
        return hip_api.MEM_ALLOCATION_TYPE_UNCACHED if uncached else hip_api.MEM_ALLOCATION_TYPE_PINNED

    @contextmanager
    def descriptor_argument(self, descriptor: int) -> Iterator[int]:
        """By its number as in CUDA, or by its address in versions before 7.1."""
        if self.version >= hip_api.VERSION_DESCRIPTOR_BY_VALUE:
            yield descriptor
            return
        stored = ctypes.c_int(descriptor)
        yield ctypes.addressof(stored)


class HipDriver(GpuDriver):
    """`Driver` for an AMD GPU. `device_index`: as torch counts them.

    UNCACHED memory is never kept in the GPU's caches. FINE_GRAINED memory is coherent pinned host memory, mapped at the
    same address.
    """

    name = "hip"
    # s_memrealtime, on every GPU that this package has bitcode for
    ticks_per_second = 100_000_000
    dlpack_device = dlpack.ROCM

    def __init__(
        self, device_index: int = 0, *, heap_mode: str = "static_heap", library: Library | None = None
    ) -> None:
        super().__init__(HipGpu(open_library() if library is None else library, device_index), heap_mode)
        options = env.torch_hip_allocator()
        if options.get("expandable_segments", "").lower() == "true" and "max_split_size_mb" in options:
            warnings.warn(
                "PYTORCH_HIP_ALLOC_CONF has expandable_segments:True and max_split_size_mb: with both, tensors in use "
                "have been seen to read as zeros on gfx1201 (ROCm 7.14); use one of them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _alloc_device(self, num_bytes: int, kind: MemoryKind) -> int:
        about = f"{num_bytes} bytes"
        if kind is MemoryKind.UNCACHED:
            flags = hip_api.DEVICE_MALLOC_UNCACHED
            return self._gpu.output("mem_alloc_flags", hip_api.DevicePointer, num_bytes, flags, about=about)
        return self._gpu.output("mem_alloc", hip_api.DevicePointer, num_bytes, about=about)

    def _alloc_host(self, num_bytes: int) -> int:
        flags = hip_api.HOST_MALLOC_PORTABLE | hip_api.HOST_MALLOC_MAPPED | hip_api.HOST_MALLOC_COHERENT
        about = f"{num_bytes} bytes of host memory"
        return self._gpu.output("host_alloc", ctypes.c_void_p, num_bytes, flags, about=about)

    def _copy_on(self, stream: int, dst: int, src: int, num_bytes: int) -> None:
        about = f"{num_bytes} bytes from {src:#x} to {dst:#x}"
        self._gpu.call("memcpy", dst, src, num_bytes, hip_api.MEMCPY_DEFAULT, stream, about=about)

    def _reach_device(self, index: int) -> None:
        if not self._gpu.output("can_access_peer", ctypes.c_int, self.device_index, index):
            raise DriverError(f"{self._gpu} cannot load from and store to memory of hip:{index}: no peer access")
        with self._gpu.current():
            status = self._gpu.library.status("enable_peer_access", index, 0)
            if status == hip_api.ERROR_PEER_ACCESS_ALREADY_ENABLED:
                self._gpu.library.status("last_error")
                return
            self._gpu.library.check(status, "enable_peer_access", f"{self._gpu} to hip:{index}")
