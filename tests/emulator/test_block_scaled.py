"""`tl.dot_scaled` end to end: numbers in OCP's MX formats, decoded here by their definition, against numpy."""

import numpy as np
import pytest
import torch

from . import block_scaled_kernels as kernels
from .test_isa_formats import factor
from .test_isa_matrix import number
from .test_triton_kernels import ARCHS, archs, nan, on
from .test_tutorials import IS_36

pytestmark = pytest.mark.cpu
__all__ = ["on"]

FORMS = {"e2m1": "fp4", "e4m3": "fp8", "e5m2": "bf8", "bf16": "bf16", "fp16": "f16"}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW = pytest.mark.slow


def matrix(rng, form, rows, K):
    """(tensor [rows, K], packed along k, its numbers): every finite code."""
    if form in ("bf16", "fp16"):
        x = torch.from_numpy(rng.standard_normal((rows, K))).to(DTYPES[form])
        return x, x.double().numpy()
    codes = rng.integers(0, 16 if form == "e2m1" else 256, (rows, K), dtype=np.uint64)
    codes[~np.isfinite(number(codes, FORMS[form]))] = 1
    values = number(codes, FORMS[form])
    if form == "e2m1":
        return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << np.uint64(4)).astype(np.uint8)), values
    return torch.from_numpy(codes.astype(np.uint8)).view(DTYPES[form]), values


def compare(c, x, y, K):
    """c against x @ y^T, exact but for K + 8 roundings; NaNs where a scale is one."""
    want, total = x @ y.T, np.abs(x) @ np.abs(y).T
    got, unknown = c.double().numpy(), np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), unknown)
    assert (np.abs(got - want)[~unknown] <= (K + 8) * 2.0**-24 * total[~unknown]).all()


def check_product(a_form, b_form, M, N, K, num_warps, block=32, scale_form="E8"):
    """The compiled kernel."""
    rng = np.random.default_rng(3)
    (a, x), (b, y) = matrix(rng, a_form, M, K), matrix(rng, b_form, N, K)
    low, high = (118, 132) if scale_form == "E8" else (0x20, 0x60)
    scales = [rng.integers(low, high, (rows, K // block), dtype=np.uint8) for rows in (M, N)]
    # a row of A and a column of B are NaNs
    scales[0][5, 1] = scales[1][7, 2] = 0xFF if scale_form == "E8" else 0x7F
    given = [torch.from_numpy(s) for s in scales]
    given = [s if scale_form == "E8" else s.view(torch.float8_e4m3fn) for s in given]
    for i, form in enumerate((a_form, b_form)):
        if form in ("bf16", "fp16"):
            given[i] = None
    x, y = (
        v if g is None else v * np.repeat(factor(s, scale_form), block, axis=1)
        for v, s, g in zip((x, y), scales, given, strict=True)
    )
    c = nan(M, N)
    kernel = kernels.one_product[(1,)](
        a, given[0], b.T.contiguous(), given[1], c, M=M, N=N, K=K, A_FORM=a_form, B_FORM=b_form, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
    compare(c, x, y, K)
    return kernel


@archs("gfx950", "gfx1250")
@pytest.mark.parametrize(
    ("a_form", "b_form", "native"),
    [
        ("e4m3", "e2m1", True),
        ("bf16", "e2m1", False),
        pytest.param("e2m1", "e2m1", True, marks=SLOW),
        pytest.param("e4m3", "e5m2", True, marks=SLOW),
        pytest.param("e2m1", "e5m2", True, marks=SLOW),
        pytest.param("e5m2", "bf16", False, marks=SLOW),
        pytest.param("e4m3", "fp16", False, marks=SLOW),
        pytest.param("fp16", "e2m1", False, marks=SLOW),
    ],
)
def test_dot_scaled(on, a_form, b_form, native):
    """Where both have scales, one instruction; else scaled conversions to the other's format."""
    if IS_36 and on == "gfx1250" and not native:
        pytest.skip("Triton 3.6 cannot lower it")
    text = check_product(a_form, b_form, 64, 64, 128, 4).asm["amdgcn"]
    assert ("f8f6f4" in text) == native
    assert ("v_cvt_scale" in text) != native


@archs("gfx1250")
@pytest.mark.parametrize(("block", "scale_form"), [(16, "E4M3"), pytest.param(16, "E8", marks=SLOW)])
def test_dot_scaled_of_blocks_of_16(on, block, scale_form):
    if IS_36:
        pytest.skip("Triton 3.6 has no blocks of 16 on AMD's GPUs")
    text = check_product("e2m1", "e2m1", 32, 32, 128, 1, block, scale_form).asm["amdgcn"]
    assert "v_wmma_scale16_f32_16x16x128_f8f6f4" in text


@SLOW
@archs("gfx942", "gfx1201")
@pytest.mark.parametrize(("a_form", "b_form"), [("e2m1", "e2m1"), ("e4m3", "e5m2"), ("bf16", "e2m1"), ("e4m3", "fp16")])
def test_dot_scaled_without_instructions_for_it(on, a_form, b_form):
    check_product(a_form, b_form, 64, 64, 128, 4)


def shuffled(scale, rows):
    """[n, k] in the order that instructions of so many rows want, as Triton's tutorial prepares it."""
    n, k = scale.shape
    if rows == 32:
        return scale.reshape(n // 32, 32, k // 8, 4, 2).permute(0, 2, 4, 1, 3).reshape(n // 32, k * 32).contiguous()
    return scale.reshape(n // 32, 2, 16, k // 8, 2, 4).permute(0, 3, 5, 2, 4, 1).reshape(n // 32, k * 32).contiguous()


@archs("gfx950", *(pytest.param(arch, marks=SLOW) for arch in ARCHS if arch != "gfx950"))
@pytest.mark.parametrize("order", [32, pytest.param(16, marks=SLOW), pytest.param(0, marks=SLOW)])
def test_block_scaled_matmul(on, order):
    """The tutorial's product of fp4 matrices: tiles, a loop over k, scales shuffled for the instructions."""
    M, N, K, rng = 128, 128, 512, np.random.default_rng(4)
    (a, x), (b, y) = matrix(rng, "e2m1", M, K), matrix(rng, "e2m1", N, K)
    scales = [torch.from_numpy(rng.integers(118, 132, (rows, K // 32), dtype=np.uint8)) for rows in (M, N)]
    x, y = (v * np.repeat(factor(s.numpy()), 32, axis=1) for v, s in zip((x, y), scales, strict=True))
    c = nan(M, N)
    given = [shuffled(s, order) if order else s for s in scales]
    kernels.matmul[(4,)](
        a, given[0], b, given[1], c, M, N, K, BLOCK_M=64, BLOCK_N=64, BLOCK_K=256, SHUFFLED=order,
        num_warps=4, matrix_instr_nonkdim=order,
    )  # fmt: skip
    compare(c, x, y, K)
