"""How many waves a SIMD holds at a time: what registers, LDS and workgroups leave room for.

Source: the published numbers of LLVM's test `llvm/test/CodeGen/AMDGPU/occupancy-levels.ll`, whose rules are those of
the hardware's allocators; docs/amd_codegen.md has the whole list. An NVIDIA multiprocessor is taken as 4 SIMDs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_triton.errors import ArgumentError


@dataclass(frozen=True)
class SimdLimits:
    """What waves on a SIMD, and workgroups on the SIMDs that share LDS, are given of."""

    wave_size: int
    most_waves: int  # of a SIMD
    vgprs: int  # of a lane of a SIMD; a wave takes whole granules
    vgpr_granule: int
    sgprs: int  # of a SIMD; 0: every wave has a full set
    sgpr_granule: int
    sgprs_reserved: int  # of each wave, for the trap handler
    lds_bytes: int  # of the SIMDs that a workgroup may be spread over
    most_groups: int  # workgroups of several waves there: each needs a barrier
    num_simds: int = 4


_CDNA = {"wave_size": 64, "most_waves": 8, "vgprs": 512, "vgpr_granule": 8, "sgprs": 800, "sgpr_granule": 16,
         "sgprs_reserved": 16, "most_groups": 16}  # fmt: skip
# on RDNA a workgroup has the two compute units of a workgroup processor, which is how Triton compiles
LIMITS = {
    "gfx942": SimdLimits(**_CDNA, lds_bytes=64 << 10),
    "gfx950": SimdLimits(**_CDNA, lds_bytes=160 << 10),
    "gfx1201": SimdLimits(32, 16, 1536, 24, 0, 1, 0, 128 << 10, 32),
    "gfx1250": SimdLimits(32, 16, 1024, 16, 0, 1, 0, 320 << 10, 16),
    # registers are given to a warp in 256s, of 16384 in each quarter of the multiprocessor
    "sm_90": SimdLimits(32, 16, 512, 8, 0, 1, 0, 228 << 10, 32),
}


def waves_per_simd(arch: str, *, vgprs: int, sgprs: int = 0, lds_bytes: int = 0, num_waves: int = 1) -> int:
    """The most waves that a SIMD of `arch` holds of a kernel.

    Args:
        vgprs: of a lane, accumulation registers of CDNA included.
        sgprs: of a wave, VCC and the like included.
        lds_bytes: of a workgroup.
        num_waves: of a workgroup.
    """
    if arch not in LIMITS:
        raise ArgumentError(f"arch: want one of {', '.join(LIMITS)}, got {arch!r}")
    limits = LIMITS[arch]
    waves = min(limits.most_waves, max(1, limits.vgprs // _whole(vgprs, limits.vgpr_granule)))
    if limits.sgprs:
        waves = min(waves, limits.sgprs // _whole(sgprs + limits.sgprs_reserved, limits.sgpr_granule))
    groups = limits.most_waves * limits.num_simds // num_waves
    if num_waves > 1:
        groups = min(groups, limits.most_groups)
    if lds_bytes:
        groups = min(groups, limits.lds_bytes // lds_bytes)
    # the SIMD that holds the most of them
    return min(waves, max(1, -(-groups * num_waves // limits.num_simds)))


def _whole(number: int, granule: int) -> int:
    return -(-max(number, 1) // granule) * granule
