"""Conversions of 8-, 6- and 4-bit floats against torch and the formats' definitions: every code, scales, halves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mori_triton.errors import UnsupportedInstruction
from tests.emulator import operands
from tests.emulator.harness import Wave, register
from tests.emulator.test_isa_matrix import TINY, TORCH, number

pytestmark = pytest.mark.cpu

ONE = 127 << 23
# what destinations hold before
KEPT = 0xA1B2C3D4
LARGE = {"f32": (torch.float32, 32), "f16": (torch.float16, 16), "bf16": (torch.bfloat16, 16)}
TOP = {("fp8", False): 448.0, ("bf8", False): 57344.0, ("fp8", True): 240.0, ("bf8", True): 57344.0}


def encoded(x: np.ndarray, form: str, exponent: np.ndarray) -> np.ndarray:
    """float64 / 2**exponent as codes of the OCP format: nearest even, saturated; bf8 keeps infinities."""
    with np.errstate(all="ignore"):
        scaled = np.ldexp(x, -exponent)
    if form in TINY:
        return nearest(scaled, form)
    limited = np.clip(scaled, -TOP[form, False], TOP[form, False])
    limited = np.where(np.isinf(x) & (form == "bf8"), x, limited)
    return torch.from_numpy(limited).to(TORCH[form, False]).view(torch.uint8).numpy()


def nearest(x: np.ndarray, form: str) -> np.ndarray:
    """Codes of 6- or 4-bit floats: the nearest number, of two equally near ones the even code; NaN gives 0."""
    half = 1 << (sum(TINY[form][:2]))
    table = number(np.arange(half, dtype=np.uint64), form)
    # a source has 24 bits: what is not a middle, of which the least is 1/32, is off it by at least 2**-29
    away = np.abs(np.minimum(np.abs(x), table[-1])[..., None] - table) + 2.0**-30 * (np.arange(half) % 2)
    code = np.argmin(np.where(np.isnan(away), 0.0, away), axis=-1)
    return np.where(np.isnan(x), 0, code + half * np.signbit(x)).astype(np.uint8)


def same(got: np.ndarray, want: np.ndarray, form: str) -> None:
    nan = np.isnan(number(want.astype(np.uint64), form))
    np.testing.assert_array_equal(np.isnan(number(got.astype(np.uint64), form)), nan)
    np.testing.assert_array_equal(got[~nan], want[~nan])


def sources(rng: np.random.Generator, large: str, shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """(bits, values): everything, and many numbers in the range of 8-bit floats."""
    letter = {"f32": "f", "f16": "e", "bf16": "f"}[large]
    n = int(np.prod(shape))
    near = (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 10, n)).astype(np.float32)
    anything = operands.values(rng, letter, n)
    if large == "f16":
        bits = np.where(rng.integers(0, 2, n) == 1, anything, near.astype(np.float16).view(np.uint16))
    else:
        bits = np.where(rng.integers(0, 2, n) == 1, anything, near.view(np.uint32))
        bits = bits >> np.uint64(16) if large == "bf16" else bits
    return bits.reshape(shape), number(bits.astype(np.uint64), large).reshape(shape)


def narrow_pairs(
    wave: Wave, rng: np.random.Generator, large: str, span: int, destinations: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run what converts v0, v1 (or both halves of v0) by v2 into parts of v4 and on, in some lanes.

    The numbers `[2, 64]`, the scales' exponents, in [-span, span), and the lanes that are active.
    """
    bits, x = sources(rng, large, (2, 64))
    wave.v[0], wave.v[1] = (bits[0], bits[1]) if large == "f32" else (bits[0] | bits[1] << np.uint64(16), 0)
    exponents = rng.integers(-span, span, 64)
    wave.v[2] = (exponents + 127) << 23 | rng.integers(0, 1 << 23, 64)
    wave.v[4 : 4 + destinations] = KEPT
    wave.exec = int(rng.integers(0, 1 << 63))
    active = np.array([wave.exec >> lane & 1 for lane in range(64)], bool)
    wave.run()
    return x, exponents, active


