"""Waves of a SIMD against the numbers that LLVM publishes in its test `AMDGPU/occupancy-levels.ll`."""

from __future__ import annotations

import pytest

from mori_triton.errors import ArgumentError
from mori_triton.inspect.occupancy import waves_per_simd

pytestmark = pytest.mark.cpu

# VGPRs -> waves, by the columns GFX950, GFX1100W32 (which serves gfx1200) and GFX1250 there
VGPRS = {
    24: (8, 16, 16), 64: (8, 16, 16), 72: (7, 16, 12), 80: (6, 16, 12), 84: (5, 16, 10), 96: (5, 16, 10),
    100: (4, 12, 9), 112: (4, 12, 9), 128: (4, 10, 8), 144: (3, 10, 7), 168: (3, 9, 5), 200: (2, 7, 4), 256: (2, 5, 4),
}  # fmt: skip
# SGPRs named by the kernel -> waves, column GFX950TRAP; LLVM adds 6 of its own to each
SGPRS = {80: 7, 88: 7, 100: 6, 101: 6}
# threads of a workgroup with 8252 bytes of LDS -> waves, columns as of VGPRS
LDS_8252 = {
    64: (5, 8, 8), 96: (8, 12, 12), 128: (8, 15, 16), 192: (8, 15, 15), 256: (8, 16, 16), 512: (8, 16, 16),
    1024: (8, 16, 16),
}  # fmt: skip
COLUMNS = ("gfx950", "gfx1201", "gfx1250")


@pytest.mark.parametrize("vgprs", VGPRS)
def test_vgprs(vgprs: int) -> None:
    assert tuple(waves_per_simd(arch, vgprs=vgprs) for arch in COLUMNS) == VGPRS[vgprs]
    # gfx942 has the registers of gfx950
    assert waves_per_simd("gfx942", vgprs=vgprs) == VGPRS[vgprs][0]


@pytest.mark.parametrize("sgprs", SGPRS)
def test_sgprs(sgprs: int) -> None:
    for arch in ("gfx942", "gfx950"):
        assert waves_per_simd(arch, vgprs=1, sgprs=sgprs + 6) == SGPRS[sgprs]
    for arch in ("gfx1201", "gfx1250"):
        assert waves_per_simd(arch, vgprs=1, sgprs=sgprs + 6) == 16


@pytest.mark.parametrize("threads", LDS_8252)
def test_lds(threads: int) -> None:
    waves = tuple(
        waves_per_simd(arch, vgprs=1, lds_bytes=8252, num_waves=-(-threads // (64 if arch == "gfx950" else 32)))
        for arch in COLUMNS
    )
    assert waves == LDS_8252[threads]


def test_lds_of_gfx942_is_less() -> None:
    """64 KiB for 4 SIMDs: 7 workgroups of one wave."""
    assert waves_per_simd("gfx942", vgprs=1, lds_bytes=8252) == 2


def test_nvidia() -> None:
    """The H100's tables: 65536 registers and 64 warps of a multiprocessor with 4 schedulers."""
    known = {32: 64, 40: 48, 64: 32, 72: 28, 128: 16, 168: 12, 255: 8}
    assert {r: 4 * waves_per_simd("sm_90", vgprs=r) for r in known} == known


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(ArgumentError, match="gfx9999"):
        waves_per_simd("gfx9999", vgprs=1)
