"""gfx1250's products of 32 x 16 4-bit floats against numpy: alone, and in a Gluon kernel, so in Triton's layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mori_triton.errors import UnsupportedInstruction
from tests.emulator.harness import Wave, register
from tests.emulator.test_isa_formats import factor
from tests.emulator.test_isa_matrix import number
from tests.emulator.test_triton_kernels import assert_within, nan, on

pytestmark = pytest.mark.cpu
__all__ = ["on"]

K, D, A, B, C, SA, SB = 128, 80, 0, 16, 32, 60, 70


class Product:
    """One product: codes of A `[32, K]` and of B `[16, K]`, fp32 C `[32, 16]` or 1.0, random registers around them."""

    def __init__(self, name, mods="", *, registers=0, d=D, c=C):
        rng = np.random.default_rng(3)
        self.a, self.b = (rng.integers(0, 16, (n, K), dtype=np.uint32) for n in (32, 16))
        self.c = rng.integers(-50, 50, (32, 16)).astype(np.float32)
        places = [(d, 16), (A, 16), (B, 8), (c, 16), *((r, registers) for r in (SA, SB) if registers)]
        operands = [register("v", r, n) if r is not None else "1.0" for r, n in places]
        line = f"v_{name} {', '.join(operands)} {mods}".strip()
        self.wave = Wave("gfx1250", [line, "v_mov_b32 v120, 0"])
        self.wave.v[:] = rng.integers(0, 1 << 32, self.wave.v.shape, dtype=np.uint64)
        self.d = d
        for at, codes in ((A, self.a), (B, self.b)):
            self.wave.v[at : at + len(codes) // 2] = 0
            for row, k in np.ndindex(codes.shape):
                # 32 consecutive k in a lane, the next 32 in the other half of the wave; rows beyond 15 further on
                lane, place = row % 16 + 16 * (k // 32 % 2), k % 32 + 32 * (k // 64)
                self.wave.v[at + 8 * (row // 16) + place // 8, lane] |= codes[row, k] << np.uint32(4 * (place % 8))
        if c is not None:
            self.put_rows(c, self.c)

    def put_rows(self, at, values):
        for row in range(32):
            r, lane = self.place(row)
            self.wave.v[at + r, lane : lane + 16] = values[row].view(np.uint32)

    @staticmethod
    def place(row):
        """(register, first lane) of a row of C or D."""
        return 8 * (row // 16) + row % 8, 16 * (row // 8 % 2)

    def put_scales(self, scales, half):
        """scales: codes of A's 32 rows, of B's 16 columns, each [rows, blocks]; half: lanes that hold B's."""
        for at, codes, first in ((SA, scales[0], 0), (SB, scales[1], 16 * half)):
            registers = codes.astype(np.uint8).view(np.uint32)
            for i in range(registers.shape[1]):
                self.wave.v[at + i, first : first + len(codes)] = registers[:, i]

    def run(self):
        self.wave.run()
        out = np.zeros((32, 16), np.float32)
        for row in range(32):
            r, lane = self.place(row)
            out[row] = self.wave.v[self.d + r, lane : lane + 16].view(np.float32)
        return out

    def values(self):
        return [number(codes.astype(np.uint64), "fp4") for codes in (self.a, self.b)]


@pytest.mark.parametrize(("d", "c"), [(D, C), (C, C), (36, 32), (28, 32), (40, 32), (24, 32), (48, 32)])
def test_without_scales(d, c):
    """Integers in quarters: exact in any order. C may be D, or overlap it."""
    product = Product("wmma_f32_32x16x128_f4", d=d, c=c)
    a, b = product.values()
    np.testing.assert_array_equal(product.run(), a @ b.T + product.c)


def test_modifiers_of_c():
    product = Product("wmma_f32_32x16x128_f4", "neg_lo:[0,0,1] neg_hi:[0,0,1] matrix_a_reuse")
    a, b = product.values()
    np.testing.assert_array_equal(product.run(), a @ b.T - abs(product.c))


def test_an_immediate_c():
    product = Product("wmma_f32_32x16x128_f4", c=None)
    a, b = product.values()
    np.testing.assert_array_equal(product.run(), a @ b.T + 1)


