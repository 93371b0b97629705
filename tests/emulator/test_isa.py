"""Every vector ALU instruction of the tables, lane by lane, against AMD's pseudocode.

One program per GPU holds each instruction once, with its own destination registers, and runs several times on new
operands. A result must have the documented bits. Two exceptions: a NaN that arithmetic makes may have any payload, and
the transcendental functions may differ by the last place.
"""

from __future__ import annotations

import numpy as np
import pytest

from mori_triton.emulator import isa
from tests.emulator import operands
from tests.emulator.documents import PCODE, spellings
from tests.emulator.harness import Wave, register
from tests.emulator.pcode import Num
from tests.emulator.pcode_num import is_nan

pytestmark = pytest.mark.cpu

ROUNDS = {"gfx1201": 6, "gfx942": 3}
WIDTH = {"i": 32, "f": 32, "h": 16, "e": 16, "q": 64, "d": 64, "p": 32}
# two registers for each (type, position) of a source
SOURCE = {(t, i): 2 * (3 * "ifhepqd".index(t) + i) for t in "ifhepqd" for i in range(3)}
FIRST_RESULT = 2 * len(SOURCE)
# scalar registers: lane mask source, lane mask result, ignored result
MASK_IN, MASK_OUT, IGNORED = 20, 30, 90
ULP = {"exp_f32": 1, "log_f32": 1, "exp_f16": 1, "log_f16": 1, "rsq_f16": 1, "div_fmas_f64": 1}


def vector_cases(arch: str) -> dict[str, tuple[str, str]]:
    """Canonical name -> (mnemonic, types) of everything in the vector tables that this GPU documents."""
    names, cases = spellings(arch, "v_"), {}
    for name, (types, _) in isa.VALU.items():
        if name in names:
            cases[name] = names[name], types
    for name, mnemonic in names.items():
        if name.startswith("cmp_"):
            try:
                cases[name] = mnemonic, "m<-" + isa.compare(name)[0]
            except KeyError:
                continue
    return cases


