"""Kernels of Triton's tutorials on every target, within bounds that are narrower than the tutorials' tolerances.

Tutorials compare products with an absolute 1e-2 (8-bit floats: 0.125), layer norm and attention with 1e-2.
"""

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import emulator

from . import tutorial_kernels as kernels
from .test_triton_kernels import ARCHS, archs, assert_within, integers, nan, on, random

pytestmark = pytest.mark.cpu
__all__ = ["on"]

EPS = 2.0**-24
EIGHT_BITS = {
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
    "gfx1201": (torch.float8_e4m3fn, torch.float8_e5m2),
    "gfx1250": (torch.float8_e4m3fn, torch.float8_e5m2),
}
IS_36 = triton.__version__.startswith("3.6.")


def rounded(exact, total, terms, bits):
    """Bound of a sum of `terms` products in fp32, whose absolute values add up to `total`, rounded to `bits` bits."""
    in_fp32 = terms * EPS * total
    return in_fp32 + 2.0**-bits * (exact.abs() + in_fp32) + 2.0**-25


def leaky_relu(x):
    return torch.where(x >= 0, x, 0.01 * x)


def product(a, b, bits=11):
    """(a @ b exactly, bound of a kernel's result)."""
    exact = a.double() @ b.double()
    return exact, rounded(exact, a.double().abs() @ b.double().abs(), a.shape[1] + 1, bits)


def run_matmul(a, b, tile=(32, 32, 32), num_warps=2, num_stages=2, activation=False, dtype=torch.float16):
    """(a @ b, the compiled kernel)"""
    (M, K), N = a.shape, b.shape[1]
    c = nan(M, N, dtype=dtype)
    grid = (triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]),)
    kernel = kernels.matmul[grid](
        a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], GROUP=2, ACTIVATION=activation,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return c, kernel


@archs(*ARCHS)
def test_softmax(on):
    x, y = random(9, 300), nan(9, 320)
    kernels.softmax_rows[(2,)](x, y, x.stride(0), y.stride(0), 9, 300, BLOCK=512, STAGES=2, num_warps=2)
    assert y[:, 300:].isnan().all()
    assert torch.allclose(y[:, :300], x.softmax(1))


@archs(*ARCHS)
@pytest.mark.parametrize(
    ("dtype", "transposed"),
    [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False), (torch.float32, False)],
)
def test_matmul(on, dtype, transposed):
    """Edges in every direction, two tiles a side; b row- or column-major."""
    a, b = random(50, 72, dtype=dtype), random(72, 40, dtype=dtype, seed=1)
    if transposed:
        b = b.T.contiguous().T
    c, _ = run_matmul(a, b)
    exact, bound = product(a, b)
    if dtype == torch.float32:
        # gfx942 rounds to 11 bits, others may
        bound = bound + 2.0**-10 * (a.double().abs() @ b.double().abs())
    assert_within(c, exact, bound)


@archs(*ARCHS)
@pytest.mark.parametrize("which", [0, 1])
def test_matmul_of_8_bit_floats(on, which):
    dtype = EIGHT_BITS[on][which]
    a, b = random(40, 96).to(dtype), random(40, 96, seed=1).to(dtype).T
    c, _ = run_matmul(a, b, tile=(32, 32, 64))
    assert_within(c, *product(a.float(), b.float()))


@archs(*ARCHS)
def test_matmul_with_activation_and_larger_tiles(on):
    a, b = random(64, 96, dtype=torch.float16), random(96, 64, dtype=torch.float16, seed=1)
    c, _ = run_matmul(a, b, tile=(64, 64, 32), num_warps=4, num_stages=3, activation=True)
    exact, bound = product(a, b)
    assert_within(c, leaky_relu(exact), bound)


@archs("gfx942", "gfx950")
def test_matmul_with_16_x_16_products(on):
    """A tile with few rows makes Triton choose the other shape of MFMA."""
    a, b = random(16, 64, dtype=torch.float16), random(64, 16, dtype=torch.float16, seed=1)
    c, kernel = run_matmul(a, b, tile=(16, 16, 64), num_warps=1)
    assert "16x16" in kernel.asm["amdgcn"]
    assert_within(c, *product(a, b))


@archs("gfx1201", "gfx1250")
def test_matmul_with_more_numbers_than_registers(on):
    """One wave for a large tile: spills to the stack (gfx1201), registers beyond 255 (gfx1250)."""
    a, b = random(64, 64, dtype=torch.float16), random(64, 64, dtype=torch.float16, seed=1)
    c, kernel = run_matmul(a, b, tile=(64, 64, 64), num_warps=1, num_stages=1)
    assert ("scratch_load" if on == "gfx1201" else "/*v") in kernel.asm["amdgcn"]
    assert_within(c, *product(a, b))


@archs(*ARCHS)
def test_product_of_int8(on):
    a, b = integers(-128, 128, 32, 64, dtype=torch.int8), integers(-128, 128, 64, 32, dtype=torch.int8)
    c = torch.zeros(32, 32, dtype=torch.int32)
    kernels.one_product[(1,)](a, b, c, 32, 32, 64, num_warps=1)
    assert torch.equal(c, a.int() @ b.int())


@archs(*ARCHS)
def test_product_of_fp64(on):
    if IS_36 and on.startswith("gfx9"):
        pytest.skip("Triton 3.6 has no matrix instruction for fp64 here")
    a, b, c = random(16, 32, dtype=torch.float64), random(32, 16, dtype=torch.float64), nan(16, 16, dtype=torch.float64)
    kernels.one_product[(1,)](a, b, c, 16, 16, 32, num_warps=1)
    assert_within(c, a @ b, 33 * 2.0**-53 * (a.abs() @ b.abs()))


