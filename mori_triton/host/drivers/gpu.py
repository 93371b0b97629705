"""What drivers of GPUs have in common: libcuda and libamdhip64 offer the same things under different names.

A subclass brings the device (`Gpu`: library, structs, how to make it current) and the calls whose arguments differ; the
tables of both libraries use the same keys. Memory that other processes map comes in two ways, by the world's heap mode:
`static_heap` exports a plain allocation (IPC), `vmm` makes memory apart from its address and hands over a descriptor.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mori_triton.errors import ArgumentError, DriverError, StateError, require
from mori_triton.host.drivers import dlpack, lending, mappings
from mori_triton.host.drivers.allocation import Allocation
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.descriptors import DescriptorServer, receive_descriptor
from mori_triton.host.drivers.gpu_streams import GpuStreams
from mori_triton.host.drivers.identity import process_identity
from mori_triton.host.drivers.library import Library

if TYPE_CHECKING:
    import torch

HEAP_MODES = ("static_heap", "vmm")
# what exportable memory is rounded up to: libraries put smaller allocations together in blocks of this size, and a
# handle stands for the whole block
EXPORT_GRANULE = 2 << 20

# exportable memory of this process by a number that is given once, so that PEs that are threads find each other's
_live: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
_live_lock = threading.Lock()
_numbers = itertools.count(1)


class Gpu:
    """A device of this process. Held by everything that has to be given back to it."""

    name: str
    api: Any  # the module with the library's structs and constants
    device: int  # what the library calls it by

    def __init__(self, library: Library, index: int) -> None:
        self.library, self.index = library, index

    def __str__(self) -> str:
        return f"{self.name}:{self.index}"

    def current(self) -> AbstractContextManager[None]:
        """In the block this is the calling thread's device, after it the one that was."""
        raise NotImplementedError

    def set_current(self) -> None:
        """Make it the calling thread's device."""
        raise NotImplementedError

    def mapping_type(self, kind: MemoryKind) -> int:
        """The library's type of memory for a mapping of this kind."""
        return self.api.MEM_ALLOCATION_TYPE_PINNED

    @contextmanager
    def descriptor_argument(self, descriptor: int) -> Iterator[int]:
        """How the library wants to be given a file descriptor to import: by its number."""
        yield descriptor

    def call(self, key: str, *args: Any, about: str = "") -> None:
        """`Library.call` with this device current; errors say for which device."""
        with self.current():
            self.library.call(key, *args, about=f"{about} on {self}" if about else str(self))

    def output(self, key: str, kind: Any, *args: Any, about: str = "") -> int:
        """`call` of a function that stores a `kind` through its first argument; what it stored."""
        out = kind()
        self.call(key, ctypes.byref(out), *args, about=about)
        return out.value or 0


# "0000:18:00.0", a domain of more digits, and the zero byte
_PCI_TEXT_BYTES = 32


