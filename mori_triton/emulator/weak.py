"""Weak-memory mode: stores reach other workgroups and devices late, and loads that could see an old value are reported.

The model is C++ (hip_src/emulator/weak.h), the rules are in docs/emulator.md. One `WeakMemory` belongs to one machine:
all PEs in one process, exactly one thread at a time. It draws from its own seed, so a run repeats.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mori_triton.emulator import jit, runtime
from mori_triton.errors import KernelFault, WeakMemoryError, require

if TYPE_CHECKING:
    from mori_triton.emulator.launch import Launch
    from mori_triton.emulator.module import Code

MAX_DEVICES, MAX_RACES, MAX_STARVED = 64, 64, 32
_PAGE_BYTES, _VERSION_BYTES = 8192, 80
AGENT_RELEASE, SYSTEM_RELEASE, SYSTEM_ACQUIRE, AGENT_ACQUIRE, SYSTEM_LOAD = 1, 2, 4, 8, 16


def _words(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_uint64) for name in names.split()]


class Race(ctypes.Structure):
    """`Race` of weak_state.h: one load and one store without the synchronisation between them that `missing` names."""

    _fields_ = [
        *_words("address count"),
        *[
            (f"{who}_{what}", ctypes.c_uint32)
            for who in ("load", "store")
            for what in ("launch", "pc", "group", "wave")
        ],
        ("missing", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    ]


class _System(ctypes.Structure):
    """`WeakSystem` of weak_state.h."""

    _fields_ = [
        *_words(
            "now rng pool pool_size pool_used pool_free arena_start arena arena_end table table_mask num_pages groups"
        ),
        *_words("free_groups num_groups launches pending floors_at num_devices num_races lost_races last_page"),
        *(
            (name, ctypes.c_uint64 * MAX_DEVICES)
            for name in ("acquired_system", "floor_agent", "floor_system", "lists")
        ),
        *_words("salt num_starved card_full"),
        ("races", Race * MAX_RACES),
        ("starved", Race * MAX_STARVED),
    ]


class _Launch(ctypes.Structure):
    """`WeakLaunch` of weak_state.h: a launch, or a network card."""

    _fields_ = [
        *_words("system device number acquire_per_wave release_per_wave wait_releases homes num_homes groups"),
        *_words("num_groups started ended previous next acquired acquired_system unreleased home"),
    ]


@functools.cache
def _function(name: str, *arguments: type) -> Callable[..., None]:
    runtime.ensure()
    return ctypes.CFUNCTYPE(None, *arguments)(jit.address(f"mori_emu_weak_{name}"))


class WeakMemory:
    """The caches and memories of all devices of one seeded machine.

    seed: decides when stores arrive and what racing loads return. num_devices: PEs. arena_bytes: host memory for stores
    on their way, committed as it is used; a launch that needs more faults.
    """

    def __init__(self, seed: int, num_devices: int, arena_bytes: int = 1 << 30) -> None:
        require(1 <= num_devices <= MAX_DEVICES, "num_devices", f"1 to {MAX_DEVICES}", num_devices)
        require(arena_bytes >= 1 << 20, "arena_bytes", "at least 1 MiB", arena_bytes)
        self._arena = np.zeros(arena_bytes // 2 + _PAGE_BYTES, np.uint8)
        self._pool = np.zeros(arena_bytes // 2, np.uint8)
        slots = 1 << (arena_bytes // _PAGE_BYTES).bit_length()
        self._table = np.zeros(slots, np.uint64)
        self._homes = np.zeros((0, 3), np.uint64)
        # launches and cards by number; a card has no code
        self._launches: list[tuple[_Launch, np.ndarray, Code | None, list]] = []
        self._cards: dict[int, _Launch] = {}
        start = -(-self._arena.ctypes.data // _PAGE_BYTES) * _PAGE_BYTES
        # xorshift needs a state that is not 0, and a first draw that differs for neighbouring seeds
        mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64) or 1
        self._system = _System(
            rng=mixed,
            pool=self._pool.ctypes.data,
            pool_size=len(self._pool) // _VERSION_BYTES,
            arena_start=start,
            arena=start,
            arena_end=start + arena_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES,
            table=self._table.ctypes.data,
            table_mask=slots - 1,
            num_devices=num_devices,
            # with every second seed nothing arrives by itself, only by releases
            salt=(mixed >> 20) << 1 | (seed & 1),
        )
        self._address = ctypes.addressof(self._system)
        _function("init", ctypes.c_void_p)(self._address)

    def set_home(self, address: int, num_bytes: int, device: int) -> None:
        """Say that memory belongs to a device: a PE, or a network card as `card` numbers it.

        That device's stores are in host memory when they reach the device, others' when they reach the system. Memory
        not named here belongs to the device that stores to it.
        """
        require(num_bytes > 0, "num_bytes", "more than 0", num_bytes)
        self.forget(address, num_bytes)
        row = np.array([[address, address + num_bytes, device]], np.uint64)
        homes = np.concatenate([self._homes, row])
        self._set_homes(homes[np.argsort(homes[:, 0], kind="stable")])

    def forget(self, address: int, num_bytes: int) -> None:
        """Drop what is on its way to this memory and its home. Call before memory that others may store to is freed."""
        low, high = address, address + num_bytes
        self._forget(low, high, (1 << 64) - 1)
        self._set_homes(self._homes[(self._homes[:, 1] <= low) | (self._homes[:, 0] >= high)])

    def _forget(self, low: int, high: int, device: int) -> None:
        u64 = ctypes.c_uint64
        _function("forget", ctypes.c_void_p, u64, u64, u64)(self._address, low, high, device)

    def _set_homes(self, homes: np.ndarray) -> None:
        self._homes = np.ascontiguousarray(homes)
        for record, *_ in self._launches:
            record.homes, record.num_homes = self._homes.ctypes.data, len(self._homes)

    def attach(self, launch: Launch, device: int) -> np.ndarray:
        """Run a launch in this memory: the WEAK word of each of its waves, uint64 `[workgroups * waves]`.

        device: the PE, below num_devices. The array must live until the launch has ended.
        """
        require(0 <= device < self._system.num_devices, "device", f"below {self._system.num_devices}", device)
        arch, directives = launch.module.code.arch, launch.module.code.directives
        gfx12 = arch.startswith("gfx12")
        groups = np.zeros(max(launch.num_groups, 1), np.uint64)
        record = _Launch(
            system=self._address,
            device=device,
            home=device,
            number=len(self._launches),
            acquire_per_wave=gfx12 and directives.get("workgroup_processor_mode") == "1",
            release_per_wave=1,
            wait_releases=arch == "gfx1201",
            homes=self._homes.ctypes.data,
            num_homes=len(self._homes),
            groups=groups.ctypes.data,
            num_groups=launch.num_groups,
        )
        ranges = [*(launch.device.ranges if launch.device else ()), *launch.named_ranges]
        self._launches.append((record, groups, launch.module.code, ranges))
        for low, high, _ in launch.named_ranges:
            # host memory that held another device's data before
            at = bisect.bisect_right(self._homes[:, 0].tolist(), low)
            if not at or low >= int(self._homes[at - 1, 1]):
                self._forget(low, high, device)
        return np.full(launch.num_groups * launch.num_waves, ctypes.addressof(record), np.uint64)

    def card(self, pe: int) -> int:
        """The device number of a PE's network card, for `set_home`: memory that only the system's level changes."""
        require(0 <= pe < self._system.num_devices, "pe", f"below {self._system.num_devices}", pe)
        return MAX_DEVICES + pe

    def dma(self, pe: int) -> tuple[int, int, int, int]:
        """A PE's network card as C calls it: `(context, read, write, atomic)`, addresses that live as long as this.

            void read(void *context, u64 address, u64 bytes, void *out);
            void write(void *context, u64 address, u64 bytes, const void *data);
            u64 atomic(void *context, u64 address, u32 operation, u64 value, u64 compare);

        `atomic` works on 8 bytes and returns the old value. operation: 0 add, 1 compare and swap.
        """
        record = self._cards.get(pe)
        if record is None:
            record = _Launch(
                system=self._address,
                device=self.card(pe),
                home=pe,
                number=len(self._launches),
                homes=self._homes.ctypes.data,
                num_homes=len(self._homes),
            )
            self._cards[pe] = record
            self._launches.append((record, np.zeros(0, np.uint64), None, []))
        read, write, atomic = (jit.address(f"mori_emu_weak_dma_{name}") for name in ("read", "write", "atomic"))
        return ctypes.addressof(record), read, write, atomic

    def pending(self) -> int:
        """Stores that have not arrived everywhere yet: memory may still change with nothing running."""
        return self._system.pending

    def drain(self) -> None:
        """Let every store on its way arrive now."""
        _function("drain", ctypes.c_void_p)(self._address)

    def starving(self) -> list[str]:
        """Polls that do not see a store on its way, one text each. With nothing else to happen, they never will."""
        return [self._describe(self._system.starved[i]) for i in range(self._system.num_starved)]

    def races(self) -> list[str]:
        """One text per pair of a load and a store that raced so far, oldest first."""
        texts = [self._describe(self._system.races[i]) for i in range(self._system.num_races)]
        if self._system.lost_races:
            texts.append(f"and at least {self._system.lost_races} more")
        return texts

    def raise_races(self) -> None:
        """Raise `WeakMemoryError` with every race so far, and forget them. `KernelFault`: a card's write was lost."""
        texts = self.races()
        self._system.num_races = self._system.lost_races = 0
        if self._system.card_full:
            raise KernelFault("weak-memory mode has no memory left for what network cards have written")
        if texts:
            raise WeakMemoryError("a load could see a stale value:\n" + "\n".join(texts))

    def _describe(self, race: Race) -> str:
        load, store = self._launches[race.load_launch], self._launches[race.store_launch]
        reader, writer = load[0].device, store[0].device

        def where(entry: tuple, group: int, wave: int, pc: int) -> str:
            record, _, code, _ = entry
            if code is None:
                return f"the network card of PE {record.home}"
            return f"{code.name} of PE {record.device}, workgroup {group}, wave {wave}, {code.instruction(pc)}"

        stored_by = f"wave {race.store_wave} of workgroup {race.store_group}"
        loaded_by = f"wave {race.load_wave} of workgroup {race.load_group}"
        since = "then" if store[2] is None else "that release"
        texts = {
            AGENT_RELEASE: f"a release of agent scope after the store that covers {stored_by}",
            SYSTEM_RELEASE: f"a release of system scope on PE {writer} after the store reached it",
            SYSTEM_ACQUIRE: f"an acquire of system scope on PE {reader} since {since}",
            AGENT_ACQUIRE: f"an acquire of agent scope by {loaded_by} since {since}",
            SYSTEM_LOAD: "system scope of the load itself",
        }
        reasons = [text for bit, text in texts.items() if race.missing & bit]
        times = f" ({race.count} times)" if race.count > 1 else ""
        # a card knows no names; one of the two is a kernel
        ranges = load[3] or store[3]
        return (
            f"{where(load, race.load_group, race.load_wave, race.load_pc)}{times}\n"
            f"  {'reads' if load[2] is None else 'loads'} {_name(ranges, race.address)}, stored by\n"
            f"  {where(store, race.store_group, race.store_wave, race.store_pc)}\n"
            f"  missing: {'; '.join(reasons)}"
        )


def _name(ranges: list, address: int) -> str:
    """An address by the smallest allocation that holds it."""
    holding = [(high - low, low, name) for low, high, name in ranges if low <= address < high]
    if not holding:
        return f"{address:#x}"
    _, low, name = min(holding, key=lambda x: x[0])
    return f"{name} + {address - low} bytes ({address:#x})"
