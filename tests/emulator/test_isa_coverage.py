"""No instruction without a check: each has pseudocode that a test compares, or a reference here."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mori_triton.emulator import isa
from mori_triton.emulator.isa.compare import SUPPORTED
from mori_triton.emulator.vector_lanes import Lanes
from mori_triton.emulator.vector_packed import MIXED, PACKED
from tests.emulator import operands
from tests.emulator.documents import spellings
from tests.emulator.harness import Wave
from tests.emulator.pcode_num import decode, encode_format
from tests.emulator.test_isa import vector_cases
from tests.emulator.test_isa_scalar import scalar_cases

pytestmark = pytest.mark.cpu


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


# what no document at hand has (gfx1250's, mostly): name -> (operand sizes of the result and the sources, reference)
REFERENCES = {
    "add_nc_u64": ("qqq", lambda a, b: a + b),
    "sub_nc_u64": ("qqq", lambda a, b: a - b),
    "mul_u64": ("qqq", lambda a, b: a * b),
    "mad_u32": ("iiii", lambda a, b, c: a * b + c),
    "mad_nc_u64_u32": ("qiiq", lambda a, b, c: a * b + c),
    "mad_nc_i64_i32": ("qiiq", lambda a, b, c: signed(a, 32) * signed(b, 32) + c),
    "min_u64": ("qqq", min),
    "max_u64": ("qqq", max),
    "min_i64": ("qqq", lambda a, b: min(signed(a, 64), signed(b, 64))),
    "max_i64": ("qqq", lambda a, b: max(signed(a, 64), signed(b, 64))),
    "add_min_u32": ("iiii", lambda a, b, c: min((a + b) % (1 << 32), c)),
    "add_max_u32": ("iiii", lambda a, b, c: max((a + b) % (1 << 32), c)),
    "add_min_i32": ("iiii", lambda a, b, c: min(signed((a + b) % (1 << 32), 32), signed(c, 32))),
    "add_max_i32": ("iiii", lambda a, b, c: max(signed((a + b) % (1 << 32), 32), signed(c, 32))),
}

# name -> why nothing is compared
ELSEWHERE = {
    "accvgpr_read_b32": "a move; test_accumulation_registers",
    "accvgpr_write_b32": "a move; test_accumulation_registers",
    "accvgpr_mov_b32": "a move; test_accumulation_registers",
    "fmaak_f64": "the formula of fma_f64, with a literal",
    "fmamk_f64": "the formula of fma_f64, with a literal",
}


def test_every_vector_instruction_is_checked():
    checked = set(vector_cases("gfx1201")) | set(vector_cases("gfx942"))
    assert set(isa.VALU) - checked == set(REFERENCES) | set(ELSEWHERE)


def test_every_compare_is_checked():
    # `lg` of integers is scalar only
    checked = set(vector_cases("gfx1201")) | set(vector_cases("gfx942"))
    assert {f"cmp_{name}" for name in SUPPORTED if not (name.startswith("lg_") and name[3] in "iu")} <= checked


def test_every_scalar_instruction_is_checked():
    assert set(isa.SALU) <= set(scalar_cases("gfx1201")) | set(scalar_cases("gfx942"))


def test_every_packed_instruction_is_checked():
    documented = set(spellings("gfx1201", "v_")) | set(spellings("gfx942", "v_"))
    assert set(PACKED) - documented == {f"pk_{x}_bf16" for x in ("add", "mul", "fma", "max_num", "min_num")}
    assert set(MIXED) - documented == {"fma_mix_f32_bf16", "fma_mixlo_bf16", "fma_mixhi_bf16"}


def test_every_other_table_is_known_here():
    """test_isa_lanes.py checks these one by one. test_isa_matrix.py checks every matrix product."""
    assert {
        "readfirstlane_b32", "readlane_b32", "writelane_b32", "swap_b32", "permlane16_b32", "permlanex16_b32",
        "permlane16_swap_b32", "permlane32_swap_b32",
    } == Lanes.LANE_MOVES  # fmt: skip


def test_undocumented_integers():
    lines = []
    for i, (name, (kinds, _)) in enumerate(REFERENCES.items()):
        places = [40 + 2 * i, *(8 * "iq".index(k) + 2 * j for j, k in enumerate(kinds[1:]))]
        ops = [f"v[{r}:{r + 1}]" if k == "q" else f"v{r}" for k, r in zip(kinds, places, strict=True)]
        lines.append(f"v_{name} {', '.join(ops)}")
    wave, rng = Wave("gfx1250", lines), np.random.default_rng(21)
    for _ in range(5):
        for j in range(3):
            for k in "iq":
                x, r = operands.values(rng, k, 32), 8 * "iq".index(k) + 2 * j
                wave.v[r], wave.v[r + 1] = x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)
        wave.v[:, ::5] = np.where(np.arange(len(wave.v))[:, None] < 40, wave.v[:, 1:2], wave.v[:, ::5])
        wave.run()
        for i, (kinds, reference) in enumerate(REFERENCES.values()):
            for lane in range(32):
                s = []
                for j, k in enumerate(kinds[1:]):
                    r = 8 * "iq".index(k) + 2 * j
                    s.append(int(wave.v[r, lane]) | (int(wave.v[r + 1, lane]) << 32 if k == "q" else 0))
                got, bits = int(wave.v[40 + 2 * i, lane]), 32
                if kinds[0] == "q":
                    got, bits = got | int(wave.v[41 + 2 * i, lane]) << 32, 64
                assert got == reference(*s) % (1 << bits), (lines[i], [hex(x) for x in s])


def bf16_value(x: int) -> Fraction:
    return Fraction(decode(x << 16, 32))


@pytest.mark.parametrize("name", ["add", "mul", "fma", "max_num", "min_num"])
def test_packed_bf16(name):
    """Finite operands against exact arithmetic, rounded once."""
    reference = {
        "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
        "max_num": max, "min_num": min,
    }[name]  # fmt: skip
    n = 3 if name == "fma" else 2
    wave, rng = (
        Wave("gfx1250", [f"v_pk_{name}_bf16 v4, {', '.join(f'v{i}' for i in range(n))}"]),
        np.random.default_rng(31),
    )
    for _ in range(20):
        halves = rng.integers(0, 1 << 16, (3, 2, 32))
        # some near each other, so that sums cancel
        halves[:, :, ::2] = halves[:, :, ::2] % 2048 + 0x3C00 + (halves[:, :, ::2] & 0x8000)
        halves[(halves & 0x7F80) == 0x7F80] ^= 0x4000
        wave.v[:3] = halves[:, 0] | halves[:, 1] << 16
        wave.run()
        for lane in range(32):
            for h in range(2):
                exact = reference(*(bf16_value(int(halves[i, h, lane])) for i in range(n)))
                got = int(wave.v[4, lane]) >> (16 * h) & 0xFFFF
                # the sign of a zero is checked on fp16, by the documents
                assert got == encode_format(exact, 8, 7) or (exact == 0 and got & 0x7FFF == 0), halves[:, h, lane]


@pytest.mark.parametrize("name", ["fma_mix_f32_bf16", "fma_mixlo_bf16", "fma_mixhi_bf16"])
def test_mixed_bf16(name):
    wave, rng = Wave("gfx1250", [f"v_{name} v4, v0, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,0,1]"]), np.random.default_rng(7)
    x = (rng.standard_normal((3, 32)) * 4).astype(np.float32)
    wave.v[:3], wave.v[4] = x.view(np.uint32), 0x11112222
    wave.run()
    high, low = x[0].view(np.uint32) & 0xFFFF0000, x[2].view(np.uint32) << np.uint32(16)
    for lane in range(32):
        a, c = (Fraction(float(v[lane : lane + 1].view(np.float32)[0])) for v in (high, low))
        if not np.isfinite(low[lane : lane + 1].view(np.float32)[0]):
            continue
        exact = a * Fraction(float(x[1, lane])) + c
        single = encode_format(exact, 8, 23)
        half = encode_format(Fraction(decode(single, 32)), 8, 7)
        want = {"fma_mix_f32_bf16": single, "fma_mixlo_bf16": 0x11110000 | half, "fma_mixhi_bf16": half << 16 | 0x2222}
        assert int(wave.v[4, lane]) == want[name]


def test_accumulation_registers():
    wave = Wave("gfx942", ["v_accvgpr_write_b32 a1, v0", "v_accvgpr_mov_b32 a0, a1", "v_accvgpr_read_b32 v1, a0"])
    wave.v[0] = np.arange(64)
    wave.exec = 0xFFFF0000FFFF
    wave.run()
    active = [wave.exec >> lane & 1 for lane in range(64)]
    assert (wave.v[1] == np.where(active, np.arange(64), 0)).all()


@pytest.mark.parametrize("table", [0x00, 0x01, 0x02, 0x04, 0x10, 0x40, 0x80, 0x96, 0xCA, 0xE8, 0xF8, 0xFF])
def test_bitop3(table):
    """Bit 4a + 2b + c of the table, for every bit position."""
    lines = [f"v_bitop3_b32 v3, v0, v1, v2 bitop3:{table:#x}", f"v_bitop3_b16 v4, v0, v1, v2 bitop3:{table:#x}"]
    wave, rng = Wave("gfx950", lines), np.random.default_rng(table)
    wave.v[:5] = rng.integers(0, 1 << 32, (5, 64), dtype=np.uint64)
    before = wave.v.copy()
    wave.run()
    index = np.zeros((32, 64), np.uint32)
    for bit in range(32):
        index[bit] = (before[0] >> bit & 1) * 4 + (before[1] >> bit & 1) * 2 + (before[2] >> bit & 1)
    want = sum((table >> index[bit].astype(np.uint64) & 1) << np.uint64(bit) for bit in range(32))
    assert (wave.v[3] == want).all()
    assert (wave.v[4] == (want & np.uint64(0xFFFF) | before[4] & 0xFFFF0000)).all()


def test_transcendental_functions_of_scalars():
    names = {"rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsq": lambda x: 1 / np.sqrt(x), "exp": np.exp2, "log": np.log2}
    wave = Wave(
        "gfx1201", [f"v_s_{name}_f32 s{10 + i}, s0" for i, name in enumerate(names)] + ["v_s_sqrt_f16 s20, |s1|"]
    )
    for x in (0.5, 3.0, 1e-40, 12345.678):
        wave.s[0] = np.float32(x).view(np.uint32)
        wave.s[1] = 0xABCD0000 | int(np.float16(-x).view(np.uint16))
        wave.run()
        for i, reference in enumerate(names.values()):
            with np.errstate(all="ignore"):
                want = np.float32(reference(np.float64(np.float32(x))))
            np.testing.assert_array_max_ulp(wave.s[10 + i : 11 + i].view(np.float32)[0], want, 1)
        half = np.sqrt(np.float16(x).astype(np.float32)).astype(np.float16)
        assert int(wave.s[20]) == int(half.view(np.uint16))


def test_scalar_and_immediate_sources_of_packed_math():
    lines = ["v_pk_mul_f32 v[2:3], v[0:1], s[4:5]", "v_pk_add_f32 v[4:5], v[0:1], 1.0 op_sel_hi:[1,0]"]
    # an immediate stands in the low half, which op_sel_hi can choose for both
    lines += [
        "v_pk_add_f16 v6, v0, 1.0 op_sel_hi:[1,0]",
        "v_pk_add_u16 v7, v0, s4",
        "v_pk_mov_b32 v[8:9], v[0:1], s[4:5]",
    ]
    wave, rng = Wave("gfx950", lines), np.random.default_rng(3)
    x, s = rng.standard_normal((2, 64)).astype(np.float32), np.array([2.5, -3.0], np.float32)
    wave.v[:2], wave.s[4:6] = x.view(np.uint32), s.view(np.uint32)
    wave.run()
    f = wave.v.view(np.float32)
    np.testing.assert_array_equal(f[2:4], x * s[:, None])
    np.testing.assert_array_equal(f[4:6], x + np.float32(1))
    halves = x[0].view(np.uint32)[:, None].view(np.uint16)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wave.v[6][:, None].view(np.float16), halves.view(np.float16) + np.float16(1))
    added = halves + s[:1].view(np.uint16)
    np.testing.assert_array_equal(wave.v[7][:, None].view(np.uint16), added)
    np.testing.assert_array_equal(wave.v[8:10], [x[0].view(np.uint32), np.full(64, s[1]).view(np.uint32)])