class GpuDriver(GpuStreams):
    """`Driver` for one GPU. `heap_mode`: how exportable memory is made, one of `HEAP_MODES`."""

    name: str
    ticks_per_second: int
    dlpack_device: int

    def __init__(self, gpu: Gpu, heap_mode: str) -> None:
        require(heap_mode in HEAP_MODES, "heap_mode", " or ".join(HEAP_MODES), repr(heap_mode))
        self.device_index, self.heap_mode = gpu.index, heap_mode
        self._open_gpu: Gpu | None = gpu
        self._owned: dict[int, Allocation] = {}
        self._imported: dict[int, tuple[Allocation, int]] = {}
        self._servers: dict[int, DescriptorServer] = {}
        self._lent: dict[int, Allocation] = {}
        # errors of giving memory back, until somebody can be told
        self._failures: list[DriverError] = []

    @property
    def _gpu(self) -> Gpu:
        if self._open_gpu is None:
            raise StateError(f"the driver of {self.name}:{self.device_index} is closed")
        return self._open_gpu

    def set_current(self) -> None:
        self._gpu.set_current()

    # memory

    def alloc(
        self,
        num_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.CACHED,
        alignment: int = 4096,
        exportable: bool = False,
    ) -> int:
        """Zeroed memory. The alignment is the library's own: at least 256 bytes, usually 2 MiB from that size on."""
        if num_bytes <= 0:
            raise ArgumentError(f"num_bytes: want a positive size, got {num_bytes}")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment: want a power of two, got {alignment}")
        if kind is MemoryKind.FINE_GRAINED:
            allocation = self._hold(self._alloc_host(num_bytes), num_bytes, "host_free")
            ctypes.memset(allocation.address, 0, num_bytes)
        else:
            if exportable and self.heap_mode == "vmm":
                allocation = self._hold_mapping(mappings.create(self._gpu, num_bytes, self._gpu.mapping_type(kind)))
            else:
                extent = -(-num_bytes // EXPORT_GRANULE) * EXPORT_GRANULE if exportable else num_bytes
                allocation = self._hold(self._alloc_device(extent, kind), extent, "mem_free")
            self.memset(allocation.address, 0, num_bytes)
        if exportable:
            allocation.number = next(_numbers)
            with _live_lock:
                _live[allocation.number] = allocation
        self._owned[allocation.address] = allocation
        return allocation.address

    def _hold(self, address: int, num_bytes: int, release: str) -> Allocation:
        give_back = partial(self._gpu.call, release, address, about=f"{address:#x}")
        allocation = Allocation(address, num_bytes, give_back, self._failures, device_index=self.device_index)
        allocation.on_host = release == "host_free"
        return allocation

    def _hold_mapping(self, mapping: mappings.Mapping) -> Allocation:
        give_back = partial(mappings.destroy, self._gpu, mapping)
        return Allocation(
            mapping.address,
            mapping.num_bytes,
            give_back,
            self._failures,
            handle=mapping.handle,
            device_index=self.device_index,
        )

    def _alloc_device(self, num_bytes: int, kind: MemoryKind) -> int:
        raise NotImplementedError

    def _alloc_host(self, num_bytes: int) -> int:
        raise NotImplementedError

    def free(self, address: int) -> None:
        if self._owned.pop(address, None) is None:
            raise DriverError(f"free of {address:#x}: not an allocation of this driver")
        self.end_export(address)
        self._tell_failures()

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        stream = self._current_stream()
        self._copy_on(stream, dst, src, num_bytes)
        self.stream_synchronize(stream)

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self.copy(address, ctypes.addressof(source), len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(num_bytes)
        self.copy(ctypes.addressof(target), address, num_bytes)
        return target.raw

    def memset(self, address: int, value: int, num_bytes: int) -> None:
        require(0 <= value < 256, "value", "0 to 255", value)
        stream = self._current_stream()
        self._gpu.call("memset", address, value, num_bytes, stream, about=f"{num_bytes} bytes at {address:#x}")
        self.stream_synchronize(stream)

    def _copy_on(self, stream: int, dst: int, src: int, num_bytes: int) -> None:
        raise NotImplementedError

    def _current_stream(self) -> int:
        """The calling thread's stream of this device in torch; torch not at work: the default stream."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return torch.cuda.current_stream(self.device_index).cuda_stream

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=torch.device("cuda", self.device_index))
        holder = self._allocation(address, num_bytes)
        torch.cuda.init()
        return dlpack.tensor(
            address, shape, dtype, device_type=self.dlpack_device, device_index=self.device_index, holder=holder
        )

    def host_view(self, address: int, num_bytes: int) -> memoryview:
        buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
        # the view holds the buffer, and so the memory
        buffer.allocation = self._allocation(address, num_bytes)  # type: ignore[attr-defined]
        return memoryview(buffer).cast("B")

    def _allocation(self, address: int, num_bytes: int) -> Allocation:
        for allocation in [*self._owned.values(), *(held for held, _ in self._imported.values())]:
            if allocation.contains(address, num_bytes):
                return allocation
        raise DriverError(f"{num_bytes} bytes at {address:#x} are not inside one allocation of this driver")

    # memory of peers

    def export_handle(self, address: int) -> bytes:
        owner = next((held for held in self._owned.values() if held.contains(address)), None)
        if owner is None:
            raise DriverError(f"export of {address:#x}: not an allocation of this driver")
        if not owner.number:
            raise DriverError(f"export of {address:#x}: it was not allocated as exportable")
        handle: dict[str, Any] = {
            "process": process_identity(),
            "device": self.name,
            "number": owner.number,
            "bytes": owner.num_bytes,
            "offset": address - owner.address,
        }
        try:
            handle |= self._export(owner)
        except DriverError as error:
            # threads of this process do without
            handle["error"] = str(error)
        return json.dumps(handle).encode()

    def _export(self, owner: Allocation) -> dict[str, Any]:
        """What another process needs in order to map an allocation."""
        if owner.on_host:
            raise DriverError("pinned host memory is for PEs of one process")
        if owner.handle:
            if owner.address not in self._servers:
                self._servers[owner.address] = DescriptorServer(mappings.export(self._gpu, owner.handle))
            return {"socket": self._servers[owner.address].name}
        handle = self._gpu.api.IpcMemHandle()
        about = f"{owner.num_bytes} bytes at {owner.address:#x}"
        self._gpu.call("ipc_get", ctypes.byref(handle), owner.address, about=about)
        return {"ipc": bytes(handle).hex()}

    def end_export(self, address: int) -> None:
        """As `Driver.end_export`, by the allocation's address. IPC handles stay good as long as the memory does."""
        server = self._servers.pop(address, None)
        if server is not None:
            server.close()

    def import_handle(self, handle: bytes) -> int:
        fields = json.loads(handle)
        if fields["device"] != self.name:
            raise DriverError(
                f"import of memory of a {fields['device']} device by {self._gpu}: the PEs' devices differ"
            )
        if fields["process"] == process_identity():
            with _live_lock:
                allocation = _live.get(fields["number"])
            if allocation is None:
                raise DriverError(f"import of {fields['bytes']} bytes: their owner in this process has freed them")
            # pinned host memory is every device's
            if allocation.device_index != self.device_index and not allocation.on_host:
                self._reach(allocation)
        else:
            allocation = self._import(fields)
        # each handle opened is to be closed; what one address stands for is counted here, whatever the library does
        address = allocation.address + fields["offset"]
        known, count = self._imported.get(address, (allocation, 0))
        self._imported[address] = (known, count + 1)
        return address

    def _import(self, fields: dict[str, Any]) -> Allocation:
        """Map memory of another process."""
        if "error" in fields:
            raise DriverError(f"memory of another process: it could not export it: {fields['error']}")
        if "socket" in fields:
            descriptor = receive_descriptor(fields["socket"])
            try:
                return self._hold_mapping(mappings.import_(self._gpu, descriptor, fields["bytes"]))
            finally:
                os.close(descriptor)
        api = self._gpu.api
        handle = api.IpcMemHandle.from_buffer_copy(bytes.fromhex(fields["ipc"]))
        address = self._gpu.output(
            "ipc_open",
            api.DevicePointer,
            handle,
            api.IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            about=f"{fields['bytes']} bytes of another process",
        )
        return self._hold(address, fields["bytes"], "ipc_close")

    def _reach(self, allocation: Allocation) -> None:
        """Let this device load from and store to memory of another device of this process."""
        if allocation.handle:
            mappings.allow(self._gpu, allocation.address, allocation.num_bytes)
        else:
            self._reach_device(allocation.device_index)

    def _reach_device(self, index: int) -> None:
        """Let this device load from and store to all plain allocations of another device."""
        raise NotImplementedError

    def close_import(self, address: int) -> None:
        if address not in self._imported:
            raise DriverError(f"close of {address:#x}: not imported by this driver")
        allocation, count = self._imported.pop(address)
        if count > 1:
            self._imported[address] = (allocation, count - 1)
        del allocation
        self._tell_failures()

    # memory that is lent

    def map_host(self, address: int, num_bytes: int, *, registers: bool = False) -> int:
        self._lent[address] = lending.map_host(self._gpu, address, num_bytes, registers, self._failures)
        return self._lent[address].address

    def unmap_host(self, address: int) -> None:
        if self._lent.pop(address, None) is None:
            raise DriverError(f"unmap of {address:#x}: not mapped for {self.name}:{self.device_index}")
        self._tell_failures()

    def export_dma_buf(self, address: int, num_bytes: int) -> int | None:
        owner = self._allocation(address, num_bytes)
        return None if owner.on_host else lending.export_dma_buf(self._gpu, owner, address, num_bytes)

    # other

    @property
    def pci_address(self) -> str:
        """Where the GPU is on PCI, as in sysfs: "0000:18:00.0"."""
        text = ctypes.create_string_buffer(_PCI_TEXT_BYTES)
        self._gpu.call("pci_bus_id", text, _PCI_TEXT_BYTES, self._gpu.device)
        return text.value.decode().lower()

    def module_global(self, module: Any, name: str) -> tuple[int, int]:
        """`module` is the number that Triton keeps as `CompiledKernel.module`."""
        if not isinstance(module, int):
            raise ArgumentError(f"module: want the handle of a loaded module, an int, got {type(module).__name__}")
        size = ctypes.c_size_t()
        address = self._gpu.output(
            "module_global",
            self._gpu.api.DevicePointer,
            ctypes.byref(size),
            module,
            name.encode(),
            about=f"global variable {name!r}",
        )
        return address, size.value

    def close(self) -> None:
        """As `Driver.close`; raises the first error of giving something back, after the rest has been."""
        for address in list(self._servers):
            self.end_export(address)
        self._owned.clear()
        self._imported.clear()
        self._lent.clear()
        self._open_gpu = None
        self._tell_failures()

    def _tell_failures(self) -> None:
        if self._failures:
            first = self._failures[0]
            self._failures.clear()
            raise first