@archs(*ARCHS)
def test_grouped_matmul(on):
    shapes = [(64, 32, 32), (16, 48, 64), (40, 40, 32)]
    As = [random(m, k, dtype=torch.float16, seed=i) for i, (m, _, k) in enumerate(shapes)]
    Bs = [random(k, n, dtype=torch.float16, seed=9 + i) for i, (_, n, k) in enumerate(shapes)]
    Cs = [nan(m, n, dtype=torch.float16) for m, n, _ in shapes]
    device, every = emulator.current_device(), [*As, *Bs, *Cs]
    for t in every:
        emulator.allow(device, t.data_ptr(), t.nbytes, "a matrix of the group")
    pointers = torch.tensor([[x.data_ptr() for x in group] for group in zip(As, Bs, Cs, strict=True)])
    sizes = torch.tensor(shapes, dtype=torch.int32)
    strides = torch.tensor([[k, n, n] for _, n, k in shapes], dtype=torch.int32)
    kernels.grouped_matmul[(2,)](
        pointers, sizes, strides, 3, NUM_PROGRAMS=2, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, DTYPE=tl.float16, num_warps=2
    )
    for t in every:
        emulator.disallow(device, t.data_ptr())
    for a, b, c in zip(As, Bs, Cs, strict=True):
        assert_within(c, *product(a, b))


@archs(*ARCHS)
def test_dropout(on):
    """The seed decides; a kept element is scaled; half are kept, within five standard deviations."""
    x, y, again, other = random(1000), nan(1000), nan(1000), nan(1000)
    for out, seed in ((y, 123), (again, 123), (other, 512)):
        kernels.dropout[(4,)](x, out, 1000, 0.5, seed, BLOCK=256, num_warps=2)
    assert torch.equal(y, again)
    assert not torch.equal(y, other)
    kept = y != 0
    assert torch.equal(y[kept], x[kept] / 0.5)
    assert abs(int(kept.sum()) - 500) < 5 * (1000 / 4) ** 0.5


@archs(*ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layer_norm(on, dtype):
    """Forward and backward against torch in fp64."""
    if IS_36 and on == "gfx1250":
        pytest.skip("Triton 3.6 lowers atomic_cas to a wait that its assembler refuses for gfx1250")
    M, N, groups = 12, 200, 4
    x, weight, bias = random(M, N, dtype=dtype), torch.rand(N).to(dtype), torch.rand(N).to(dtype)
    dy = 0.1 * random(M, N, dtype=dtype, seed=2)
    y, mean, rstd = nan(M, N, dtype=dtype), nan(M), nan(M)
    kernels.layer_norm_forward[(M,)](x, y, weight, bias, mean, rstd, N, N, 1e-5, BLOCK=128, num_warps=2)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.layer_norm(exact[0], (N,), exact[1], exact[2], 1e-5)
    want.backward(dy.double())
    # the tutorial's tolerance; fp32 is held to what 200 additions can lose
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    assert torch.allclose(y.double(), want, atol=tolerance, rtol=0)
    parts = [torch.zeros(groups, N, dtype=dtype) for _ in range(2)]
    locks = torch.zeros(2, groups, dtype=torch.int32)
    dx, dw, db = nan(M, N, dtype=dtype), nan(N, dtype=dtype), nan(N, dtype=dtype)
    kernels.layer_norm_backward_x[(M,)](
        dx, dy, *parts, x, weight, mean, rstd, locks, N, N, GROUPS=groups, BLOCK=256, num_warps=2
    )
    kernels.layer_norm_backward_weight[(2,)](*parts, dw, db, groups, N, BLOCK_M=4, BLOCK_N=128, num_warps=2)
    assert locks.tolist() == [[0] * groups, [1] * groups]
    for got, t in zip((dx, dw, db), exact, strict=True):
        assert torch.allclose(got.double(), t.grad, atol=tolerance, rtol=0)


@archs(*ARCHS)
@pytest.mark.parametrize(("causal", "eight_bits"), [(True, False), (False, True)])
def test_attention_forward(on, causal, eight_bits):
    if IS_36 and on == "gfx942" and eight_bits:
        pytest.skip("Triton 3.6 cannot lower the conversion to gfx942's 8-bit floats here")
    heads, N, D = 2, 64, 32
    dtype = EIGHT_BITS[on][1] if eight_bits else torch.float16
    q, k, v = (random(heads, N, D, seed=i).to(dtype) for i in range(3))
    out, lse = nan(heads, N, D, dtype=torch.float16), nan(heads, N)
    kernels.attention_forward[(N // 32, heads)](
        q, k, v, out, lse, 0.5, N, D=D, BLOCK_M=32, BLOCK_N=32, CAUSAL=causal, num_warps=2
    )
    s = 0.5 * q.double() @ k.double().mT
    if causal:
        s = s.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), float("-inf"))
    want = s.softmax(-1) @ v.double()
    # the weights, at most 1 before the division, are rounded to 11 or (e5m2) to 3 bits: so many of v's largest
    bound = (2.0**-3 if eight_bits else 2.0**-11) * v.double().abs().amax() + 2.0**-10
    assert_within(out, want, bound)
    assert torch.allclose(lse.double(), s.logsumexp(-1) / torch.log(torch.tensor(2.0)).double(), atol=1e-5)