@pytest.mark.parametrize("name", ["wmma_scale_f32_32x16x128_f4", "wmma_scale16_f32_32x16x128_f4"])
@pytest.mark.parametrize(("form", "half"), [("E8", 0), ("E8", 1), ("E4M3", 1)])
def test_with_scales(name, form, half):
    """A's scales fill the wave, a lane for each row; B's are in either half of it."""
    blocks, rng = 8 if "scale16" in name else 4, np.random.default_rng(4)
    low, high = (124, 130) if form == "E8" else (0x30, 0x50)
    scales = [rng.integers(low, high, (n, blocks)) for n in (32, 16)]
    scales[0][21, 1], scales[1][5, 2] = (0xFF if form == "E8" else 0x7F,) * 2
    mods = [f"matrix_b_scale:MATRIX_SCALE_ROW{half}"] * half
    mods += [f"matrix_{x}_scale_fmt:MATRIX_SCALE_FMT_{form}" for x in "ab" if form != "E8"]
    product = Product(name, " ".join(mods), registers=blocks // 4)
    product.put_scales(scales, half)
    a, b = (v * np.repeat(factor(s, form), K // blocks, axis=1) for v, s in zip(product.values(), scales, strict=True))
    got, want = product.run(), a @ b.T + product.c
    assert np.isnan(got[21]).all()
    assert np.isnan(got[:, 5]).all()
    rows, columns = np.arange(32) != 21, np.arange(16) != 5
    bound = 2.0**-24 * K * (np.nan_to_num(abs(a)) @ np.nan_to_num(abs(b)).T + 50)
    assert (abs(got - want) <= bound)[np.ix_(rows, columns)].all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("v_wmma_f32_32x16x128_f4 v[0:15], v[16:31], v[32:39], 0 matrix_b_fmt:MATRIX_FMT_FP4", "matrix_b_fmt"),
        ("v_wmma_f32_32x16x128_f4 v[0:15], v[16:31], v[32:47], 0", "16 registers, not 8"),
        ("v_wmma_f32_32x16x128_f4 v[0:7], v[16:31], v[32:39], 0", "8 registers, not 16"),
        ("v_wmma_f32_32x16x128_f4 v[8:23], v[16:31], v[32:39], 0", "a source"),
        ("v_wmma_f32_32x16x128_f4 v[32:47], v[16:31], v[32:39], 0", "a source"),
        ("v_wmma_f32_32x16x128_f4 v[20:35], v[40:55], v[32:39], 0", "a source"),
        ("v_wmma_f32_32x16x128_f4 v[0:15], v[16:31], v[32:39], 0 neg_lo:[1,0,0]", "neg_lo"),
        (
            "v_wmma_scale_f32_32x16x128_f4 v[0:15], v[16:31], v[32:39], 0, v40, v41 matrix_a_scale:MATRIX_SCALE_ROW1",
            "matrix_a_scale",
        ),
        ("v_wmma_scale_f32_32x16x128_f4 v[0:15], v[16:31], v[32:39], 0, v[40:41], v42", "2 registers, not 1"),
    ],
)
def test_refused(line, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        Wave("gfx1250", [line])


@pytest.mark.parametrize("on", ["gfx1250"], indirect=True)
@pytest.mark.parametrize(("m", "n", "transposed"), [(64, 32, False), (64, 32, True)])
def test_gluon(on, m, n, transposed):
    """A kernel that asks for these products, with or without A and B exchanged."""
    cdna5 = pytest.importorskip("triton.experimental.gluon.language.amd.cdna5")
    from triton.experimental.gluon import language as ttgl
    from triton.experimental.gluon.language.amd import AMDWMMALayout

    from .gluon_kernels import scaled_product

    layout, packed = (AMDWMMALayout(3, transposed, [[1, 0], [0, 1]], [], [32, 16, k]) for k in (128, 64))
    rows, columns = (ttgl.DotOperandLayout(i, packed, 16) for i in range(2))
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 16, (m, K)), rng.integers(0, 16, (n, K))
    scales = [rng.integers(124, 130, (size, K // 32)).astype(np.uint8) for size in (m, n)]
    out = nan(m, n)
    bytes_a, bytes_b = (torch.from_numpy((x[:, ::2] | x[:, 1::2] << 4).astype(np.uint8)) for x in (a, b))
    compiled = scaled_product[(1,)](
        bytes_a, bytes_b.T.contiguous(), *map(torch.from_numpy, scales), out, rows, columns,
        *(cdna5.get_wmma_scale_layout(x, [size, K // 32]) for x, size in ((rows, m), (columns, n))), layout,
        M=m, N=n, K=K, num_warps=4,
    )  # fmt: skip
    assert "v_wmma_scale_f32_32x16x128_f4" in compiled.asm["amdgcn"]
    x, y = (
        number(codes.astype(np.uint64), "fp4") * np.repeat(factor(s), 32, axis=1)
        for codes, s in zip((a, b), scales, strict=True)
    )
    assert_within(out, torch.from_numpy(x @ y.T), torch.from_numpy(2.0**-24 * K * abs(x) @ abs(y).T))
