"""Devices of the emulator: numbers, which memory their kernels may touch, and which one a thread uses."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mori_triton.errors import ArgumentError, StateError, require

if TYPE_CHECKING:
    from mori_triton.emulator.ledger import LaunchCounts
    from mori_triton.emulator.module import Module

# GPUs whose code the emulated device runs: wave width, bytes of LDS a workgroup may have
ARCHS = {"gfx942": (64, 65536), "gfx950": (64, 163840), "gfx1201": (32, 65536), "gfx1250": (32, 327680)}


@dataclass
class Device:
    """One emulated GPU. Its number is what Triton keys loaded kernels by, so it never changes its architecture."""

    number: int
    arch: str
    slot: int
    label: str = ""  # "PE 2" while it belongs to a world
    modules: list[Module] = field(default_factory=list, repr=False)
    in_use: bool = False
    # counters for a launch of the kernel of this name, None: nothing is counted
    ledger: Callable[[str], LaunchCounts] | None = None

    def __post_init__(self) -> None:
        self.warp_size, self.max_shared = ARCHS[self.arch]
        self.lock = threading.Lock()
        self._ranges: dict[int, tuple[int, str]] = {}
        self._globals: dict[str, bytes] = {}
        # [(low, high, name)] by address; replaced, never changed, so that a launch may keep it
        self.ranges: list[tuple[int, int, str]] = []

    @property
    def who(self) -> str:
        """How reports call it."""
        return self.label or f"device {self.number} ({self.arch})"

    def allow(self, address: int, num_bytes: int, name: str) -> None:
        """Let kernels touch `[address, address + num_bytes)`, called `name` in reports."""
        require(num_bytes > 0, "num_bytes", "more than 0", num_bytes)
        with self.lock:
            self._ranges[address] = (address + num_bytes, name)
            self.ranges = sorted((low, high, name) for low, (high, name) in self._ranges.items())

    def disallow(self, address: int) -> None:
        """Take back an `allow`. Raises `StateError` when nothing was allowed at this address."""
        with self.lock:
            if self._ranges.pop(address, None) is None:
                raise StateError(f"no memory was allowed at {address:#x} on {self.who}")
            self.ranges = sorted((low, high, name) for low, (high, name) in self._ranges.items())

    def set_global(self, name: str, value: bytes) -> None:
        """Write a module-level variable of every kernel that has it: those loaded on this device and those to come."""
        with self.lock:
            self._globals[name] = value
            for module in self.modules:
                module.write(name, value)

    def add(self, module: Module) -> None:
        """A kernel has been loaded."""
        with self.lock:
            self.modules.append(module)
            for name, value in self._globals.items():
                module.write(name, value)

    def remove(self, module: Module) -> None:
        """A kernel has been unloaded."""
        with self.lock:
            if module in self.modules:
                self.modules.remove(module)


# Triton keys what it has compiled by device number: those of real GPUs must not be taken
FIRST_NUMBER = 4096

_devices: list[Device] = []
_by_slot: dict[tuple[str, int], Device] = {}
_lock = threading.Lock()


def _get(arch: str, slot: int) -> Device:
    device = _by_slot.get((arch, slot))
    if device is None:
        device = Device(FIRST_NUMBER + len(_devices), arch, slot)
        _devices.append(device)
        _by_slot[arch, slot] = device
    return device


def check_arch(arch: str) -> None:
    """Raise `ArgumentError` for an architecture that cannot be emulated."""
    require(arch in ARCHS, "arch", " or ".join(ARCHS), repr(arch))


def default_device(arch: str) -> Device:
    """The device that threads outside of any world use."""
    check_arch(arch)
    with _lock:
        return _get(arch, 0)


def acquire(arch: str, n: int) -> list[Device]:
    """`n` devices that nobody else uses; slot 0 stays the default device's. Give them back with `release`."""
    check_arch(arch)
    with _lock:
        found: list[Device] = []
        slot = 1
        while len(found) < n:
            device = _get(arch, slot)
            if not device.in_use:
                device.in_use = True
                found.append(device)
            slot += 1
        return found


def release(devices: list[Device]) -> None:
    """Give devices back; what was allowed on them is forgotten."""
    with _lock:
        for device in devices:
            device.label, device._ranges, device.ranges, device.in_use = "", {}, [], False
            device._globals, device.ledger = {}, None


def device(number: int) -> Device:
    """The device with this number. Raises `ArgumentError`."""
    if not 0 <= number - FIRST_NUMBER < len(_devices):
        known = f"{FIRST_NUMBER} to {FIRST_NUMBER + len(_devices) - 1}" if _devices else "none yet"
        raise ArgumentError(f"device: want the number of an emulated device ({known}), got {number}")
    return _devices[number - FIRST_NUMBER]


def nearest(ranges: list[tuple[int, int, str]], address: int) -> str:
    """Which of `ranges` (by address) an address lies nearest to, in words."""
    if not ranges:
        return "nothing is allocated"
    at = bisect.bisect_right(ranges, (address, 1 << 64, ""))
    best = min(ranges[max(at - 1, 0) : at + 1], key=lambda r: max(r[0] - address, address - r[1] + 1, 0))
    low, high, name = best
    span = f"{name} [{low:#x}, {high:#x})"
    if low <= address < high:
        return f"the access starts {high - address} bytes before the end of {span}"
    if address < (low - address if address < low else address - high):
        return (
            f"a null pointer + {address} bytes: remote_ptr gives null for memory that is not on the symmetric heap, "
            "and for a PE that cannot be reached"
        )
    if address < low:
        return f"nearest: {low - address} bytes before {span}"
    return f"nearest: {address - high} bytes past the end of {span}"