class Case:
    """One instruction in the program: its text, where its results go, what they should be."""

    def __init__(self, arch: str, name: str, mnemonic: str, types: str, at: int) -> None:
        self.arch, self.name, self.mnemonic, self.at = arch, name, mnemonic, at
        # `w` is another way for a formula to see what `q` is
        self.dtypes, self.stypes = types.replace("w", "q").split("<-")
        gfx12 = arch.startswith("gfx12")
        mask_size = 1 if gfx12 else 2
        ops, self.sources = [], []
        for t in self.dtypes:
            if t == "m":
                ops.append(register("s", MASK_OUT, mask_size))
            elif t == ".":
                ops.append("null" if gfx12 else register("s", IGNORED, 2))
            else:
                ops.append(register("v", at, WIDTH[t] // 33 + 1) + ".l" * (gfx12 and t in "he"))
        for i, t in enumerate(self.stypes):
            if t == "m":
                ops.append(register("s", MASK_IN, mask_size))
            elif t != "D":
                self.sources.append((t, SOURCE[t, i]))
                ops.append(register("v", SOURCE[t, i], WIDTH[t] // 33 + 1) + ".l" * (gfx12 and t in "he"))
        self.lines = [f"{mnemonic} {', '.join(ops)}"]
        self.mask_at = at + 2
        if "m" in self.dtypes:
            self.lines = [f"{mnemonic}_e64 {', '.join(ops)}"]
            # keep the mask for after the run, in a vector register of its own
            self.lines += [f"v_cndmask_b32_e64 v{self.mask_at}, 0, 1, {register('s', MASK_OUT, mask_size)}"]
        self.size = 3 if "m" in self.dtypes else 2

    def expected(self, lane: int, sources: list[int], old: int, mask: int) -> tuple[int, int]:
        """(destination register pair, mask bit) after the instruction in one lane."""
        if self.name.startswith(("fmaak", "fmamk")):
            literal = sources.pop(2 if self.name.startswith("fmaak") else 1)
        else:
            literal = 0
        literal_width = 16 if self.name.endswith("16") else 32
        env = {f"S{i}": Num(x, 64, "B") for i, x in enumerate(sources)}
        env |= {"D0": Num(0 if self.dtypes == "m" else old, 64, "B"), "D1": Num(0, 64, "B"), "EXEC": Num(0, 64, "B")}
        env |= {"laneId": Num(lane, 32, "U"), "SIMM32": Num(literal, literal_width, "B"), "OPSEL": Num(0, 32, "B")}
        env |= {"VCC": Num(mask, 64, "B"), "SCC": Num(0, 1, "U"), "WAVE_MODE.IEEE": Num(1, 1, "U")}
        env |= {"ROUND_MODE": Num(0, 2, "B"), "ROUND_NEAREST_EVEN": Num(0, 2, "B"), "VDST": Num(0, 32, "U")}
        vgpr = {0: Num(old, 64, "B")}
        env["VGPR"] = {lane: vgpr}
        PCODE[self.arch].run(self.mnemonic, env)
        if "VGPR" in PCODE[self.arch].texts[self.mnemonic]:
            env["D0"] = vgpr[0]
        value, t = env["D0"].bits, self.dtypes[0]
        if t in "he" and self.arch == "gfx942" and self.name in isa.CLEARS_HIGH_HALF:
            value &= 0xFFFF
        if t not in "qdm":
            # a text that assigns to all of D0 means 32 bits
            value = (value & 0xFFFFFFFF) | (old & ~0xFFFFFFFF)
        return value, env["D0" if self.dtypes == "m" else "VCC"].bits >> lane & 1

    def check(self, wave: Wave, before: np.ndarray, mask: int) -> str | None:
        """The first wrong lane, described."""
        active = wave.exec
        for lane in range(wave.lanes):
            old = int(before[self.at, lane]) | int(before[self.at + 1, lane]) << 32
            got = int(wave.v[self.at, lane]) | int(wave.v[self.at + 1, lane]) << 32
            if not active >> lane & 1:
                if got != old:
                    return f"lane {lane} is not active, but {old:#x} became {got:#x}"
                continue
            sources = [int(before[r, lane]) | int(before[r + 1, lane]) << 32 for _, r in self.sources]
            shown = [f"{x & ((1 << WIDTH[t]) - 1):#x}" for x, (t, _) in zip(sources, self.sources, strict=True)]
            try:
                want, bit = self.expected(lane, list(sources), old, mask)
            except Exception as e:
                return f"pcode {e!r}"
            if self.dtypes != "m" and not self.same(got, want):
                return f"lane {lane} {', '.join(shown)} old {old:#x}: got {got:#x}, want {want:#x}"
            if "m" in self.dtypes and int(wave.v[self.mask_at, lane]) != bit:
                return f"lane {lane} {', '.join(shown)}: got mask bit {wave.v[self.mask_at, lane]}, want {bit}"
        return None

    def same(self, got: int, want: int) -> bool:
        if got == want:
            return True
        t = self.dtypes[0]
        if t not in "fde":
            return False
        low = (1 << WIDTH[t]) - 1
        if got & ~low != want & ~low:
            return False
        got, want = got & low, want & low
        if is_nan(got, WIDTH[t]):
            return is_nan(want, WIDTH[t])
        return abs(got - want) <= ULP.get(self.name, 0)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_vector(arch):
    cases, at = [], FIRST_RESULT
    for name, (mnemonic, types) in vector_cases(arch).items():
        cases.append(Case(arch, name, mnemonic, types, at))
        at += cases[-1].size
    wave = Wave(arch, [line for c in cases for line in c.lines])
    rng, wrong = np.random.default_rng(7), {}
    for i in range(ROUNDS[arch]):
        for (t, _), r in SOURCE.items():
            x = operands.values(rng, t, wave.lanes)
            # the unused half of a 16-bit operand holds anything
            x = x | rng.integers(0, 1 << 16, wave.lanes, dtype=np.uint64) << np.uint64(16) if t in "he" else x
            wave.v[r], wave.v[r + 1] = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
        # in some lanes all sources are equal
        equal = rng.integers(0, 8, wave.lanes) == 0
        for (t, _), r in SOURCE.items():
            wave.v[r : r + 2, equal] = wave.v[SOURCE[t, 0] : SOURCE[t, 0] + 2, equal]
        wave.v[FIRST_RESULT:] = rng.integers(0, 1 << 32, wave.v[FIRST_RESULT:].shape, dtype=np.uint64)
        # fmac reads its destination
        for c in cases:
            if "D" in c.stypes:
                wave.v[c.at] = operands.values(rng, c.dtypes[0], wave.lanes)
        full = (1 << wave.lanes) - 1
        wave.exec = full if i == 0 else int(rng.integers(0, 1 << 63)) & full
        mask = int(rng.integers(0, 1 << 63)) & full
        wave.set_mask(MASK_IN, mask)
        before = wave.v.copy()
        wave.run()
        for c in cases:
            if c.name not in wrong:
                message = c.check(wave, before, mask)
                if message:
                    wrong[c.name] = message
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(f"{k}: {v}" for k, v in wrong.items())
