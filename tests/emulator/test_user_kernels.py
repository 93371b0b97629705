"""What users try in a notebook, against numpy. Each kernel runs on one target here, on all with the slow tests."""

import functools

import numpy as np
import pytest
import torch
import triton

from mori_triton.errors import UnsupportedInstruction

from . import user_kernels as kernels
from .test_isa_matrix import round_xf32
from .test_triton_kernels import ARCHS, archs, assert_within, integers, nan, on, random

pytestmark = pytest.mark.cpu
__all__ = ["on"]


def first(arch, *others):
    """The target that a quick run takes; the others (by default all) are slow."""
    rest = [x for x in others or ARCHS if x != arch]
    return archs(arch, *(pytest.param(x, marks=pytest.mark.slow) for x in rest))


@first("gfx942")
@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_recurrence(on, reverse):
    a, b, out = torch.rand(128), random(128), nan(128)
    kernels.recurrence[(1,)](a, b, out, N=128, REVERSE=reverse)
    h, want, order = 0.0, np.zeros(128), range(127, -1, -1) if reverse else range(128)
    for i in order:
        h = want[i] = float(a[i]) * h + float(b[i])
    # factors below 1: at most 2 roundings of every term that is left
    np.testing.assert_allclose(out.numpy(), want, atol=128 * 2.0**-24 * float(b.abs().sum()), rtol=0)


@first("gfx1250")
def test_scans(on):
    x, out = integers(1, 3, 16, 32), torch.zeros(2, 16, 32, dtype=torch.int32)
    kernels.scans[(1,)](x, out, ROWS=16, N=32)
    np.testing.assert_array_equal(out[0], x.numpy()[:, ::-1].cumsum(1)[:, ::-1])
    np.testing.assert_array_equal(out[1], x.numpy().cumprod(0))


@first("gfx950")
def test_sorts(on):
    x = random(4, 16, dtype=torch.float16)
    down, largest, flipped = (nan(4, n, dtype=torch.float16) for n in (16, 4, 16))
    kernels.sorts[(1,)](x, down, largest, flipped, ROWS=4, N=16, K=4, num_warps=1)
    want = -np.sort(-x.numpy(), axis=1)
    np.testing.assert_array_equal(down, want)
    np.testing.assert_array_equal(largest, want[:, :4])
    np.testing.assert_array_equal(flipped, x.numpy()[:, ::-1])


@first("gfx1201")
def test_histogram(on):
    x, out = integers(0, 32, 512), torch.full((32,), -1, dtype=torch.int32)
    kernels.histogram[(1,)](x, out, 500, N=512, BINS=32)
    np.testing.assert_array_equal(out, np.bincount(x[:500], minlength=32))


@first("gfx950")
def test_gather(on):
    x, at, out = random(32, 16), integers(0, 32, 32, 16), nan(2, 32, 16)
    kernels.gather[(1,)](x, at, out, ROWS=32, N=16)
    np.testing.assert_array_equal(out[0], np.take_along_axis(x.numpy(), at.numpy(), 0))
    np.testing.assert_array_equal(out[1], np.take_along_axis(x.numpy(), at.numpy() % 16, 1))


@first("gfx942")
def test_reductions_of_an_odd_size(on):
    x, out, where = random(13, 37), nan(51), torch.full((50,), -1, dtype=torch.int32)
    kernels.reductions[(1,)](x, out, where, 13, 37, ROWS=16, COLS=64)
    np.testing.assert_array_equal(out[:13], x.numpy().max(1))
    np.testing.assert_array_equal(where[:13], x.numpy().argmax(1))
    np.testing.assert_array_equal(where[13:], x.numpy().argmin(0))
    assert_within(out[13:50], x.double().sum(0), 13 * 2.0**-24 * x.abs().sum(0).double())
    assert_within(out[50], x.double().sum(), 481 * 2.0**-24 * x.abs().sum().double())


