"""Kernels in Gluon, which names the matrix instruction it wants. Triton 3.6 has no such products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as ttgl
from triton.experimental.gluon.language.amd import cdna5


@gluon.jit
def scaled_product(
    a,  # uint8 [M, K / 2], two 4-bit floats each
    b,  # uint8 [K / 2, N]
    a_scale,  # uint8 [M, K / 32]
    b_scale,  # uint8 [N, K / 32]
    out,  # fp32 [M, N]
    A: ttgl.constexpr,
    B: ttgl.constexpr,
    A_SCALE: ttgl.constexpr,
    B_SCALE: ttgl.constexpr,
    OUT: ttgl.constexpr,
    M: ttgl.constexpr,
    N: ttgl.constexpr,
    K: ttgl.constexpr,
):
    """out = (a times its scales) @ (b times its scales)."""
    i, k = ttgl.arange(0, M, layout=ttgl.SliceLayout(1, A)), ttgl.arange(0, K // 2, layout=ttgl.SliceLayout(0, A))
    x = ttgl.load(a + i[:, None] * (K // 2) + k[None, :])
    k, j = ttgl.arange(0, K // 2, layout=ttgl.SliceLayout(1, B)), ttgl.arange(0, N, layout=ttgl.SliceLayout(0, B))
    y = ttgl.load(b + k[:, None] * N + j[None, :])
    i, k = (
        ttgl.arange(0, M, layout=ttgl.SliceLayout(1, A_SCALE)),
        ttgl.arange(0, K // 32, layout=ttgl.SliceLayout(0, A_SCALE)),
    )
    u = ttgl.load(a_scale + i[:, None] * (K // 32) + k[None, :])
    j, k = (
        ttgl.arange(0, N, layout=ttgl.SliceLayout(1, B_SCALE)),
        ttgl.arange(0, K // 32, layout=ttgl.SliceLayout(0, B_SCALE)),
    )
    v = ttgl.load(b_scale + j[:, None] * (K // 32) + k[None, :])
    total = cdna5.wmma_scaled(x, u, "e2m1", y, v, "e2m1", ttgl.zeros([M, N], ttgl.float32, layout=OUT))
    i, j = ttgl.arange(0, M, layout=ttgl.SliceLayout(1, OUT)), ttgl.arange(0, N, layout=ttgl.SliceLayout(0, OUT))
    ttgl.store(out + i[:, None] * N + j[None, :], total)
