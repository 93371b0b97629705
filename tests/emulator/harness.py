"""Run a few lines of AMD assembly on one wave, through the real lifter, with chosen register contents."""

from __future__ import annotations

import ctypes

import numpy as np

from mori_triton.emulator import asm, jit, runtime, state
from mori_triton.emulator.lift import Lifter


def program(arch: str, lines: list[str], directives: dict[str, str] | None = None) -> asm.Program:
    """A kernel `k` of these instructions for gfx<arch>."""
    text = [f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"', "\t.text", "k:"]
    text += [f"\t{line}" for line in lines] + ["\ts_endpgm", "\t.amdhsa_kernel k"]
    text += [f"\t\t.amdhsa_{key} {value}" for key, value in (directives or {}).items()] + ["\t.end_amdhsa_kernel"]
    return asm.parse("\n".join(text) + "\n")


_addresses: dict[str, int] = {}


class Wave:
    """One wave of a lifted program, with its registers as arrays: `s` [128] and `v` [registers, lanes], both uint32."""

    def __init__(self, arch: str, lines: list[str], directives: dict[str, str] | None = None) -> None:
        prog = program(arch, lines, directives)
        key = jit.digest(arch, "\n".join(lines), repr(directives))
        name = f"wave_{key[:24]}"
        self.lifter = Lifter(prog, name)
        # always lifted; only the host code may come from the cache
        source = self.lifter.lift()
        runtime.ensure()
        if key not in _addresses:
            jit.load(key, lambda: (source, {}))
            _addresses[key] = jit.address(name)
        self.run_address = _addresses[key]
        self.lanes = self.lifter.W
        raw = np.zeros(self.lifter.state_size + 64, np.uint8)
        self.memory = raw[-raw.ctypes.data % 64 :][: self.lifter.state_size]
        self.s = self.memory[:512].view(np.uint32)
        end = state.VREGS + 4 * self.lanes * self.lifter.num_vregs
        self.v = self.memory[state.VREGS : end].view(np.uint32).reshape(-1, self.lanes)
        self.header = self.memory[512 : state.VREGS].view(np.uint64)
        self.exec = (1 << self.lanes) - 1

    def mask(self, register: int) -> int:
        """A lane mask in scalar registers."""
        return int(self.s[register]) | (int(self.s[register + 1]) << 32 if self.lanes == 64 else 0)

    def set_mask(self, register: int, value: int) -> None:
        self.s[register] = value & 0xFFFFFFFF
        if self.lanes == 64:
            self.s[register + 1] = value >> 32

    @property
    def exec(self) -> int:
        return self.mask(state.EXEC)

    @exec.setter
    def exec(self, value: int) -> None:
        self.set_mask(state.EXEC, value)

    @property
    def scc(self) -> int:
        return int(self.memory[state.SCC : state.SCC + 4].view(np.uint32)[0])

    @scc.setter
    def scc(self, value: int) -> None:
        self.memory[state.SCC : state.SCC + 4].view(np.uint32)[0] = value

    def run(self) -> int:
        """Run from the start to the end of the program (or to where it stops); the code that run() returns."""
        self.header[(state.PC - 512) // 8] = 0
        fn = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(self.run_address)
        return fn(self.memory.ctypes.data, 1 << 40)


def register(kind: str, first: int, count: int = 1) -> str:
    """`v5` or `s[6:7]`."""
    return f"{kind}{first}" if count == 1 else f"{kind}[{first}:{first + count - 1}]"


def lane_bits(mask: int, lanes: int) -> np.ndarray:
    return np.array([mask >> l & 1 for l in range(lanes)], bool)