def philox(counter, seed):
    """Four words of Philox 4x32-10 for each counter."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter.astype(np.uint64), *(np.zeros(len(counter), np.uint64) for _ in range(3))]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            b >> np.uint64(32) ^ c[1] ^ np.uint64(keys[0]),
            b & low,
            a >> np.uint64(32) ^ c[3] ^ np.uint64(keys[1]),
            a & low,
        ]
        keys = [(k + step) & 0xFFFFFFFF for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack(c).astype(np.uint32)


@first("gfx1201")
def test_random_numbers(on):
    uniform, normal, words = nan(1024), nan(1024), torch.zeros(4, 1024, dtype=torch.int32)
    kernels.randoms[(1,)](uniform, normal, words, 2**40 + 42, N=1024)
    want = philox(np.arange(1024), 2**40 + 42)
    np.testing.assert_array_equal(words.numpy().view(np.uint32), want)
    signed = want[0].view(np.int32).astype(np.int64)
    positive = np.where(signed < 0, -signed - 1, signed).astype(np.float32)
    np.testing.assert_array_equal(uniform, positive * np.float32(4.6566127342e-10))
    # mean and deviation within five standard errors
    assert abs(float(normal.mean())) < 5 / 32
    assert abs(float(normal.std()) - 1) < 5 / (2 * 1024) ** 0.5


@first("gfx1250")
def test_tensor_descriptors(on):
    x, y = random(40, 72), nan(72, 40)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    kernels.transpose[(2, 3)](x, y, 40, 72, BLOCK=32)
    np.testing.assert_array_equal(y, x.numpy().T)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ATOMICS = [(dtype, "add") for dtype in FLOATS]
ATOMICS += [(dtype, op) for dtype in FLOATS[:2] for op in ("max", "min")]
ATOMICS += [(dtype, op) for dtype in (torch.int32, torch.int64) for op in ("add", "max", "min", "and", "or", "xor")]
QUICK = {
    (torch.float16, "add", "gfx942"), (torch.bfloat16, "add", "gfx950"), (torch.bfloat16, "add", "gfx1201"),
    (torch.float64, "add", "gfx1250"), (torch.float32, "max", "gfx1201"), (torch.int64, "xor", "gfx942"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("on", "dtype", "op"),
    [
        pytest.param(arch, dtype, op, marks=[] if (dtype, op, arch) in QUICK else pytest.mark.slow)
        for dtype, op in ATOMICS
        for arch in ARCHS
    ],
    indirect=["on"],
)
def test_atomics(on, dtype, op):
    """Sums are of integers that every format holds, so their order does not matter."""
    x, p = (integers(-3, 4, 64) if op == "add" else integers(-1000, 1000, 64)).to(dtype), torch.ones(8, dtype=dtype)
    kernels.atomics[(1,)](p, x, OP=op, N=64, BINS=8, num_warps=1)
    exact = np.vstack([np.ones((1, 8)), x.double().numpy().reshape(8, 8)])
    exact = exact if dtype.is_floating_point else exact.astype(np.int64)
    functions = {"add": np.add, "max": np.maximum, "min": np.minimum}
    functions |= {name: getattr(np, f"bitwise_{name}") for name in ("and", "or", "xor")}
    np.testing.assert_array_equal(p.double().numpy(), functools.reduce(functions[op], exact))


@first("gfx1250")
@pytest.mark.parametrize("dtype", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.slow)])
def test_compare_and_swap(on, dtype):
    p, old, i = torch.arange(64, dtype=dtype), torch.full((64,), -1, dtype=dtype), torch.arange(64, dtype=dtype)
    kernels.compare_and_swap[(1,)](p, old, torch.where(i % 3 == 0, i, -5).to(dtype), i + 1000, N=64)
    np.testing.assert_array_equal(old, i)
    np.testing.assert_array_equal(p, np.where(i % 3 == 0, i + 1000, i))


@first("gfx942", "gfx942")
def test_product_in_tf32(on):
    """Sources rounded to 11 bits; only gfx942 has such an instruction."""
    a, b, c = random(32, 32), random(32, 32, seed=1), nan(32, 32)
    kernels.product[(1,)](a, b, c, M=32, N=32, K=32, PRECISION="tf32", num_warps=1)
    x, y = (torch.from_numpy(round_xf32(v.double().numpy())) for v in (a, b))
    assert_within(c, x @ y, 33 * 2.0**-24 * (x.abs() @ y.abs()))


@pytest.mark.slow
@archs(*ARCHS)
def test_product_in_fp32(on):
    a, b, c = random(32, 32), random(32, 32, seed=1), nan(32, 32)
    kernels.product[(1,)](a, b, c, M=32, N=32, K=32, PRECISION="ieee", num_warps=1)
    assert_within(c, a.double() @ b.double(), 33 * 2.0**-24 * (a.double().abs() @ b.double().abs()))


@first("gfx950")
def test_product_of_three_dimensions(on):
    a, b, c = random(4, 16, 16, dtype=torch.float16), random(4, 16, 16, dtype=torch.float16, seed=1), nan(4, 16, 16)
    kernels.products[(1,)](a, b, c, BATCH=4, M=16)
    assert_within(c, a.double() @ b.double(), 16 * 2.0**-24 * (a.double().abs() @ b.double().abs()))


@first("gfx1250")
def test_while_loop(on):
    x, out = torch.arange(1, 17, dtype=torch.int32), torch.full((16,), -1, dtype=torch.int32)
    kernels.collatz[(16,)](x, out, num_warps=1)
    for start, steps in zip(x.tolist(), out.tolist(), strict=True):
        n = start
        for _ in range(steps):
            assert n != 1
            n = n // 2 if n % 2 == 0 else 3 * n + 1
        assert n == 1


@first("gfx942")
def test_functions(on):
    n, out = 500, nan(10, 512)
    x, y = random(n), random(n, seed=1)
    kernels.functions[(1,)](x, y, out, n, N=512)
    assert out[:, n:].isnan().all()
    a, b, got = x.double(), y.double(), out[:, :n].double()
    want = [a.sigmoid(), a.erf(), a.sin() + b.cos(), a.floor() + b.ceil(), a.exp() / (b.abs() + 2).log()]
    want += [(a.abs() + 1).rsqrt(), a.clamp(-0.5, 0.5)]
    # OpenCL's limits: erf 16 ulps, the others fewer; sine and cosine 4 each, of numbers below 1, whose sum may be small
    for i, exact in enumerate(want):
        assert_within(got[i], exact, 2.0**-19 * exact.abs() + (2.0**-21 if i == 2 else 0.0))
    # rounded correctly
    np.testing.assert_array_equal(out[7, :n], x.numpy() / y.numpy())
    np.testing.assert_array_equal(out[8, :n], np.sqrt(np.abs(x.numpy())))
    # exact
    np.testing.assert_array_equal(got[9], torch.fmod(a, b))


@first("gfx950")
def test_integers(on):
    x, out = integers(-(2**31), 2**31 - 1, 256, dtype=torch.int64).int(), torch.zeros(7, 256, dtype=torch.int32)
    y = integers(1, 2**16, 256) * (1 - 2 * (torch.arange(256) % 2)).int()
    y[5] = 2**31 - 1
    kernels.integers[(1,)](x, y, out, N=256)
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        ua, ub = a % 2**32, b % 2**32
        quotient, large = abs(a) // abs(b), abs(a * 1000003) // abs(b)
        sign = -1 if (a < 0) != (b < 0) else 1
        want = [sign * quotient, a - sign * quotient * b, ua * ub >> 32, a * b >> 13, ((a << 3) ^ (b >> 2)) | ~a]
        want += [ua // ub, sign * large]
        assert [v % 2**32 for v in out[:, i].tolist()] == [v % 2**32 for v in want], (a, b)


@first("gfx1250")
def test_shapes(on):
    x, out = random(64), nan(256)
    kernels.shapes[(1,)](x, out, N=64, num_warps=1)
    np.testing.assert_array_equal(out[:128], np.stack([x, 2 * x], 1).ravel())
    np.testing.assert_array_equal(out[128:192], x - (x + 1))
    np.testing.assert_array_equal(out[192:], x.numpy().reshape(8, 8).T.ravel())


CASTS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64), (torch.int64, torch.float16)]
CASTS += [(torch.uint8, torch.float32), (torch.float32, torch.int8), (torch.float16, torch.int64)]
CASTS += [(torch.float64, torch.float32), (torch.float32, torch.bool), (torch.int32, torch.float64)]


@first("gfx1201")
@pytest.mark.parametrize(("source", "to"), [CASTS[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASTS[1:])])
def test_casts(on, source, to):
    x = (20 * random(64)).to(source) if source.is_floating_point else integers(0, 100, 64).to(source)
    out = torch.zeros(64, dtype=to)
    kernels.cast[(1,)](x, out, N=64, num_warps=1)
    assert torch.equal(out, x.to(to))


@archs("gfx1201")
def test_unknown_instructions_of_inline_assembly_are_refused(on):
    with pytest.raises(UnsupportedInstruction, match="v_cubeid_f32"):
        kernels.inline[(1,)](random(64), N=64, num_warps=1)
