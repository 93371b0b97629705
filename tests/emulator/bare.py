"""Runs pieces of assembly on one wave, without a launch: registers and memory are set and read directly."""

from __future__ import annotations

import ctypes

import numpy as np

from mori_triton.emulator import asm, jit, lift, runtime
from mori_triton.emulator import state as lay


class Program:
    """Named pieces of code for one GPU, compiled together."""

    def __init__(self, arch: str, pieces: dict[str, str], private_bytes: int = 0) -> None:
        lines = [f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"', ".text", "kernel:"]
        for name, code in pieces.items():
            lines += [f".L{name}:", *code.strip().splitlines(), "s_endpgm"]
        lines += [".amdhsa_kernel kernel", f".amdhsa_private_segment_fixed_size {private_bytes}", ".end_amdhsa_kernel"]
        text = "\n".join(lines)
        self.program = asm.parse(text)
        self.W = self.program.warp_size
        key = jit.digest(text)
        lifter = lift.Lifter(self.program, "bare" + key[:20])
        runtime.ensure()
        jit.load(key, lambda: (lifter.lift(), {}))
        lifter.lift = None
        self.lifter = lifter
        self.run = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64)(jit.address("bare" + key[:20]))


class BareWave:
    """The state of one wave. `v[i]` is vector register i, uint32 `[W]`; `s` the scalar registers."""

    def __init__(self, program: Program) -> None:
        self.p = program
        self.memory = np.zeros(program.lifter.state_size + 64, np.uint8)
        start = -self.memory.ctypes.data % 64
        self.memory = self.memory[start : start + program.lifter.state_size]
        self.s = self.memory[:512].view(np.uint32)
        self.v = self.memory[lay.VREGS : program.lifter.scratch].view(np.uint32).reshape(-1, program.W)
        self.scratch = self.memory[program.lifter.scratch :]
        self.lds = np.zeros(0, np.uint8)
        self.table = np.zeros((0, 2), np.uint64)

    def get(self, field: int) -> int:
        return int(self.memory[field : field + 8].view(np.uint64)[0])

    def put(self, field: int, value: int) -> None:
        self.memory[field : field + 8].view(np.uint64)[0] = value

    def allow(self, *arrays: np.ndarray) -> None:
        """Let the wave touch these arrays only."""
        ranges = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays)
        self.table = np.array(ranges, np.uint64)
        for field, value in ((lay.RANGES, self.table.ctypes.data), (lay.NRANGES, len(ranges))):
            self.put(field, value)
        self.put(lay.LAST_LO, 1)
        self.put(lay.LAST_HI, 0)

    def set_lds(self, lds: np.ndarray) -> None:
        self.lds = lds
        self.put(lay.LDS, lds.ctypes.data)
        self.put(lay.LDS_SIZE, lds.nbytes)

    def set64(self, register: int, value: int) -> None:
        """A 64-bit value into two scalar registers."""
        self.s[register], self.s[register + 1] = value & 0xFFFFFFFF, value >> 32

    def __call__(self, piece: str, exec_mask: int) -> int:
        """Run a piece; the status that run() returns."""
        self.set64(lay.EXEC, exec_mask) if self.p.W == 64 else self.s.__setitem__(lay.EXEC, exec_mask)
        self.put(lay.PC, self.p.program.labels[f".L{piece}"])
        return self.p.run(self.memory.ctypes.data, 1 << 40)
