"""Products of any mix of 8-, 6- and 4-bit floats, with and without scales, against numpy.

Layouts and meanings of the scales: AMD's CDNA4 ISA document (MFMA); for gfx1250 LLVM's description of
`amdgpu.scaled_wmma` and AMD's public emulator rocjitsu, which agree with how Triton lays out its operands.
"""

from __future__ import annotations

import numpy as np
import pytest

from mori_triton.errors import UnsupportedInstruction
from tests.emulator.harness import Wave, register
from tests.emulator.test_isa_matrix import Shape, check, check_one, encode, number, random_bits, run

pytestmark = pytest.mark.cpu

FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")
PAIRS = [("fp8", "fp8"), ("bf8", "bf8"), ("fp6", "fp6"), ("bf6", "fp4"), ("fp8", "fp4"), ("fp6", "bf8")]
# the second shape's layout is that of the product with scales, which is checked below
SHAPES = [
    "mfma_f32_16x16x128_f8f6f4", pytest.param("mfma_f32_32x32x64_f8f6f4", marks=pytest.mark.slow),
    "wmma_f32_16x16x128_f8f6f4",
]  # fmt: skip


def format_modifiers(name: str, a_form: str, b_form: str) -> str:
    if name.startswith("mfma"):
        return f"cbsz:{FORMATS.index(a_form)} blgp:{FORMATS.index(b_form)}"
    # as the assembler prints them: not for the first format
    pairs = (("a", a_form), ("b", b_form))
    return " ".join(f"matrix_{x}_fmt:MATRIX_FMT_{form.upper()}" for x, form in pairs if form != "fp8")


def ordinary(rng: np.random.Generator, form: str, shape: tuple) -> np.ndarray:
    """Any finite numbers, denormals among them."""
    x = random_bits(rng, form, shape, True)
    x[~np.isfinite(number(x, form))] = 0x3A
    return x


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("a_form", "b_form"), PAIRS)
def test_any_format(name, a_form, b_form):
    s, rng = Shape(name, a_form, b_form), np.random.default_rng(43)
    a, b = (ordinary(rng, t, (1, s.n, s.k)) for t in (a_form, b_form))
    check(run(s, a, b, None, format_modifiers(name, a_form, b_form)), number(a, a_form), number(b, b_form), 0.0, s)


def factor(codes: np.ndarray, form: str = "E8") -> np.ndarray:
    """Scales as numbers: E8M0 and E4M3 of OCP, E5M3 as fp16 without its sign; the largest code of each is a NaN."""
    codes = codes.astype(np.uint64)
    if form == "E8":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))
    if form == "E4M3":
        return number(codes, "fp8")
    exponent, mantissa = codes.astype(np.int64) >> 3, (codes & np.uint64(7)).astype(np.int64)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -14), np.ldexp(1 + mantissa / 8, exponent - 15))
    return np.where(codes == 255, np.nan, value)