@pytest.mark.parametrize("large", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_narrow_in_pairs(form, large):
    """gfx950: two numbers to one half of the destination, the other half and inactive lanes keep theirs."""
    src = "v0, v1" if large == "f32" else "v0"
    zeros = "[0,0,0,1]" if large == "f32" else "[0,0,1]"
    name = f"v_cvt_scalef32_pk_{form}_{large}"
    wave = Wave("gfx950", [f"{name} v4, {src}, 1.0", f"{name} v5, {src}, v2 op_sel:{zeros}"])
    rng = np.random.default_rng(5)
    for _ in range(4):
        x, exponents, active = narrow_pairs(wave, rng, large, span=20, destinations=2)
        for at, shift, e in ((4, 0, 0 * exponents), (5, 16, exponents)):
            got = wave.v[at] >> shift & 0xFFFF
            assert (wave.v[at] >> (16 - shift) & 0xFFFF == KEPT >> (16 - shift) & 0xFFFF).all()
            assert (wave.v[at, ~active] == KEPT).all()
            for i in range(2):
                same(got[active] >> (8 * i) & 255, encoded(x[i], form, e)[active].astype(np.uint32), form)


@pytest.mark.parametrize("large", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_eight_at_once(form, large):
    """gfx1250: eight numbers down, and back with a scale."""
    registers = 8 if large == "f32" else 4
    wave = Wave(
        "gfx1250",
        [
            f"v_cvt_scalef32_pk8_{form}_{large} v[20:21], v[0:{registers - 1}], 4.0",
            f"v_cvt_scale_pk8_{large}_{form} v[30:{29 + registers}], v[20:21], 0x81",
        ],
    )
    bits, x = sources(np.random.default_rng(6), large, (8, 32))
    if large == "f32":
        wave.v[:8] = bits
    else:
        wave.v[:4] = bits[::2] | bits[1::2] << np.uint64(16)
    wave.run()
    codes = np.stack([wave.v[20 + i // 4] >> (8 * (i % 4)) & 255 for i in range(8)])
    same(codes, encoded(x, form, np.array(2)).astype(np.uint32), form)
    check_widened(wave.v[30 : 30 + registers], codes, form, large, 2)


@pytest.mark.parametrize("large", ["f32", "f16", "bf16"])
def test_narrow_to_4_bits_in_pairs(large):
    """gfx950: two numbers to one byte of the destination; the others, and inactive lanes, keep theirs."""
    src = "v0, v1" if large == "f32" else "v0"
    selects = ["", " op_sel:[0,0,1,0]", " op_sel:[0,0,0,1]", " op_sel:[0,0,1,1]"]
    wave = Wave("gfx950", [f"v_cvt_scalef32_pk_fp4_{large} v{4 + i}, {src}, v2{x}" for i, x in enumerate(selects)])
    x, exponents, active = narrow_pairs(wave, np.random.default_rng(12), large, span=8, destinations=4)
    codes = [encoded(x[i], "fp4", exponents).astype(np.uint32) for i in range(2)]
    for i in range(4):
        kept = KEPT & ~(255 << (8 * i))
        want = np.where(active, (codes[0] | codes[1] << 4) << (8 * i) | kept, KEPT)
        np.testing.assert_array_equal(wave.v[4 + i], want)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """[numbers, lanes] one behind the other, as registers."""
    out = np.zeros((-(-len(codes) * bits // 32), codes.shape[1]), np.uint32)
    for lane in range(codes.shape[1]):
        whole = sum(int(code) << (bits * i) for i, code in enumerate(codes[:, lane]))
        for r in range(len(out)):
            out[r, lane] = whole >> (32 * r) & 0xFFFFFFFF
    return out


SIXES = [("fp6", "f32"), ("bf6", "f16"), ("fp6", "bf16"), ("bf6", "f32")]
MANY = [("gfx950", form, large, 32) for form, large in SIXES]
MANY += [("gfx1250", form, large, 16) for form, large in SIXES[:3]]
MANY += [("gfx1250", "fp4", large, 8) for large in LARGE]


@pytest.mark.parametrize(("arch", "form", "large", "count"), MANY)
def test_many_at_once(arch, form, large, count):
    """Down to 6 or 4 bits with a scale for each lane, one of them a NaN, and back."""
    bits = 4 if form == "fp4" else 6
    wide, small = count // (1 if large == "f32" else 2), -(-count * bits // 32)
    separate = arch == "gfx950" and large == "f32"
    src = "v[0:15], v[16:31]" if separate else f"v[0:{wide - 1}]"
    down, up = ("scalef32_2xpk16" if separate else f"scalef32_pk{count}"), "scalef32" if arch == "gfx950" else "scale"
    to = register("v", 40, small)
    lines = [
        f"v_cvt_{down}_{form}_{large} {to}, {src}, v50",
        f"v_cvt_{up}_pk{count}_{large}_{form} {register('v', 60, wide)}, {to}, v51",
    ]
    wave, rng = Wave(arch, lines), np.random.default_rng(13)
    lanes = wave.lanes
    raw, x = sources(rng, large, (count, lanes))
    if separate:
        wave.v[0:16], wave.v[16:32] = raw[::2], raw[1::2]
    else:
        wave.v[:wide] = raw if large == "f32" else raw[::2] | raw[1::2] << np.uint64(16)
    exponents = rng.integers(-8, 8, lanes)
    wave.v[50] = (exponents + 127) << 23 | rng.integers(0, 1 << 23, lanes)
    wave.v[50, 3] = 255 << 23
    back = rng.integers(-20, 10, lanes)
    if arch == "gfx950":
        wave.v[51] = (back + 127) << 23
    else:
        # in both halves of the wave those of the first 16 lanes, a byte each
        wave.v[51] = (back[:16] + 127 | (back[16:] + 127) << 8 | 0x55 << 16).repeat(2).reshape(16, 2).T.ravel()
        wave.v[51, 16:] ^= 0xFFFF
    wave.run()
    codes = encoded(x, form, exponents)
    codes[:, 3] = 0
    np.testing.assert_array_equal(wave.v[40 : 40 + small], packed(codes, bits))
    check_widened(wave.v[60 : 60 + wide], codes, form, large, back)


@pytest.mark.parametrize("select", [0, 8])
def test_scales_of_lanes(select):
    """gfx1250, 8-bit floats: the low byte of the first half's lanes for both halves, or a byte for each half."""
    mods = " scale_sel:8" if select else ""
    wave, rng = Wave("gfx1250", [f"v_cvt_scale_pk8_f32_bf8 v[4:11], v[0:1], v2{mods}"]), np.random.default_rng(14)
    codes = rng.integers(0, 256, (8, 32))
    wave.v[:2] = packed(codes, 8)
    wave.v[2] = rng.integers(0, 1 << 32, 32)
    wave.v[2, 5] = 0xFFFF
    wave.run()
    lane = np.arange(32)
    scale = wave.v[2][lane % 16].astype(np.int64) >> np.where(select, lane // 16 * 8, 0) & 255
    with np.errstate(over="ignore"):
        check_widened(wave.v[4:12], codes, "bf8", "f32", scale - 127)


def check_widened(
    got: np.ndarray, codes: np.ndarray, form: str, large: str, exponent: int | np.ndarray, fnuz: bool = False
) -> None:
    """got: registers; codes [numbers, lanes]; exponent: of the scale, 128 for a NaN."""
    dtype, bits = LARGE[large]
    exact = np.ldexp(number(codes.astype(np.uint64), form, fnuz), exponent)
    want = torch.from_numpy(np.where(exponent == 128, np.nan, exact)).to(dtype)
    if bits == 16:
        got = np.stack([got[i // 2] >> (16 * (i % 2)) & 0xFFFF for i in range(len(codes))])
    value = number(got.astype(np.uint64), large)
    np.testing.assert_array_equal(value, want.double().numpy())
    zero = value == 0
    np.testing.assert_array_equal(np.signbit(value[zero]), np.signbit(want.double().numpy()[zero]))


@pytest.mark.parametrize("large", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", ["fp8", "bf8", "fp4"])
def test_widen_in_pairs(form, large):
    """gfx950: every code, from each part of the source."""
    wide = 2 if large == "f32" else 1
    parts = [(0, 0), (1, 0)] if form != "fp4" else [(0, 0), (1, 0), (0, 1), (1, 1)]
    lines = [
        f"v_cvt_scalef32_pk_{large}_{form} {register('v', 10 + 2 * i, wide)}, v0, 0.5 op_sel:[{p[0]},{p[1]},0]"
        for i, p in enumerate(parts)
    ]
    wave, rng = Wave("gfx950", lines), np.random.default_rng(8)
    for i in range(2):
        source = np.arange(256, dtype=np.uint8)[128 * i : 128 * i + 128] if i else rng.integers(0, 256, 256, np.uint8)
        wave.v[0] = np.resize(source, 256).view(np.uint32)
        wave.run()
        for j, (a, b) in enumerate(parts):
            low, size = (16 * a, 8) if form != "fp4" else (8 * (a + 2 * b), 4)
            codes = np.stack([wave.v[0] >> (low + size * n) & ((1 << size) - 1) for n in range(2)])
            check_widened(wave.v[10 + 2 * j : 10 + 2 * j + wide], codes, form, large, -1)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
@pytest.mark.parametrize("form", ["fp8", "bf8"])
def test_widen_without_scale(arch, form):
    old = arch == "gfx942"
    if old:
        lines = [f"v_cvt_pk_f32_{form}_e32 v[4:5], v0", f"v_cvt_pk_f32_{form}_sdwa v[6:7], v0 src0_sel:WORD_1"]
        lines += [f"v_cvt_f32_{form}_e32 v8, v0", f"v_cvt_f32_{form}_sdwa v9, v0 src0_sel:BYTE_3"]
    else:
        lines = [f"v_cvt_pk_f32_{form}_e32 v[4:5], v0", f"v_cvt_pk_f32_{form}_e64 v[6:7], v0 op_sel:[1,0]"]
        lines += [f"v_cvt_f32_{form}_e32 v8, v0", f"v_cvt_f32_{form}_e64 v9, v0 op_sel:[1,1]"]
    wave = Wave(arch, lines)
    wave.v[0] = np.resize(np.random.default_rng(9).permutation(256).astype(np.uint8), 4 * wave.lanes).view(np.uint32)
    wave.run()
    for at, first, count in ((4, 0, 2), (6, 2, 2), (8, 0, 1), (9, 3, 1)):
        codes = np.stack([wave.v[0] >> (8 * (first + i)) & 255 for i in range(count)])
        check_widened(wave.v[at : at + count], codes, form, "f32", 0, fnuz=old)


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("signed", [False, True])
def test_saturating_packed_integers(op, signed):
    kind, dtype = ("i16", np.int16) if signed else ("u16", np.uint16)
    lines = [f"v_pk_{op}_{kind} v4, v0, v1 clamp", "v_subrev_nc_u32_e64 v5, v0, v1 clamp"]
    wave, rng = Wave("gfx1201", lines), np.random.default_rng(11)
    wave.v[:2] = operands.values(rng, "i", 64).reshape(2, 32)
    wave.run()
    a, b = (wave.v[i].view(dtype).astype(np.int64) for i in range(2))
    limits = np.iinfo(dtype)
    want = np.clip(a + b if op == "add" else a - b, limits.min, limits.max)
    np.testing.assert_array_equal(wave.v[4].view(dtype), want)
    np.testing.assert_array_equal(wave.v[5], np.maximum(wave.v[1].astype(np.int64) - wave.v[0], 0))


@pytest.mark.parametrize(
    ("arch", "line"),
    [
        ("gfx1250", "v_cvt_scale_pk8_f32_fp8 v[0:7], v[8:9], 0x7f scale_sel:1"),
        ("gfx1250", "v_cvt_scale_pk8_f32_fp4 v[0:7], v8, v10 scale_sel:8"),
        ("gfx1250", "v_cvt_scale_pk16_f32_fp8 v[0:15], v[16:18], v20"),
        ("gfx950", "v_cvt_scalef32_pk_fp8_f32 v0, v1, -v2, 1.0"),
        ("gfx950", "v_cvt_scalef32_2xpk16_fp6_f16 v[0:5], v[6:13], v[14:21], 1.0"),
        ("gfx950", "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 1.0 op_sel:[0,0,1,0]"),
        ("gfx950", "v_cvt_scalef32_sr_fp8_f32 v0, v1, v2, 1.0"),
        ("gfx1201", "v_pk_mul_lo_u16 v0, v1, v2 clamp"),
    ],
)
def test_refused(arch, line):
    with pytest.raises(UnsupportedInstruction):
        Wave(arch, [line])
