"""Every scalar ALU instruction of the tables against AMD's pseudocode: result, scc and exec."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mori_triton.emulator import isa
from tests.emulator import operands
from tests.emulator.documents import PCODE, spellings
from tests.emulator.harness import Wave, register
from tests.emulator.pcode import Num
from tests.emulator.pcode_num import is_nan

pytestmark = pytest.mark.cpu

ROUNDS = 90
WIDTH = {"i": 32, "f": 32, "e": 16, "q": 64, "d": 64}
# scalar registers: two for each (type, position) of a source; scc to start with; result; exec before
SOURCE = {(t, i): 2 * (2 * "ifeqd".index(t) + i) for t in "ifeqd" for i in range(2)}
SCC_IN, OUT, EXEC_IN, SCC_OUT = 40, 42, 44, 46
LITERALS = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x1234)
# `fmaak` and `fmamk` have a 32-bit literal, here 1.5
LITERAL_F32 = 0x3FC00000


class Case:
    """One instruction with the moves that set scc before it and keep scc, exec and the result after it."""

    def __init__(self, arch: str, name: str, mnemonic: str, types: str, at: int, literal: int = 0) -> None:
        self.arch, self.name, self.mnemonic, self.at, self.literal = arch, name, mnemonic, at, literal
        self.dtypes, self.stypes = types.split("<-")
        ops = [register("s", OUT, 2 if self.dtypes in "qd" else 1)] if self.dtypes else []
        self.sources = []
        for t in self.stypes:
            if t == "k":
                ops.append(hex(literal))
            elif t == "K":
                ops.append(hex(LITERAL_F32))
            elif t not in "cD":
                r = SOURCE[t, len(self.sources)]
                self.sources.append((t, r))
                ops.append(register("s", r, WIDTH[t] // 33 + 1))
        exec_in = register("s", EXEC_IN, 2)
        self.lines = [
            f"s_mov_b64 exec, {exec_in}",
            f"s_cmp_lg_u32 s{SCC_IN}, 0",
            f"{mnemonic} {', '.join(ops)}",
            f"s_cselect_b32 s{SCC_OUT}, 1, 0",
        ]
        # lanes of the result register: result, scc, exec
        keep = ((OUT, 0), (OUT + 1, 1), (SCC_OUT, 2))
        self.lines += [f"v_writelane_b32 v{at}, s{r}, {lane}" for r, lane in keep]
        self.lines += [f"v_writelane_b32 v{at}, exec_lo, 3", f"v_writelane_b32 v{at}, exec_hi, 4"]

    def expected(self, s: np.ndarray, old: int, scc: int, exec_in: int) -> tuple[int, int, int]:
        sources = [int(s[r]) | int(s[r + 1]) << 32 for _, r in self.sources]
        if "k" in self.stypes:
            sources.append(self.literal)
        env = {f"S{i}": Num(x, 64, "B") for i, x in enumerate(sources)}
        # a scc that looks at all of a 32-bit result means these bits
        old &= (1 << WIDTH.get(self.dtypes, 32)) - 1
        env |= {"D0": Num(old, 64, "B"), "SCC": Num(scc, 1, "U"), "EXEC": Num(exec_in, 64, "B")}
        env |= {"SIMM32": Num(LITERAL_F32, 32, "B"), "TRAPSTS.INVALID": Num(0, 1, "U"), "laneId": Num(0, 32, "U")}
        env |= {"ROUND_MODE": Num(0, 2, "B"), "ROUND_NEAREST_EVEN": Num(0, 2, "B"), "EXEC_LO": Num(exec_in, 32, "B")}
        PCODE[self.arch].run(self.mnemonic, env)
        return env["D0"].bits, env["SCC"].bits & 1, env["EXEC"].bits

    def check(self, wave: Wave, s: np.ndarray, old: int) -> str | None:
        scc, exec_in = int(s[SCC_IN] != 0), int(s[EXEC_IN]) | int(s[EXEC_IN + 1]) << 32
        want, want_scc, want_exec = self.expected(s, old, scc, exec_in)
        v = [int(x) for x in wave.v[self.at]]
        got, got_scc, got_exec = v[0] | v[1] << 32, v[2], v[3] | v[4] << 32
        shown = [hex(int(s[r]) | int(s[r + 1]) << 32) for _, r in self.sources]
        if self.dtypes:
            low = (1 << WIDTH[self.dtypes]) - 1
            both_nan = self.dtypes in "fed" and all(is_nan(x & low, WIDTH[self.dtypes]) for x in (got, want))
            if not both_nan and got & low != want & low:
                return f"{shown} scc {scc} old {old:#x}: got {got:#x}, want {want:#x}"
        if got_scc != want_scc:
            return f"{shown} scc {scc}: got scc {got_scc}, want {want_scc}"
        if got_exec != want_exec:
            return f"{shown} exec {exec_in:#x}: got exec {got_exec:#x}, want {want_exec:#x}"
        return None


def scalar_cases(arch: str) -> dict[str, tuple[str, str]]:
    """Canonical name -> (mnemonic, types)."""
    names, cases = spellings(arch, "s_"), {}
    for name, mnemonic in names.items():
        compare = re.match(r"cmp(k?)_(\w+)_(\w+)$", name)
        exec_op = re.match(r"(\w+)_(?:saveexec|wrexec)_b(\d+)$", name)
        if name in isa.SALU:
            types = isa.SALU[name][0]
            if name.startswith(("fmaak", "fmamk")):
                types = "f<-ffK" if name.startswith("fmaak") else "f<-fKf"
            cases[name] = mnemonic, types
        elif compare:
            try:
                types = isa.compare(f"{compare[2]}_{compare[3]}")[0]
            except KeyError:
                continue
            cases[name] = mnemonic, "<-" + (types[0] + "k" if compare[1] else types)
        elif exec_op and exec_op[1] in isa.BOOL:
            cases[name] = mnemonic, "q<-q" if exec_op[2] == "64" else "i<-i"
        elif name.startswith("bitcmp"):
            cases[name] = mnemonic, "<-qi" if name.endswith("64") else "<-ii"
    return cases


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_scalar(arch):
    cases = []
    for name, (mnemonic, types) in scalar_cases(arch).items():
        for literal in LITERALS if "k" in types else (0,):
            cases.append(Case(arch, name, mnemonic, types, len(cases), literal))
    lines = []
    for c in cases:
        lines += [f"s_mov_b64 {register('s', OUT, 2)}, {register('s', OUT + 6, 2)}", *c.lines]
    wave = Wave(arch, lines)
    rng, wrong = np.random.default_rng(11), {}
    for _ in range(ROUNDS):
        equal, x = rng.integers(0, 8) == 0, 0
        for (t, i), r in SOURCE.items():
            x = x if equal and i else int(operands.values(rng, t, 1)[0])
            wave.s[r], wave.s[r + 1] = x & 0xFFFFFFFF, x >> 32
        old = int(operands.values(rng, "q" if rng.integers(0, 2) else "f", 1)[0])
        wave.s[OUT + 6], wave.s[OUT + 7] = old & 0xFFFFFFFF, old >> 32
        wave.s[SCC_IN] = rng.integers(0, 2)
        wave.s[EXEC_IN : EXEC_IN + 2] = operands.values(rng, "i", 2)
        before = wave.s.copy()
        wave.run()
        for c in cases:
            if c.name not in wrong and (message := c.check(wave, before, old)):
                wrong[c.name] = message
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{k}: {v}" for k, v in wrong.items())