class Scaled:
    """One scaled product: random registers around what counts, numbers of [row or column, k] with their scales applied.

    scales: codes, uint64 [2, n, blocks].
    """

    def __init__(
        self, name: str, forms: tuple[str, str], scales: np.ndarray, mods: str, *, part: tuple[int, int]
    ) -> None:
        s, rng = Shape(name, *forms), np.random.default_rng(53)
        self.s, self.forms = s, forms
        self.codes = [ordinary(rng, t, (1, s.n, s.k)) for t in forms]
        self.c = encode(rng.integers(-50, 50, (1, s.n, s.n)).astype(np.float64), "f32")
        self.scales, self.part, self.rng = scales, part, rng
        d, *sizes = s.sizes()
        registers = 2 if "scale16" in name else 1
        places = ((60, d), (0, sizes[0]), (16, sizes[1]), (80, d), (100, registers), (102, registers))
        line = f"v_{name} {', '.join(register('v', r, n) for r, n in places)} {mods}"
        self.wave = Wave(s.arch, [line.strip()])
        self.wave.v[:] = rng.integers(0, 1 << 32, self.wave.v.shape, dtype=np.uint64)

    def put_scales(self) -> None:
        s, v = self.s, self.wave.v
        for source, (at, part) in enumerate(zip((100, 102), self.part, strict=True)):
            for i in range(s.n):
                for b in range(self.scales.shape[2]):
                    if s.wmma:
                        # a row's blocks are the bytes of one lane; part: the half of the wave
                        r, lane, shift = at + b // 4, i + 16 * part, 8 * (b % 4)
                    else:
                        # a row's blocks are in one byte of several lanes; part: which byte
                        r, lane, shift = at, i + s.n * b, 8 * part
                    old = int(v[r, lane]) & ~(255 << shift)
                    v[r, lane] = old | int(self.scales[source, i, b]) << shift

    def run(self) -> np.ndarray:
        s = self.s
        for at, codes, form in zip((0, 16), self.codes, self.forms, strict=True):
            s.put(self.wave, at, codes, form)
        self.wave.v[80 : 80 + s.sizes()[0]] = 0
        s.put_c(self.wave, 80, self.c)
        self.put_scales()
        self.wave.run()
        return s.get(self.wave, 60)

    def values(self, formats: tuple[str, str] = ("E8", "E8")) -> list[np.ndarray]:
        per_block = self.s.k // self.scales.shape[2]
        return [
            number(codes, form) * np.repeat(factor(self.scales[i], formats[i]), per_block, axis=1)
            for i, (codes, form) in enumerate(zip(self.codes, self.forms, strict=True))
        ]


