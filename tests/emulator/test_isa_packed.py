"""Packed math, mixed-precision fma and moves between lanes against AMD's pseudocode, with their selectors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mori_triton.emulator.vector_packed import MIXED, PACKED
from tests.emulator import operands
from tests.emulator.documents import PCODE, spellings
from tests.emulator.harness import Wave, register
from tests.emulator.pcode import Num
from tests.emulator.pcode_num import is_nan

pytestmark = pytest.mark.cpu

ROUNDS = 6
FIRST_RESULT = 24
BITS = {"f": 64, "e": 32, "h": 32}


def flags(rng: np.random.Generator, n: int) -> list[int]:
    return [int(x) for x in rng.integers(0, 2, n)]


def select(x: int, lo: int, hi: int, neg_lo: int, neg_hi: int, half: int) -> int:
    """A source after its selectors and signs: what a text calls S0, S1 or S2."""
    ones = (1 << half) - 1
    low, high = x >> (half * lo) & ones, x >> (half * hi) & ones
    return (low ^ neg_lo << (half - 1)) | (high ^ neg_hi << (half - 1)) << half


def packed_cases(arch: str, rng: np.random.Generator) -> list[dict]:
    """Each packed instruction with default and with random modifiers."""
    cases = []
    for name, mnemonic in spellings(arch, "v_").items():
        if name not in PACKED or name == "pk_mov_b32":
            continue
        letter = PACKED[name][0]
        n = 3 if "fma" in name or "mad" in name or "3_" in name else 2
        for plain in (True, False):
            lo, hi = ([0] * n, [1] * n) if plain else (flags(rng, n), flags(rng, n))
            neg = [[0] * n] * 2 if plain or letter == "h" else [flags(rng, n), flags(rng, n)]
            cases.append({"name": name, "mnemonic": mnemonic, "letter": letter, "n": n, "lo": lo, "hi": hi, "neg": neg})
    return cases


def listed(key: str, values: list[int]) -> str:
    return f"{key}:[{','.join(map(str, values))}]"


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_packed(arch):
    rng, lines = np.random.default_rng(3), []
    cases = packed_cases(arch, rng)
    for i, c in enumerate(cases):
        size, letter, n = BITS[c["letter"]] // 32, c["letter"], c["n"]
        c["at"] = FIRST_RESULT + 2 * i
        c["sources"] = [6 * "feh".index(letter) + 2 * k for k in range(n)]
        ops = [register("v", r, size) for r in [c["at"], *c["sources"]]]
        mods = [listed("op_sel", c["lo"]), listed("op_sel_hi", c["hi"])]
        mods += [listed("neg_lo", c["neg"][0]), listed("neg_hi", c["neg"][1])] if letter != "h" else []
        lines.append(f"{c['mnemonic']} {', '.join(ops)} {' '.join(mods)}")
    wave, wrong = Wave(arch, lines), {}
    for _ in range(ROUNDS):
        for r in range(0, FIRST_RESULT, 2):
            x = operands.values(rng, "fph"[min(r // 6, 2)], wave.lanes)
            y = operands.values(rng, "fpi"[min(r // 6, 2)], wave.lanes)
            wave.v[r], wave.v[r + 1] = x & np.uint64(0xFFFFFFFF), y & np.uint64(0xFFFFFFFF)
        wave.v[FIRST_RESULT:] = rng.integers(0, 1 << 32, wave.v[FIRST_RESULT:].shape, dtype=np.uint64)
        wave.exec = int(rng.integers(0, 1 << 63)) & ((1 << wave.lanes) - 1)
        before = wave.v.copy()
        wave.run()
        for c, lane in itertools.product(cases, range(wave.lanes)):
            if lines[cases.index(c)] not in wrong and (message := check_packed(arch, wave, before, c, lane)):
                wrong[lines[cases.index(c)]] = message
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())


def check_packed(arch: str, wave: Wave, before: np.ndarray, c: dict, lane: int) -> str | None:
    def pair(v: np.ndarray, r: int) -> int:
        return int(v[r, lane]) | int(v[r + 1, lane]) << 32

    got, old, half = pair(wave.v, c["at"]), pair(before, c["at"]), BITS[c["letter"]] // 2
    if not wave.exec >> lane & 1:
        return None if got == old else f"lane {lane} is not active, but {old:#x} became {got:#x}"
    env = {"D0": Num(old, 64, "B"), "tmp": Num(0, 64, "B")}
    for i, r in enumerate(c["sources"]):
        x = select(pair(before, r), c["lo"][i], c["hi"][i], c["neg"][0][i], c["neg"][1][i], half)
        env[f"S{i}"] = Num(x, 64, "B")
    PCODE[arch].run(c["mnemonic"], env)
    want = env["D0"].bits if half == 32 else env["D0"].bits & 0xFFFFFFFF | old & ~0xFFFFFFFF
    for shift in (0, half):
        g, w = got >> shift & ((1 << half) - 1), want >> shift & ((1 << half) - 1)
        both_nan = c["letter"] != "h" and is_nan(g, half) and is_nan(w, half)
        if g != w and not both_nan:
            shown = [hex(pair(before, r)) for r in c["sources"]]
            return f"lane {lane} {', '.join(shown)}: got {got:#x}, want {want:#x}"
    return None if got >> 32 == want >> 32 or half == 32 else "the next register changed"


@pytest.mark.parametrize("name", sorted(k for k in MIXED if "bf16" not in k))
def test_mixed(name):
    rng, lines, cases = np.random.default_rng(5), [], []
    for i in range(16):
        half, upper, neg = flags(rng, 3), flags(rng, 3), flags(rng, 3)
        sources = [f"{'-' * n}v{2 * k + h}" for k, (n, h) in enumerate(zip(neg, half, strict=True))]
        cases.append((half, upper, neg))
        lines.append(f"v_{name} v{10 + i}, {', '.join(sources)} {listed('op_sel', upper)} {listed('op_sel_hi', half)}")
    wave = Wave("gfx1201", lines)
    for k in range(3):
        wave.v[2 * k], wave.v[2 * k + 1] = operands.values(rng, "f", 32), operands.values(rng, "p", 32)
    wave.v[10:] = 0xA5A5A5A5
    wave.run()
    for (i, (half, upper, neg)), lane in itertools.product(enumerate(cases), range(32)):
        s = []
        for k in range(3):
            x = int(wave.v[2 * k + half[k], lane])
            # the sign belongs to the number that is read
            s.append(Num(x ^ ((0x80008000 if half[k] else 0x80000000) * neg[k]), 32, "B"))
        env = {"D0": Num(0xA5A5A5A5, 64, "B"), "S": s, "laneId": Num(lane, 32, "U")}
        env |= {"OPSEL": Num(sum(b << k for k, b in enumerate(upper)), 3, "B")}
        env |= {"OPSEL_HI": Num(sum(b << k for k, b in enumerate(half)), 3, "B")}
        text = PCODE["gfx1201"].texts[f"v_{name}"].replace("declare S : 32'B[3];", "")
        PCODE["gfx1201"].texts[f"v_{name}"] = text
        PCODE["gfx1201"].run(f"v_{name}", env)
        got, want = int(wave.v[10 + i, lane]), env["D0"].bits
        width, shift = (32, 0) if name == "fma_mix_f32" else (16, 16 * ("hi" in name))
        g, w = got >> shift & ((1 << width) - 1), want >> shift & ((1 << width) - 1)
        assert got == want or (is_nan(g, width) and is_nan(w, width)), (lines[i], lane, hex(got), hex(want))
