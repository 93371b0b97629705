"""What the host layer asks of a device: one protocol, one implementation for each of `cpu`, `cuda` and `hip`.

Addresses are ints: what a kernel on that device loads from and stores to. Nothing here is collective.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class MemoryKind(enum.Enum):
    """How the device may cache an allocation that other devices write."""

    CACHED = "cached"
    UNCACHED = "uncached"
    FINE_GRAINED = "fine_grained"


class Driver(Protocol):
    """A device of this process. Every method raises `DriverError` with the system's own text when it fails."""

    name: str  # "cpu", "cuda", "hip"
    ticks_per_second: int  # of the clock that bitcode waits read

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
        """Give back what `alloc` returned. Tensors made by `tensor` keep it alive where the driver can arrange that."""
        ...

    def export_handle(self, address: int) -> bytes:
        """A handle that another process on this node (or this one) can import, for an exportable allocation."""
        ...

    def end_export(self, address: int) -> None:
        """Every peer has imported it: from here on nobody else can, and nothing outlives the processes that did."""
        ...

    def import_handle(self, handle: bytes) -> int:
        """Map a peer's allocation; the address at which this device sees it."""
        ...

    def close_import(self, address: int) -> None:
        """Undo `import_handle`."""
        ...

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy between any two addresses this device can reach, own or a peer's. Ordered before the return."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Host to device. Ordered before the return."""
        ...

    def read(self, address: int, num_bytes: int) -> bytes:
        """Device to host."""
        ...

    def memset(self, address: int, value: int, num_bytes: int) -> None:
        """Set bytes to `value`, 0 to 255. Ordered before the return."""
        ...

    def module_global(self, module: Any, name: str) -> tuple[int, int]:
        """Address and size in bytes of a global variable of a loaded module (what Triton calls its module handle)."""
        ...

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over memory of this device, without a copy."""
        ...

    def synchronize(self) -> None:
        """Wait for everything launched on this device."""
        ...

    def close(self) -> None:
        """Give back what is still allocated or imported. Idempotent."""
        ...
