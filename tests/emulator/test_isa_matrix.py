"""Matrix products against numpy, in the layouts of AMD's documents, all lanes, with modifiers and special values.

A product of two elements is exact in fp32 for every format up to 16 bits; fp32 products are rounded with the sum. So
any order of additions is within k roundings of the exact sum: k * 2**-24 * (sum of |a b| + |c|).
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mori_triton.emulator.vector_matrix import MATRIX
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.harness import Wave, register

pytestmark = pytest.mark.cpu

BITS = {"f64": 64, "f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "fp6": 6, "bf6": 6, "fp4": 4, "iu4": 4}
TORCH = {
    ("fp8", False): torch.float8_e4m3fn, ("bf8", False): torch.float8_e5m2,
    ("fp8", True): torch.float8_e4m3fnuz, ("bf8", True): torch.float8_e5m2fnuz,
}  # fmt: skip
# exponent bits, mantissa bits, bias
TINY = {"fp6": (2, 3, 1), "bf6": (3, 2, 3), "fp4": (2, 1, 1)}


def arch_of(name: str) -> str:
    if "xf32" in name:
        return "gfx942"
    if name.startswith("mfma"):
        return "gfx950"
    return "gfx1201" if "16x16x16" in name or "x32_iu4" in name else "gfx1250"


def number(bits: np.ndarray, form: str, fnuz: bool = False, signed: bool = True) -> np.ndarray:
    """Bit patterns (uint64) as float64 (int64 for integers)."""
    if form == "f64":
        return bits.view(np.float64)
    if form in ("f32", "xf32"):
        with np.errstate(invalid="ignore"):
            return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if form == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    if form == "bf16":
        return number(bits << np.uint64(16), "f32")
    if form in ("fp8", "bf8"):
        return torch.from_numpy(bits.astype(np.uint8)).view(TORCH[form, fnuz]).double().numpy()
    if form in TINY:
        e_bits, m_bits, bias = TINY[form]
        b = bits.astype(np.int64)
        e, m = b >> m_bits & ((1 << e_bits) - 1), (b & ((1 << m_bits) - 1)) / (1 << m_bits)
        sign = np.where(b >> (e_bits + m_bits) & 1, -1.0, 1.0)
        return sign * np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))
    n = BITS.get(form, 8)
    x = bits.astype(np.int64)
    return np.where(x >> (n - 1) & 1, x - (1 << n), x) if signed else x


class Shape:
    """What a name says, and where AMD's documents put the elements."""

    def __init__(self, name: str, a: str = "", b: str = "") -> None:
        m = re.match(r"(mfma|wmma)(?:_scale(?:16)?)?_([a-z0-9]+)_(\d+)x\d+x(\d+)(?:_(\d+)b)?_(\w+)$", name)
        assert m
        self.name, self.wmma, self.d = name, m[1] == "wmma", m[2]
        self.n, self.k, self.blocks = int(m[3]), int(m[4]), int(m[5] or 1)
        formats = m[6].split("_") * 2
        self.a, self.b = a or formats[0], b or formats[1]
        self.arch = arch_of(name)
        self.lanes = 32 if self.wmma else 64
        self.groups = self.lanes // (self.n * self.blocks)
        self.per_lane = self.k // self.groups

    def sizes(self) -> tuple[int, int, int]:
        """Registers of D (and C), A, B."""
        numbers = self.n * self.n * self.blocks // self.lanes
        d = {"f64": 2 * numbers, "f16": numbers // 2, "bf16": numbers // 2}.get(self.d, numbers)
        return d, *(-(-self.per_lane * BITS.get(t, 8) // 32) for t in (self.a, self.b))

    def k_of(self, e: int, group: int, form: str) -> int:
        """The k of a lane's element e."""
        run = self.per_lane
        if self.arch == "gfx1250" and self.k > 4:
            run = 8
        if "f8f6f4" in self.name:
            run = 16 if BITS.get(form, 8) == 8 else 32
        return e % run + run * group + run * self.groups * (e // run)

    def put(self, wave: Wave, first: int, bits: np.ndarray, form: str) -> None:
        """bits: [blocks, n, k] of A (of B: its columns)."""
        size = BITS.get(form, 8)
        for lane in range(self.lanes):
            i, block, group = lane % self.n, lane // self.n % self.blocks, lane // (self.n * self.blocks)
            whole = 0
            for e in range(self.per_lane):
                whole |= int(bits[block, i, self.k_of(e, group, form)]) << (size * e)
            for r in range(-(-self.per_lane * size // 32)):
                wave.v[first + r, lane] = whole >> (32 * r) & 0xFFFFFFFF

    def place(self, block: int, row: int, column: int) -> tuple[int, int, int]:
        """(register, lane, first bit) of an element of C or D."""
        if self.wmma:
            if self.d in ("f16", "bf16"):
                return row % 8 // 2, column + 16 * (row // 8), row % 2 * 16
            return row % 8, column + 16 * (row // 8), 0
        if self.n == 4:
            return row, column + 4 * block, 0
        if self.d == "f64":
            return row // 4 * 2, column + 16 * (row % 4), 0
        high = 64 // self.n
        r = row % 4 + 4 * (row // (4 * high))
        return r + self.n * self.n // 64 * block, column + self.n * (row // 4 % high), 0

    def elements(self):
        n = range(self.n)
        return ((b, i, j) for b in range(self.blocks) for i in n for j in n)

    def put_c(self, wave: Wave, first: int, bits: np.ndarray) -> None:
        for b, i, j in self.elements():
            r, lane, shift = self.place(b, i, j)
            x = int(bits[b, i, j])
            wave.v[first + r, lane] |= np.uint32((x << shift) & 0xFFFFFFFF)
            if self.d == "f64":
                wave.v[first + r + 1, lane] = np.uint32(x >> 32)

    def get(self, wave: Wave, first: int) -> np.ndarray:
        out = np.zeros((self.blocks, self.n, self.n), np.uint64)
        for b, i, j in self.elements():
            r, lane, shift = self.place(b, i, j)
            x = int(wave.v[first + r, lane]) >> shift
            if self.d == "f64":
                x |= int(wave.v[first + r + 1, lane]) << 32
            out[b, i, j] = x & ((1 << BITS.get(self.d, 32)) - 1)
        return out


def random_bits(rng: np.random.Generator, form: str, shape: tuple, finite: bool) -> np.ndarray:
    """Ordinary numbers and denormals; with finite=False infinities, NaNs and signed zeros more often."""
    size = BITS.get(form, 8)
    x = rng.integers(0, 1 << min(size, 63), shape, dtype=np.uint64)
    if form in ("f16", "bf16", "f32", "xf32", "f64"):
        flt = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
        if form == "f64":
            x = flt.view(np.uint64)
        elif form == "f16":
            x = flt.astype(np.float16).view(np.uint16).astype(np.uint64)
        else:
            x = flt.astype(np.float32).view(np.uint32).astype(np.uint64) >> np.uint64(16 if form == "bf16" else 0)
        # denormals; not so small that fp32 could not hold a product
        tiny = rng.integers(0, 1 << 10, shape).astype(np.uint64) if form == "f16" else x
        x = np.where(rng.integers(0, 8, shape) == 0, tiny, x)
    if not finite:
        # in a quarter of the rows
        kind = rng.integers(0, 40, shape) + 3 * (np.arange(shape[1]) % 4 > 0)[None, :, None]
        top = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "xf32": 0x7F800000, "bf8": 0x7C, "fp8": 0x7F}.get(form)
        if top is not None:
            x = np.where(kind == 0, np.uint64(top), x)
            x = np.where(kind == 1, np.uint64(top | 1 << (size - 1)), x)
            x = np.where(kind == 2, np.uint64(top | 1), x)
        x = np.where((kind > 2) & (kind < 12), np.uint64(1 << (size - 1)), x)
        x = np.where((kind >= 12) & (kind < 20), np.uint64(0), x)
    return x


def encode(x: np.ndarray, form: str) -> np.ndarray:
    """float64 as bits of C's format, rounded to nearest even."""
    if form == "i32":
        return x.astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    if form == "f64":
        return x.view(np.uint64)
    if form == "bf16":
        return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().astype(np.uint16).astype(np.uint64)
    flt = np.float16 if form == "f16" else np.float32
    return x.astype(flt).view(np.uint16 if form == "f16" else np.uint32).astype(np.uint64)


def run(s: Shape, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, mods: str = "") -> list[np.ndarray]:
    """Bits of D [blocks, n, n]: with C in its own registers and in D's; c None: with the constant 0.

    a: [blocks, n, k]; b: [blocks, columns, k]; c: [blocks, n, n].
    """
    d, *sizes = s.sizes()
    at_a, at_b, first = 0, sizes[0] + sizes[0] % 2, sizes[0] + sizes[1] + 2
    first += first % 2
    places = [first + d * i for i in range(3)]
    sources = f"{register('v', at_a, sizes[0])}, {register('v', at_b, sizes[1])}"
    pairs = [(places[0], "0")] if c is None else [(places[0], places[2]), (places[1], places[1])]
    lines = [
        f"v_{s.name} {register('v', to, d)}, {sources}, {x if x == '0' else register('v', x, d)} {mods}".strip()
        for to, x in pairs
    ]
    wave = Wave(s.arch, [*lines, f"v_mov_b32 v{places[2] + d}, 0"])
    s.put(wave, at_a, a, s.a)
    s.put(wave, at_b, b, s.b)
    if c is not None:
        s.put_c(wave, places[1], c)
        s.put_c(wave, places[2], c)
    # matrix instructions do not look at exec on gfx9
    wave.exec = (1 << wave.lanes) - 1 if s.wmma else 0x123
    wave.run()
    return [s.get(wave, to) for to, _ in pairs]


def exact(a: np.ndarray, b: np.ndarray, c: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(a @ b^T + c, the same of absolute values) in extended precision."""
    a, b = a.astype(np.longdouble), b.astype(np.longdouble)
    return a @ b.swapaxes(1, 2) + c, np.abs(a) @ np.abs(b).swapaxes(1, 2) + np.abs(c)


def check(results: list[np.ndarray], a: np.ndarray, b: np.ndarray, c: np.ndarray | float, s: Shape) -> None:
    for got in results:
        check_one(got, a, b, c, s)


def check_one(got: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | float, s: Shape) -> None:
    want, total = exact(a, b, c)
    if s.d == "i32":
        np.testing.assert_array_equal(got, want.astype(np.int64).astype(np.uint64) & np.uint64(0xFFFFFFFF))
        return
    result = number(got, s.d).astype(np.longdouble)
    bound = s.k * 2.0 ** (-53 if s.d == "f64" else -24) * total
    if s.d in ("f16", "bf16"):
        # rounded once more, to 11 or 8 significant bits
        unit, smallest = (2.0**-11, 2.0**-25) if s.d == "f16" else (2.0**-8, 0.0)
        bound = bound * (1 + unit) + unit * np.abs(want) + smallest
        if s.d == "f16":
            # what is too large becomes infinite
            large = np.abs(want) > 65519
            assert (np.abs(result[large]) > 65000).all()
            result, want, bound = result[~large], want[~large], bound[~large]
    # products of fp32 are not exact, but rounded with the sum
    assert (np.abs(result - want) <= bound).all(), float((np.abs(result - want) - bound).max())


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_matrix_product(name):
    """Random operands with denormals; C in its own registers, in D's, and the constant 0."""
    s, rng = Shape(name), np.random.default_rng(17)
    a = random_bits(rng, s.a, (s.blocks, s.n, s.k), True)
    b = random_bits(rng, s.b, (s.blocks, s.n, s.k), True)
    for form, x in ((s.a, a), (s.b, b)):
        if form in ("fp8", "bf8"):
            x[~np.isfinite(number(x, form))] = 0x3A
    c = encode(rng.integers(-50, 50, (s.blocks, s.n, s.n)).astype(np.float64), s.d)
    mods, signed = "", True
    if s.a.startswith("iu"):
        mods = "neg_lo:[1,1,0]"
    values = [number(x, form, signed=signed) for x, form in ((a, s.a), (b, s.b))]
    if s.a == "xf32":
        values = [round_xf32(x) for x in values]
    c_value = c.astype(np.int64).astype(np.int32) if s.d == "i32" else number(c, s.d)
    check(run(s, a, b, c, mods), *values, c_value, s)
    check(run(s, a, b, None, mods), *values, 0.0, s)


def round_xf32(x: np.ndarray) -> np.ndarray:
    """To 11 significant bits, to nearest even."""
    m, e = np.frexp(x)
    return np.ldexp(np.rint(m * 2048) / 2048, e)


SPECIAL = [
    "mfma_f32_32x32x8_f16", "mfma_f32_16x16x32_bf16", "mfma_f32_16x16x4_f32", "mfma_f32_32x32x4_xf32",
    "mfma_f32_16x16x32_fp8_bf8", "wmma_f32_16x16x16_bf16", "wmma_f32_16x16x32_f16", "wmma_f32_16x16x4_f32",
    "wmma_f32_16x16x64_bf8_fp8",
]  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name):
    """Infinities, NaNs, signed zeros: the class and the sign of every result."""
    s, rng = Shape(name), np.random.default_rng(23)
    a = random_bits(rng, s.a, (1, s.n, s.k), False)
    b = random_bits(rng, s.b, (1, s.n, s.k), False)
    # rows of zeros, whose sums keep a sign; others have infinities and NaNs
    a[0, 1::3] &= np.uint64(1 << (BITS.get(s.a, 8) - 1))
    c = random_bits(rng, "f32", (1, s.n, s.n), False)
    x, y, z = number(a, s.a), number(b, s.b), number(c, "f32")
    with np.errstate(all="ignore"):
        terms = x[0][:, None, :] * y[0][None, :, :]
        want = z[0].copy()
        for k in range(s.k):
            want = want + terms[:, :, k]
    got = number(run(s, a, b, c)[0], "f32")[0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite])
    zero = (terms == 0).all(2) & (z[0] == 0)
    assert zero.any()
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
    assert np.isfinite(got[~np.isnan(want) & ~infinite]).all()


@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_fnuz_formats_of_gfx942(form):
    """gfx942's 8-bit floats have another bias, one NaN and no negative zero."""
    s, rng = Shape(f"mfma_f32_32x32x16_{form}_{form}"), np.random.default_rng(29)
    s.arch = "gfx942"
    a, b = (rng.integers(0, 256, (1, 32, 16), dtype=np.uint64) for _ in range(2))
    a[a == 0x80], b[b == 0x80] = 0x81, 0x81
    a[0, 5, 3] = 0x80
    got = number(run(s, a, b, None)[0], "f32")
    assert np.isnan(got[0, 5]).all()
    rows = np.arange(32) != 5
    x, y = number(a, form, fnuz=True), number(b, form, fnuz=True)
    want, total = exact(x[:, rows], y, 0.0)
    assert (np.abs(got[:, rows] - want) <= 16 * 2.0**-24 * total).all()


@pytest.mark.parametrize("name", ["wmma_f32_16x16x16_f16", "wmma_f32_16x16x32_bf16", "wmma_f16_16x16x16_f16"])
@pytest.mark.parametrize(
    ("lo", "hi"),
    [
        ((1, 0, 0), (1, 0, 0)),
        ((0, 1, 0), (0, 1, 0)),
        ((1, 0, 1), (0, 1, 0)),
        ((0, 0, 1), (0, 0, 1)),
        ((0, 0, 0), (0, 0, 1)),
    ],
)
def test_signs_of_wmma(name, lo, hi):
    """neg_lo and neg_hi flip the even and odd elements of A and B; for C they mean a sign and an absolute value."""
    s, rng = Shape(name), np.random.default_rng(31)
    a, b = (random_bits(rng, s.a, (1, 16, s.k), True) for _ in range(2))
    c = encode(rng.integers(-50, 50, (1, 16, 16)).astype(np.float64), s.d)
    mods = f"neg_lo:[{','.join(map(str, lo))}] neg_hi:[{','.join(map(str, hi))}]"
    flip = [np.where(np.arange(s.k) % 2, -1.0 if hi[i] else 1.0, -1.0 if lo[i] else 1.0) for i in range(2)]
    z = number(c, s.d)
    z = np.abs(z) if hi[2] else z
    check(run(s, a, b, c, mods), number(a, s.a) * flip[0], number(b, s.b) * flip[1], -z if lo[2] else z, s)


@pytest.mark.parametrize("name", ["wmma_i32_16x16x16_iu8", "wmma_i32_16x16x64_iu8", "wmma_i32_16x16x16_iu4"])
@pytest.mark.parametrize("signed", [(0, 0), (1, 0), (0, 1)])
def test_unsigned_integers(name, signed):
    s, rng = Shape(name), np.random.default_rng(37)
    a, b = (random_bits(rng, s.a, (1, 16, s.k), True) for _ in range(2))
    values = [number(x, s.a, signed=bool(f)) for x, f in zip((a, b), signed, strict=True)]
    check(run(s, a, b, None, f"neg_lo:[{signed[0]},{signed[1]},0]"), *values, 0, s)


@pytest.mark.parametrize(("cbsz", "abid"), [(1, 0), (1, 1), (2, 3), (4, 5)])
def test_broadcast_of_blocks(cbsz, abid):
    """cbsz, abid: all blocks of a group of 2**cbsz take A from the group's block abid."""
    s, rng = Shape("mfma_f32_4x4x4_16b_f16"), np.random.default_rng(41)
    a, b = (random_bits(rng, "f16", (16, 4, 4), True) for _ in range(2))
    source = (np.arange(16) >> cbsz << cbsz) + abid
    check(run(s, a, b, None, f"cbsz:{cbsz} abid:{abid}"), number(a, "f16")[source], number(b, "f16"), 0.0, s)


def test_c_and_d_overlap():
    """D and C are two ranges that share registers: no row of C may be overwritten before it is used."""
    s, rng = Shape("mfma_f32_32x32x8_f16"), np.random.default_rng(47)
    a, b = (random_bits(rng, "f16", (1, 32, 8), True) for _ in range(2))
    c = encode(rng.integers(-50, 50, (1, 32, 32)).astype(np.float64), "f32")
    for d_at, c_at in ((4, 0), (0, 4)):
        wave = Wave("gfx942", [f"v_{s.name} v[{d_at}:{d_at + 15}], v[40:41], v[50:51], v[{c_at}:{c_at + 15}]"])
        s.put(wave, 40, a, "f16")
        s.put(wave, 50, b, "f16")
        s.put_c(wave, c_at, c)
        wave.run()
        check([s.get(wave, d_at)], number(a, "f16"), number(b, "f16"), number(c, "f32"), s)


@pytest.mark.parametrize(
    ("arch", "line", "message"),
    [
        ("gfx942", "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], 0 blgp:1", "blgp"),
        ("gfx942", "v_mfma_f32_32x32x8_f16 v[0:14], v[16:17], v[18:19], 0", "registers"),
        ("gfx942", "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[16:17], v[18:19], 0 cbsz:1 abid:2", "cbsz"),
        ("gfx942", "v_smfmac_f32_16x16x32_f16 v[0:3], v[16:17], v[18:21], v22", "no semantics"),
        ("gfx1201", "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], 0", "no semantics"),
        ("gfx1201", "v_wmma_f32_16x16x16_fp8_fp8 v[0:7], v[16:17], v[18:19], 0 neg_lo:[1,0,0]", "neg_lo"),
        ("gfx1201", "v_wmma_i32_16x16x16_iu8 v[0:7], v[16:17], v[18:19], 0 clamp", "clamp"),
        ("gfx1201", "v_wmma_f32_16x16x16_f16 v[0:7], v[16:19], s[0:3], 0", "operand"),
    ],
)
def test_refused(arch, line, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        Wave(arch, [line])