@pytest.mark.parametrize("name", ["mfma_scale_f32_16x16x128_f8f6f4", "mfma_scale_f32_32x32x64_f8f6f4"])
@pytest.mark.parametrize("forms", [("fp8", "fp8"), ("fp4", "fp4"), ("bf8", "fp4"), ("fp6", "bf6")])
def test_scaled_mfma(name, forms):
    """Every 32 consecutive k of a row of A (a column of B) have a power of two; the scale 255 is a NaN."""
    n, k = (16, 128) if "16x16" in name else (32, 64)
    scales = np.random.default_rng(5).integers(120, 135, (2, n, k // 32))
    scales[0, 3, 1] = 255
    mods = f"op_sel:[1,0,0] op_sel_hi:[1,0,0] {format_modifiers(name, *forms)}"
    product = Scaled(name, forms, scales, mods, part=(3, 0))
    got = product.run()
    assert np.isnan(number(got, "f32")[0, 3]).all()
    rows = np.arange(n) != 3
    x, y = product.values()
    check_one(got[:, rows], x[:, rows], y, number(product.c, "f32")[:, rows], product.s)


@pytest.mark.parametrize("name", ["wmma_scale_f32_16x16x128_f8f6f4", "wmma_scale16_f32_16x16x128_f8f6f4"])
@pytest.mark.parametrize(
    ("forms", "rows", "formats"),
    [
        (("fp8", "fp8"), (0, 0), ("E8", "E8")),
        (("fp4", "fp4"), (1, 0), ("E4M3", "E4M3")),
        (("fp4", "bf8"), (0, 1), ("E8", "E8")),
        (("bf6", "fp6"), (1, 1), ("E5M3", "E8")),
        (("fp8", "fp4"), (0, 0), ("E4M3", "E5M3")),
    ],
)
def test_scaled_wmma(name, forms, rows, formats):
    """Scales of each 32 or 16 consecutive k, from either half of the wave, in three formats; C negated."""
    scales = np.random.default_rng(6).integers(0x20, 0x60, (2, 16, 8 if "scale16" in name else 4))
    for i, form in enumerate(formats):
        if form == "E8":
            scales[i] = scales[i] % 16 + 119
    # NaNs of a row and of a column
    scales[0, 3, 1], scales[1, 5, 2] = (0x7F if form == "E4M3" else 0xFF for form in formats)
    mods = [format_modifiers(name, *forms)]
    mods += [f"matrix_{x}_scale:MATRIX_SCALE_ROW1" for x, row in zip("ab", rows, strict=True) if row]
    mods += [f"matrix_{x}_scale_fmt:MATRIX_SCALE_FMT_{f}" for x, f in zip("ab", formats, strict=True) if f != "E8"]
    product = Scaled(name, forms, scales, " ".join([*mods, "neg_lo:[0,0,1]"]), part=rows)
    got = product.run()
    nan = np.isnan(number(got, "f32")[0])
    assert nan[3].all()
    assert nan[:, 5].all()
    assert nan.sum() == 31
    x, y = product.values(formats)
    c = -number(product.c, "f32")
    for row in range(16):
        if row != 3:
            keep = np.arange(16) != 5
            check_one(got[:, [row]][:, :, keep], x[:, [row]], y[:, keep], c[:, [row]][:, :, keep], product.s)


@pytest.mark.parametrize(
    ("name", "mods"),
    [
        ("mfma_scale_f32_16x16x128_f8f6f4", "op_sel_hi:[0,0,0] cbsz:1 blgp:4"),
        ("wmma_scale_f32_16x16x128_f8f6f4", "matrix_a_fmt:MATRIX_FMT_BF8 matrix_b_fmt:MATRIX_FMT_FP4"),
    ],
)
def test_limits_of_scaled_products(name, mods):
    """Scales from 2**-127 to 2**127: to infinity, zero and denormals, with one rounding; infinite and NaN elements."""
    rng = np.random.default_rng(8)
    scales = rng.integers(0, 255, (2, 16, 4))
    # the exponents of a row cancel those of a column, or do not
    scales[1, :8] = 254 - scales[0, :8]
    # and some become denormal
    scales[0, 9], scales[1, 8:12] = 30, rng.integers(90, 110, (4, 4))
    product = Scaled(name, ("bf8", "fp4"), scales, mods, part=(0, 0))
    product.codes[0][0, ::4] = rng.integers(0, 256, (4, 128))
    # denormals alone
    product.codes[0][0, 1::8] &= np.uint64(0x83)
    product.c[:] = 0
    got = number(product.run(), "f32")[0]
    x, y = (v[0].astype(np.longdouble) for v in product.values())
    with np.errstate(all="ignore"):
        blocks = [x[:, b : b + 32] @ y[:, b : b + 32].T for b in range(0, 128, 32)]
        sizes = sum(np.abs(x[:, b : b + 32]) @ np.abs(y[:, b : b + 32]).T for b in range(0, 128, 32))
        want = sum(blocks)
    top = float(np.finfo(np.float32).max)
    unknown = np.isnan(want)
    assert 0 < unknown.sum() < 128
    # blocks that overflow with both signs are a NaN
    beyond = np.stack([np.abs(b) > top * (1 - 2.0**-15) for b in blocks]).any(0) | np.isinf(want)
    exact = ~unknown & ~beyond & (np.abs(want) < top * (1 - 2.0**-15))
    assert beyond.any()
    assert (exact & (want != 0) & (np.abs(want) < 2.0**-126)).any()
    assert np.isnan(got[unknown]).all()
    error = np.abs(got[exact] - want[exact])
    assert (error <= 128 * 2.0**-24 * sizes[exact] + 4 * 2.0**-150).all()
    assert not np.isfinite(got[beyond & (np.abs(want) > 2 * top)]).any()


@pytest.mark.parametrize(
    ("arch", "line", "message"),
    [
        ("gfx1250", "v_wmma_scale_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0, v40, 1.0", "operand"),
        ("gfx1250", "v_wmma_scale_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0, v[40:41], v42", "registers"),
        ("gfx1250", "v_wmma_scale16_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0, v40, v42", "registers"),
        ("gfx1250", "v_wmma_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0 neg_lo:[1,0,0]", "neg_lo"),
        (
            "gfx1250",
            "v_wmma_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0 matrix_a_fmt:MATRIX_FMT_FP6",
            "registers",
        ),
        (
            "gfx1250",
            "v_wmma_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0 matrix_a_scale:MATRIX_SCALE_ROW1",
            "scale",
        ),
        ("gfx950", "v_wmma_f32_16x16x128_f8f6f4 v[0:7], v[8:23], v[24:39], 0", "no semantics"),
        ("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21", "op_sel_hi"),
    ],
)
def test_refused(arch, line, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        Wave(arch, [line])
