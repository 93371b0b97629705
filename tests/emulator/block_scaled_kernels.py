"""Products of block-scaled matrices: one `tl.dot_scaled`, and a loop of them over tiles."""

import triton
import triton.language as tl


@triton.jit
def one_product(
    a, a_scale, b, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_FORM: tl.constexpr, B_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c = a @ b for one tile. e2m1 is packed along k; scales of A's rows, B's columns for each BLOCK of k, or None."""
    A_PACK: tl.constexpr = 2 if A_FORM == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_FORM == "e2m1" else 1
    i, j, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // BLOCK)
    x = tl.load(a + i[:, None] * (K // A_PACK) + tl.arange(0, K // A_PACK)[None, :])
    y = tl.load(b + tl.arange(0, K // B_PACK)[:, None] * N + j[None, :])
    x_scale = None
    y_scale = None
    if a_scale is not None:
        x_scale = tl.load(a_scale + i[:, None] * (K // BLOCK) + s[None, :])
    if b_scale is not None:
        y_scale = tl.load(b_scale + j[:, None] * (K // BLOCK) + s[None, :])
    out = tl.dot_scaled(x, x_scale, A_FORM, y, y_scale, B_FORM)
    tl.store(c + i[:, None] * N + j[None, :], out)


@triton.jit
def _in_order(scale, ROWS: tl.constexpr, S: tl.constexpr, SHUFFLED: tl.constexpr):
    """Scales [ROWS / 32, S * 32] in the order in which matrix instructions of SHUFFLED rows want them -> [ROWS, S]."""
    if SHUFFLED == 32:
        scale = scale.reshape(ROWS // 32, S // 8, 2, 32, 4).permute(0, 3, 1, 4, 2)
    else:
        scale = scale.reshape(ROWS // 32, S // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2)
    return scale.reshape(ROWS, S)


@triton.jit
def matmul(
    a, a_scale, b, b_scale, c, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """c = a @ b^T, both e2m1, packed along k: [M, K / 2], [N, K / 2]. SHUFFLED: 0, 16, 32, the order of the scales."""
    S: tl.constexpr = BLOCK_K // 32
    pid = tl.program_id(0)
    m, n = pid // tl.cdiv(N, BLOCK_N) * BLOCK_M, pid % tl.cdiv(N, BLOCK_N) * BLOCK_N
    i, j = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    k, s, shuffled = tl.arange(0, BLOCK_K // 2), tl.arange(0, S), tl.arange(0, S * 32)
    a_at, b_at = a + i[:, None] * (K // 2) + k[None, :], b + j[None, :] * (K // 2) + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        if SHUFFLED:
            at = step * S * 32 + shuffled[None, :]
            x = tl.load(a_scale + (m // 32 + tl.arange(0, BLOCK_M // 32))[:, None] * K + at)
            y = tl.load(b_scale + (n // 32 + tl.arange(0, BLOCK_N // 32))[:, None] * K + at)
            x, y = _in_order(x, BLOCK_M, S, SHUFFLED), _in_order(y, BLOCK_N, S, SHUFFLED)
        else:
            x = tl.load(a_scale + i[:, None] * (K // 32) + step * S + s[None, :])
            y = tl.load(b_scale + j[:, None] * (K // 32) + step * S + s[None, :])
        acc = tl.dot_scaled(tl.load(a_at), x, "e2m1", tl.load(b_at), y, "e2m1", acc)
        a_at += BLOCK_K // 2
        b_at += BLOCK_K // 2
    tl.store(c + i[:, None] * N + j[None, :], acc)
