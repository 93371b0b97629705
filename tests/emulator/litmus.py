"""Runs small kernels of several devices together in weak-memory mode; the kernels that most litmus tests share."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mori_triton.emulator.device import ARCHS, Device
from mori_triton.emulator.launch import Launch
from mori_triton.emulator.machine import Event, Machine
from mori_triton.emulator.module import Module, load_code
from mori_triton.emulator.scheduler import Coordinator
from mori_triton.emulator.weak import WeakMemory

CLEAN_SEEDS, BROKEN_SEEDS = range(50), range(5)
# words of a message, and what is in them
N = 64
WANTED = np.arange(1, N + 1)
POINTERS2, POINTERS3 = ("*i32",) * 2, ("*i32",) * 3


@functools.cache
def compiled(
    fn, arch: str, signature: tuple[str, ...], constants: tuple[tuple[str, object], ...], num_warps: int
) -> str:
    """Assembly text of a kernel: types of its arguments, then its constants."""
    names = [n for n in fn.arg_names if n not in dict(constants)]
    types = {**dict(zip(names, signature, strict=True)), **{k: "constexpr" for k, _ in constants}}
    values = {(fn.arg_names.index(k),): v for k, v in constants}
    target = GPUTarget("hip", arch, ARCHS[arch][0])
    source = ASTSource(fn=fn, signature=types, constexprs=values)
    return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["amdgcn"]


@dataclass
class Litmus:
    """One run: a machine and its memory, its own or a coordinator's.

    Buffers belong to a device and are visible to all.
    """

    seed: int
    num_devices: int = 2
    arch: str = "gfx1201"
    quantum: tuple[int, int] = (1, 60)
    buffers: list = field(default_factory=list)
    coordinator: Coordinator | None = None

    def __post_init__(self) -> None:
        self.starved: list[str] = []
        if self.coordinator is not None:
            self.machine, self.weak = self.coordinator.machine, self.coordinator.weak
        else:
            self.machine = Machine(self.seed, quantum=self.quantum)
            self.weak = WeakMemory(self.seed, self.num_devices, arena_bytes=1 << 24)
        self.devices = [Device(100 + i, self.arch, 100 + i, f"PE {i}") for i in range(self.num_devices)]

    def buffer(self, device: int, num: int, dtype=np.int32, name: str = "") -> np.ndarray:
        """Zeroed memory of a device that the kernels of all devices may touch."""
        memory = np.zeros(num, dtype)
        self.buffers.append(memory)
        self.weak.set_home(memory.ctypes.data, memory.nbytes, device)
        for d in self.devices:
            d.allow(memory.ctypes.data, memory.nbytes, name or f"buffer {len(self.buffers)}")
        return memory

    def launch(
        self,
        device: int,
        fn,
        args,
        signature: tuple[str, ...],
        *,
        grid: int = 1,
        num_warps: int = 1,
        edit=None,
        **constants,
    ) -> Launch:
        """A kernel with its arguments. edit: a function on its assembly text."""
        text = compiled(fn, self.arch, signature, tuple(constants.items()), num_warps)
        module = Module(load_code(edit(text) if edit else text))
        return Launch(
            module, (grid, 1, 1), args, num_warps=num_warps, shared=1024, types=signature, device=self.devices[device]
        )

    def submit(self, device: int, *args, **options) -> Launch:
        """Put a kernel in flight; the arguments are those of `launch`."""
        launch = self.launch(device, *args, **options)
        launch.records = self.weak.attach(launch, device)
        launch.control.weak_records = launch.records.ctypes.data
        self.machine.submit(launch)
        return launch

    def run(self, limit: int = 20_000_000) -> None:
        """Run until every kernel has ended, or only polls that wait for a store on its way are left: then `starved`."""
        while self.machine.launches:
            event = self.machine.run(1 << 20)
            if event == Event.FAULT:
                raise self.machine.fault()[1]
            if event == Event.FINISHED:
                self.machine.finished()
            elif event == Event.QUIET and self.weak.starving():
                self.starved = self.weak.starving()
                while self.machine.launches:
                    self.machine.retire(self.machine.launches[0])
            elif event == Event.QUIET and self.weak.pending():
                self.weak.drain()
                self.machine.state.epoch += 1
            elif event in (Event.STUCK, Event.QUIET) or self.machine.instructions > limit:
                raise AssertionError("\n".join(self.machine.waiting_waves()))


@triton.jit
def send(data, flag, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(data + offs, offs + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem=SEM, scope=SCOPE)


@triton.jit
def receive(data, flag, out, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    while tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE) == 0:
        pass
    tl.debug_barrier()
    tl.store(out + offs, tl.load(data + offs))


@triton.jit
def fill(data, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(data + offs, offs + 1)


@triton.jit
def signal(flag, SEM: tl.constexpr):
    tl.atomic_xchg(flag, 1, sem=SEM, scope="sys")


@triton.jit
def wait(flag, SEM: tl.constexpr):
    while tl.atomic_add(flag, 0, sem=SEM, scope="sys") == 0:
        pass


@triton.jit
def read(data, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, tl.load(data + offs))
