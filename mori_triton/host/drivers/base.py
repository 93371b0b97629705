"""What the host layer asks of a device: one protocol, one implementation for each of `cpu`, `cuda` and `hip`.

Addresses are ints: what a kernel on that device loads from and stores to. So are streams (0: the default stream, else
what `torch.cuda.Stream.cuda_stream` is), events and graphs. Nothing here is collective, and every method may be called
from any thread; which device is the calling thread's current one is left as it was, except by `set_current`.

`copy`, `write`, `read` and `memset` come after what the calling thread has put on its current torch stream, and are
done when they return. They wait for that stream only, so they are not for the time when it is being captured.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class MemoryKind(enum.Enum):
    """How the device may cache an allocation that others write or read.

    CACHED and UNCACHED are memory of the device. FINE_GRAINED is memory that host and device see at once, also while a
    kernel runs (`host_view`): for words, and for data where a thread of the host stands in for a network card. It
    can be exported to PEs of the same process only.
    """

    CACHED = "cached"
    UNCACHED = "uncached"
    FINE_GRAINED = "fine_grained"


class Driver(Protocol):
    """A device of this process. Every method raises `DriverError` with the system's own text when it fails."""

    name: str  # "cpu", "cuda", "hip"
    device_index: int  # which of them, by torch's count; 0 on the CPU
    ticks_per_second: int  # of the clock that bitcode waits read

    @property
    def pci_address(self) -> str:
        """Where the device is on PCI, as in sysfs: "0000:18:00.0"; "" if it is not."""
        ...

    def set_current(self) -> None:
        """Make this device the current one of the calling thread."""
        ...

    # memory

    def alloc(
        self,
        num_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.CACHED,
        alignment: int = 4096,
        exportable: bool = False,
    ) -> int:
        """Address of zeroed memory. `alignment`: a power of two; a driver that cannot meet it returns what it has."""
        ...

    def free(self, address: int) -> None:
        """Give back what `alloc` returned. Tensors and host views made of it keep its memory until they are gone."""
        ...

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy between any two addresses this device can reach, own or a peer's."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Host to device."""
        ...

    def read(self, address: int, num_bytes: int) -> bytes:
        """Device to host."""
        ...

    def memset(self, address: int, value: int, num_bytes: int) -> None:
        """Set bytes to `value`, 0 to 255."""
        ...

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on this device over memory that this driver allocated or imported, without a copy."""
        ...

    def host_view(self, address: int, num_bytes: int) -> memoryview:
        """FINE_GRAINED memory as the host sees it: reading it waits for nobody and needs no current device."""
        ...

    # memory of peers

    def export_handle(self, address: int) -> bytes:
        """A handle that another process on this node (or this one) can import: an exportable allocation, or an address
        inside one, which the handle then stands for.
        """
        ...

    def end_export(self, address: int) -> None:
        """Every peer has imported it: from here on nobody else need be able to. Idempotent."""
        ...

    def import_handle(self, handle: bytes) -> int:
        """Map a peer's allocation; the address at which this device sees it: the owner's own in the owner's process."""
        ...

    def close_import(self, address: int) -> None:
        """Undo one `import_handle`."""
        ...

    # memory that devices lend each other

    def map_host(self, address: int, num_bytes: int, *, registers: bool = False) -> int:
        """Where this device sees whole pages of this process that are not of this driver, each to be mapped once.

        `registers`: they are those of another device.
        """
        ...

    def unmap_host(self, address: int) -> None:
        """Undo `map_host`, by the address that it was given."""
        ...

    def export_dma_buf(self, address: int, num_bytes: int) -> int | None:
        """A file descriptor by which RDMA devices reach memory of this driver, an allocation that begins at `address`;
        the caller closes it. None: there is none, such as for memory of the host, or for a part of an allocation.
        """
        ...

    # order

    def synchronize(self) -> None:
        """Wait for everything launched on this device, by any thread."""
        ...

    def stream_synchronize(self, stream: int) -> None:
        """Wait for what has been put on one stream."""
        ...

    def create_stream(self) -> int:
        """A stream that the default stream does not wait for. The caller destroys it."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int:
        """An event without a time stamp. The caller destroys it."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None:
        """The event stands for what is on the stream now."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """What is put on the stream from now on waits for the event."""
        ...

    def begin_capture(self, stream: int) -> None:
        """Launches on the stream by the calling thread are recorded from now on, and not run."""
        ...

    def end_capture(self, stream: int) -> int:
        """The recorded launches as a graph that can be launched. The caller destroys it."""
        ...

    def capture_id(self, stream: int) -> int:
        """What tells the graph that the stream is captured into from every other of this process; 0: not captured."""
        ...

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...

    # other

    def module_global(self, module: Any, name: str) -> tuple[int, int]:
        """Address and size in bytes of a global variable of a loaded module (what Triton calls its module handle)."""
        ...

    def close(self) -> None:
        """Give back what is still allocated or imported. Idempotent."""
        ...
