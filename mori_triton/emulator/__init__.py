"""The emulated AMD device: Triton's code for gfx942, gfx950, gfx1201 and gfx1250 runs on the CPU. See docs/emulator.md.

from mori_triton import emulator
emulator.activate("gfx1201")        # from now on kernel[grid](cpu_tensors) runs here
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mori_triton.emulator import device as _devices

if TYPE_CHECKING:
    from mori_triton.emulator.driver import EmulatedDriver

__all__ = ["activate", "allow", "current_device", "disallow", "set_device"]


def activate(arch: str = "gfx1201") -> EmulatedDriver:
    """Let `kernel[grid](cpu_tensors)` run on an emulated GPU from now on; `.deactivate()` of the result undoes it.

    Raises: `ArgumentError` for an architecture that is not emulated, `StateError` under `TRITON_INTERPRET=1`.
    """
    from mori_triton.emulator import driver

    return driver.activate(arch)


def set_device(number: int | None) -> None:
    """Make a device the calling thread's current one; None: back to the default."""
    from mori_triton.emulator import driver

    driver.set_device(number)


def current_device() -> int:
    """Number of the calling thread's device. Raises `StateError` when there is none."""
    from mori_triton.emulator import driver

    return driver.current_device().number


def allow(device: int, address: int, num_bytes: int, name: str) -> None:
    """Let kernels of `device` touch `[address, address + num_bytes)` besides their arguments; reports say `name`."""
    _devices.device(device).allow(address, num_bytes, name)


def disallow(device: int, address: int) -> None:
    """Take back an `allow` that started at `address`. Raises `StateError` when there is none."""
    _devices.device(device).disallow(address)
