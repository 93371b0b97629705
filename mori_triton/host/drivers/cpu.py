"""The CPU as a device: its memory is this process's memory, its kernels run on the emulated GPU.

Memory that other processes map is an anonymous file (memfd) which they open through the owner's /proc entry. It never
has a name, so a process that is killed at any moment leaves nothing behind, and the size of /dev/shm is no limit.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.identity import process_identity

if TYPE_CHECKING:
    import torch

# <sys/mman.h>, Linux
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGE = 4096


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    libc.munmap.argtypes, libc.munmap.restype = [pointer, size], number
    return libc


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc().mmap(address, num_bytes, protection, flags, fd, 0)
    if result == _MAP_FAILED:
        raise DriverError(f"mmap of {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    return result


def _munmap(address: int, num_bytes: int) -> None:
    if num_bytes and _libc().munmap(address, num_bytes):
        raise DriverError(f"munmap of {num_bytes} bytes at {address:#x}: {os.strerror(ctypes.get_errno())}")


class _Mapping:
    """Pages of this process, unmapped when the last holder (a driver, or a tensor over them) is gone."""

    def __init__(self, num_bytes: int, alignment: int, fd: int | None) -> None:
        self.num_bytes = num_bytes
        self.alignment = max(alignment, _PAGE)
        self.mapped_bytes = -(-num_bytes // _PAGE) * _PAGE
        # reserve more address space than needed, then put the pages at the aligned address in it
        reserved = self.mapped_bytes + self.alignment
        start = _mmap(None, reserved, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = -(-start // self.alignment) * self.alignment
        share = _MAP_PRIVATE | _MAP_ANONYMOUS if fd is None else _MAP_SHARED
        try:
            _mmap(
                self.address,
                self.mapped_bytes,
                _PROT_READ_WRITE,
                share | _MAP_FIXED | _MAP_NORESERVE,
                -1 if fd is None else fd,
            )
        except DriverError:
            _munmap(start, reserved)
            raise
        end = self.address + self.mapped_bytes
        _munmap(start, self.address - start)
        _munmap(end, start + reserved - end)
        self.fd: int | None = None
        weakref.finalize(self, _munmap, self.address, self.mapped_bytes).atexit = False

    def contains(self, address: int, num_bytes: int) -> bool:
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


# every mapping of this process by its start, so that PEs that are threads hand each other the same pages
_live: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()
_live_lock = threading.Lock()


class CpuDriver:
    """`Driver` for CPU memory. `shared`: other processes can import it, not only this one."""

    name = "cpu"
    device_index = 0
    pci_address = ""
    # s_memrealtime of the emulated device
    ticks_per_second = 100_000_000

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self._owned: dict[int, _Mapping] = {}
        self._imported: dict[int, tuple[_Mapping, int]] = {}

    def set_current(self) -> None:
        """There is one CPU."""

    def alloc(
        self,
        num_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.CACHED,
        alignment: int = 4096,
        exportable: bool = False,
    ) -> int:
        """Zeroed memory; `kind` makes no difference here: processors keep their caches coherent."""
        if num_bytes <= 0:
            raise ArgumentError(f"num_bytes: want a positive size, got {num_bytes}")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment: want a power of two, got {alignment}")
        if exportable and self.shared:
            fd = os.memfd_create("mori_triton_heap", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, -(-num_bytes // _PAGE) * _PAGE)
                mapping = _Mapping(num_bytes, alignment, fd)
            except (OSError, DriverError) as error:
                os.close(fd)
                raise DriverError(f"allocating {num_bytes} bytes of shared memory: {error}") from error
            mapping.fd = fd
        else:
            mapping = _Mapping(num_bytes, alignment, None)
        with _live_lock:
            _live[mapping.address] = mapping
        self._owned[mapping.address] = mapping
        return mapping.address

    def free(self, address: int) -> None:
        mapping = self._owned.pop(address, None)
        if mapping is None:
            raise DriverError(f"free of {address:#x}: not an allocation of this driver")
        self._close_fd(mapping)

    def allocations(self) -> list[tuple[int, int]]:
        """(address, bytes) of all that is allocated now. From any thread."""
        return [(mapping.address, mapping.num_bytes) for mapping in list(self._owned.values())]

    def export_handle(self, address: int) -> bytes:
        mapping = next((owned for owned in self._owned.values() if owned.contains(address, 1)), None)
        if mapping is None:
            raise DriverError(f"export of {address:#x}: not an allocation of this driver")
        handle: dict[str, Any] = {
            "process": process_identity(),
            "pid": os.getpid(),
            "address": mapping.address,
            "offset": address - mapping.address,
            "bytes": mapping.num_bytes,
            "alignment": mapping.alignment,
        }
        if mapping.fd is not None:
            handle |= {
                "fd": mapping.fd,
                "inode": os.fstat(mapping.fd).st_ino,
                "namespace": os.readlink("/proc/self/ns/pid"),
            }
        return json.dumps(handle).encode()

    def end_export(self, address: int) -> None:
        if address in self._owned:
            self._close_fd(self._owned[address])

    def import_handle(self, handle: bytes) -> int:
        fields = json.loads(handle)
        if fields["process"] == process_identity():
            with _live_lock:
                mapping = _live.get(fields["address"])
            if mapping is None:
                raise DriverError(f"import of {fields['address']:#x}: its owner in this process has freed it")
        else:
            mapping = self._map_foreign(fields)
        address = mapping.address + fields["offset"]
        known, count = self._imported.get(address, (mapping, 0))
        self._imported[address] = (known, count + 1)
        return address

    def close_import(self, address: int) -> None:
        if address not in self._imported:
            raise DriverError(f"close of {address:#x}: not imported by this driver")
        mapping, count = self._imported.pop(address)
        if count > 1:
            self._imported[address] = (mapping, count - 1)

    def map_host(self, address: int, num_bytes: int, *, registers: bool = False) -> int:
        return address

    def unmap_host(self, address: int) -> None:
        pass

    def export_dma_buf(self, address: int, num_bytes: int) -> int | None:
        return None

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        ctypes.memmove(dst, src, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def memset(self, address: int, value: int, num_bytes: int) -> None:
        ctypes.memset(address, value, num_bytes)

    def module_global(self, module: Any, name: str) -> tuple[int, int]:
        """`module` is what the emulator hands Triton as a module handle: it has `symbol_address(name)`."""
        find = getattr(module, "symbol_address", None)
        if find is None:
            raise ArgumentError(f"module: want a module loaded by the emulated device, got {type(module).__name__}")
        try:
            return find(name)
        except (LookupError, AttributeError, ValueError) as error:
            raise DriverError(f"module has no global variable {name!r}: {error}") from error

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
        # the tensor's storage holds the buffer, and so the pages: a tensor that outlives its heap is stale, not a crash
        buffer.mapping = self._mapping(address, num_bytes)  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)

    def host_view(self, address: int, num_bytes: int) -> memoryview:
        buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
        buffer.mapping = self._mapping(address, num_bytes)  # type: ignore[attr-defined]
        return memoryview(buffer).cast("B")

    # launches on the emulated device return when the kernel has ended: every stream is empty, every event has come

    def synchronize(self) -> None:
        pass

    def stream_synchronize(self, stream: int) -> None:
        pass

    def create_stream(self) -> int:
        return 0

    def destroy_stream(self, stream: int) -> None:
        pass

    def create_event(self) -> int:
        return 0

    def destroy_event(self, event: int) -> None:
        pass

    def record_event(self, event: int, stream: int) -> None:
        pass

    def wait_event(self, stream: int, event: int) -> None:
        pass

    def begin_capture(self, stream: int) -> None:
        raise DriverError("the emulated device runs a launch at once; it records no graphs")

    def end_capture(self, stream: int) -> int:
        raise DriverError("the emulated device records no graphs")

    def capture_id(self, stream: int) -> int:
        return 0

    def launch_graph(self, graph: int, stream: int) -> None:
        raise DriverError("the emulated device records no graphs")

    def destroy_graph(self, graph: int) -> None:
        raise DriverError("the emulated device records no graphs")

    def close(self) -> None:
        for mapping in self._owned.values():
            self._close_fd(mapping)
        self._owned.clear()
        self._imported.clear()

    def _mapping(self, address: int, num_bytes: int) -> _Mapping:
        for mapping in [*self._owned.values(), *(mapping for mapping, _ in self._imported.values())]:
            if mapping.contains(address, num_bytes):
                return mapping
        raise DriverError(f"{num_bytes} bytes at {address:#x} are not inside one allocation of this driver")

    def _map_foreign(self, fields: dict[str, Any]) -> _Mapping:
        pid, what = fields["pid"], f"mapping {fields['bytes']} bytes of process {fields['pid']}"
        if "fd" not in fields:
            raise DriverError(f"{what}: that process did not ask for shared memory (`CpuDriver(shared=True)`)")
        if fields["namespace"] != os.readlink("/proc/self/ns/pid"):
            raise DriverError(f"{what}: it runs in another container (PID namespace), so its memory cannot be opened")
        try:
            fd = os.open(f"/proc/{pid}/fd/{fields['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DriverError(f"{what}: {error.strerror}; it has ended, or belongs to another user") from error
        try:
            if os.fstat(fd).st_ino != fields["inode"]:
                raise DriverError(f"{what}: its handle is out of date")
            return _Mapping(fields["bytes"], fields["alignment"], fd)
        finally:
            os.close(fd)

    @staticmethod
    def _close_fd(mapping: _Mapping) -> None:
        if mapping.fd is not None:
            os.close(mapping.fd)
            mapping.fd = None
