"""The scheduler's state and the launches in flight on one host thread: run them, and report what went wrong.

The loop itself is hip_src/emulator/scheduler.cpp; the structures here repeat hip_src/emulator/wave.h.
"""

from __future__ import annotations

import ctypes
import enum
import functools

import numpy as np

from mori_triton.emulator import jit
from mori_triton.emulator import state as lay
from mori_triton.emulator.launch import MAX_RESIDENT, Launch
from mori_triton.errors import KernelFault

VIRTUAL_JUMP = 1 << 40  # ticks, longer than any limit
# instructions per turn in rotation order
LONG_QUANTUM = 20_000
# waiting events of every wave without a change of memory before it is examined whether anything can still change
QUIET_POLLS = 4096


class Event(enum.IntEnum):
    """Why the scheduler came back."""

    LIMIT = 0  # instructions used up
    FINISHED = 1  # a launch has ended
    FAULT = 2
    STUCK = 3  # every wave waits at a barrier
    QUIET = 4  # random order: nothing can change any more, but for the clock
    STOPPED = 5  # asked to by another thread
    WAITING = 6  # rotation: every wave has only polled for a while


class SchedulerState(ctypes.Structure):
    """`Scheduler` of wave.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("clock", "random", "rng", "quantum_min", "quantum_span", "switches", "hash", "ready"),
            *("ready_mask", "first", "num_ready", "epoch", "faulted", "finished", "stop", "starting"),
            *("idle_rounds", "round_left", "round_busy", "round_polls", "started_at"),
            *("quiet_checked", "quiet_polls", "proof", "proof_epoch", "proof_at", "proof_span"),
        )
    ]


@functools.cache
def _functions() -> tuple:
    """submit(state, launch), drop(state, launch), run(state, limit) -> event; the last frees the interpreter lock."""
    jit.load_bitcode("emulator_scheduler.bc")
    ptr, u64 = ctypes.c_void_p, ctypes.c_uint64
    return (
        ctypes.PYFUNCTYPE(None, ptr, ptr)(jit.address("mori_emulator_submit")),
        ctypes.PYFUNCTYPE(None, ptr, ptr)(jit.address("mori_emulator_drop")),
        ctypes.CFUNCTYPE(ctypes.c_uint32, ptr, u64)(jit.address("mori_emulator_run")),
    )


class Machine:
    """Runs launches on the calling thread, one thread at a time.

    `seed=None`: rotation order and the host's clock. A seed: random order of waves and quanta between `quantum[0]` and
    `quantum[1]` instructions, and a clock that counts executed instructions, so that a run repeats exactly.
    """

    def __init__(self, seed: int | None = None, quantum: tuple[int, int] = (20, 2000), resident: int = MAX_RESIDENT):
        self.state = SchedulerState()
        self._address = ctypes.addressof(self.state)
        self.virtual, self.resident = seed is not None, resident
        if seed is None:
            self.state.quantum_min, self.state.quantum_span = LONG_QUANTUM, 1
        else:
            self.state.random, self.state.quiet_polls = 1, QUIET_POLLS
            self.state.quantum_min, self.state.quantum_span = quantum[0], quantum[1] - quantum[0] + 1
            self.state.rng = (seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 64) or 1
        self._ready = np.zeros(0, np.uint64)
        self._arenas: list[np.ndarray] = []
        self._num_waves = 0  # started so far, numbers the waves of later launches
        self.launches: list[Launch] = []
        self._submit, self._drop, self._run = _functions()

    @property
    def instructions(self) -> int:
        """Wave instructions executed, including jumps of the virtual clock."""
        return self.state.clock

    @property
    def trace_hash(self) -> int:
        """Hash of every switch so far: which wave, how many instructions, how it ended."""
        return self.state.hash

    @property
    def switches(self) -> int:
        """Turns given to waves so far."""
        return self.state.switches

    def clock_address(self) -> int:
        """What a wave's CLOCK field holds."""
        return self._address + SchedulerState.clock.offset if self.virtual else 0

    def submit(self, launch: Launch) -> None:
        """Put a launch in flight; nothing runs yet. An empty grid has ended at once."""
        if launch.num_groups == 0:
            launch.control.ended = 1
            return
        resident = min(self.resident, launch.num_groups)
        need = resident * launch.slot_bytes
        fitting = [i for i, arena in enumerate(self._arenas) if len(arena) >= need]
        arena = self._arenas.pop(fitting[0]) if fitting else _pages(need)
        launch.bind(arena, resident, self.clock_address(), self._num_waves)
        self._num_waves += launch.num_groups * launch.num_waves
        self.launches.append(launch)
        self._reserve(sum(x.resident * x.num_waves for x in self.launches))
        self._submit(self._address, launch.address)

    def _reserve(self, num_waves: int) -> None:
        """Let the ring of waves that can run hold so many."""
        state, old = self.state, len(self._ready)
        if num_waves <= old:
            return
        size = max(1024, 1 << num_waves.bit_length())
        ready = np.zeros(size, np.uint64)
        if state.num_ready:
            ready[: state.num_ready] = self._ready[(np.arange(state.num_ready) + state.first) % old]
        self._ready, state.ready, state.ready_mask, state.first = ready, ready.ctypes.data, size - 1, 0

    def run(self, limit: int) -> Event:
        """Run for about `limit` instructions or until something happens. Other threads run meanwhile."""
        return Event(self._run(self._address, limit))

    def finished(self) -> Launch:
        """The launch of the last FINISHED event; it is no longer in flight."""
        return self.retire(next(x for x in self.launches if x.address == self.state.finished))

    def retire(self, launch: Launch) -> Launch:
        """Take a launch out of flight, ended or not."""
        if not launch.control.ended:
            self._drop(self._address, launch.address)
        self.launches.remove(launch)
        if launch.arena is not None and len(self._arenas) < 16:
            self._arenas.append(launch.arena)
            self._arenas.sort(key=len)
        launch.arena = None
        return launch

    def jump_clock(self) -> None:
        """Let virtual time pass every limit."""
        self.state.clock += VIRTUAL_JUMP
        self.state.epoch += 1

    def fault(self) -> tuple[Launch, BaseException]:
        """The launch and the error of the last FAULT event: a `KernelFault`, or what the host raised for a message."""
        address = self.state.faulted
        launch = next(x for x in self.launches if x.owns(address))
        wave = launch.wave(address)
        kind, index = wave.get(lay.FAULT) & 0xFFFFFFFF, wave.get(lay.FAULT_PC) & 0xFFFFFFFF
        where = wave.describe(index)
        calls = launch.hostcalls
        if kind == lay.MESSAGE and calls is not None and calls.error is not None:
            error = calls.error
            return launch, KernelFault(f"{error}: {where}") if isinstance(error, KernelFault) else error
        if kind == lay.TRAP and calls is not None and calls.failed_assertion:
            return launch, KernelFault(f"{calls.failed_assertion}: {lay.FAULTS[kind]}: {where}")
        bad = wave.get(lay.FAULT_ADDR)
        if kind in (4, 7, lay.TRAP, lay.UNKNOWN_COPY, lay.MESSAGE, lay.UNKNOWN_EVENT):
            return launch, KernelFault(f"{lay.FAULTS[kind]}: {where}")
        near = f"; {launch.nearest(bad)}" if kind in (1, 3) else ""
        size = wave.get(lay.FAULT_SIZE)
        access = f"{size} bytes at {bad:#x}" if size else f"address {bad:#x}"
        return launch, KernelFault(f"{lay.FAULTS[kind]}: {access}, {where}{near}")

    def waiting_waves(self, limit: int = 16) -> list[str]:
        """What every launch in flight waits for: one line per wave that has not ended, about `limit` lines in all.

        Waves that poll come before those at a barrier, which wait for them.
        """
        lines = []
        for launch in self.launches:
            share = max(limit // len(self.launches), 2)
            if launch.num_groups > launch.control.next:
                unstarted = launch.num_groups - launch.control.next
                lines.append(f"{launch.who}: {unstarted} workgroups wait for one of {launch.resident} places")
            waves = sorted(launch.live_waves(), key=lambda wave: wave.get(lay.STATUS) == lay.BARRIER)
            lines += [wave.describe() for wave in waves[:share]]
            if len(waves) > share:
                lines.append(f"{launch.who}: and {len(waves) - share} more waves")
        return lines


def _pages(num_bytes: int) -> np.ndarray:
    """Zeroed memory at a 64-byte boundary; untouched pages cost nothing."""
    raw = np.zeros(max(num_bytes, 1 << 16) + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][: max(num_bytes, 1 << 16)]
