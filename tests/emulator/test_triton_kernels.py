"""Triton kernels on CPU tensors through the driver, against torch."""

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import emulator, local_world
from mori_triton.host import state

from . import kernels

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942", "gfx950", "gfx1250")


@pytest.fixture
def on(request):
    """The architecture that kernels of the test run on."""
    active = emulator.activate(request.param)
    yield request.param
    active.deactivate()


def archs(*names):
    return pytest.mark.parametrize("on", names, indirect=True)


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(got, exact, bound):
    """Every element of `got` at most `bound` away from `exact` (float64)."""
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"{float((error - bound).max()):.3g} beyond the bound"


def integers(low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@archs(*ARCHS)
def test_vadd(on):
    x, y, out = random(1000), random(1000, seed=1), nan(1024)
    kernels.vadd[(4,)](x, y, out, 1000, BLOCK=256)
    assert torch.equal(out[:1000], x + y)
    assert out[1000:].isnan().all()


@archs(*ARCHS)
def test_ends_of_a_large_array(on):
    """Beyond 16 MiB: all bits of the size in a buffer's resource count."""
    n = 5_000_000
    x, y, out = random(n), random(n), nan(n)
    kernels.vadd[(triton.cdiv(n, 1 << 14),)](x, y, out, n, BLOCK=1 << 14, num_warps=8)
    assert torch.equal(out, x + y)


@archs(*ARCHS)
def test_spin_lock(on):
    if on == "gfx1250" and triton.__version__.startswith("3.6."):
        pytest.skip("Triton 3.6 lowers atomic_cas to a wait that its assembler refuses for gfx1250")
    count, lock, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.full((10,), -1).int()
    out[0] = 0
    kernels.spin_lock[(8,)](count, lock, out, num_warps=1)
    assert (count, lock, out[0]) == (8, 0, 36)
    assert sorted(out[1:9].tolist()) == list(range(8))
    assert out[9] == -1


@archs("gfx1201", "gfx942")
def test_a_program_may_wait_for_a_later_one(on):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernels.wait_for_later[(33,)](flag, out)
    assert out[0] == 7


@archs(*ARCHS)
def test_row_reduce(on):
    src, idx, weight = random(10, 1000, dtype=torch.bfloat16), integers(-1, 10, 64, 4), torch.rand(64, 4)
    out = nan(64, 1000, dtype=torch.bfloat16)
    kernels.row_reduce[(64,)](src, idx, weight, out, 1000, K=4, BLOCK=512)
    terms = torch.where(idx >= 0, weight, 0.0)[..., None].double() * src[idx.clamp(min=0).long()].double()
    # four products and sums in fp32, the result rounded to the 8 significant bits of bf16
    in_fp32 = 8 * 2**-24 * terms.abs().sum(1)
    assert_within(out, terms.sum(1), 2**-8 * terms.sum(1).abs() + (1 + 2**-8) * in_fp32)


@archs(*ARCHS)
def test_scan_sum_max(on):
    x, out = integers(-100, 100, 512), torch.full((516,), -7, dtype=torch.int32)
    kernels.scan_sum_max[(1,)](x, out, N=512)
    assert torch.equal(out[:512], x.cumsum(0).int())
    assert out[512:].tolist() == [x.sum(), x.max(), -7, -7]


@archs("gfx1201", "gfx942")
def test_matmul(on):
    a, b, c = random(32, 32, dtype=torch.bfloat16), random(32, 32, dtype=torch.bfloat16, seed=1), nan(32, 32)
    kernels.matmul[(1,)](a, b, c, M=32, N=32, K=32)
    # products of bf16 are exact in fp32; 32 of them are added, in any order
    assert_within(c, a.double() @ b.double(), 32 * 2**-24 * (a.double().abs() @ b.double().abs()))


@archs("gfx1201", "gfx942")
def test_wait_with_limit(on):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int32)
    kernels.wait_with_limit[(1,)](flag, out, 2_000_000, GFX12=on == "gfx1201", num_warps=1)
    assert out.tolist() == [0, 1]
    timer = threading.Timer(0.05, lambda: flag.fill_(5))
    timer.start()
    kernels.wait_with_limit[(1,)](flag, out, 3_000_000_000, GFX12=on == "gfx1201", num_warps=1)
    timer.join()
    assert out.tolist() == [5, 0]


@archs("gfx1201", "gfx942")
def test_atomics_i64(on):
    v = integers(-(2**40), 2**40, 1000, dtype=torch.int64)
    p, old = torch.tensor([0, -(2**62)]), torch.zeros(1000, dtype=torch.int64)
    kernels.atomics_i64[(4,)](p, old, v, 1000, BLOCK=256)
    assert p.tolist() == [v.sum(), v.max()]
    assert (old == -(2**62)).sum() == 1


@archs("gfx1201", "gfx950")
def test_histogram(on):
    ids, count, position = integers(0, 7, 1000), torch.zeros(7, dtype=torch.int32), torch.full((1000,), -1).int()
    kernels.histogram[(4,)](ids, count, position, 1000, BLOCK=256)
    assert torch.equal(count, torch.bincount(ids, minlength=7).int())
    for e in range(7):
        assert sorted(position[ids == e].tolist()) == list(range(count[e]))


@archs("gfx1201", "gfx942")
def test_quantise_fp8(on):
    fnuz = on == "gfx942"
    top = 240.0 if fnuz else 448.0
    x, scale = random(4, 1000, dtype=torch.bfloat16), nan(4)
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    q = torch.full((4, 1000), 0x7F, dtype=torch.uint8).view(dtype)
    kernels.quantise_fp8[(4,)](x, q, scale, 1000, BLOCK=1024, DTYPE=tl.float8e4b8 if fnuz else tl.float8e4nv, TOP=top)
    assert torch.equal(scale, x.float().abs().amax(1) / top)
    want = (x.float() / scale[:, None]).clamp(-top, top).to(dtype)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@archs(*ARCHS)
def test_softmax(on):
    x, y = random(4, 1000), nan(4, 1000)
    kernels.softmax[(4,)](x, y, 1000, BLOCK=1024)
    # fp32 roundings, relative: of exp2's argument t (twice, and of log2(e)), of exp2 (1 ulp), above and below the
    # fraction line; of ten levels of sums and of the division
    t = (x.double() - x.double().amax(1, keepdim=True)).abs() * 1.4427
    exp = 0.6932 * 3 * 2**-24 * t + 2**-23
    exact = x.double().softmax(1)
    assert_within(y, exact, exact * (exp + exp.amax(1, keepdim=True) + 11 * 2**-24))


@archs("gfx1201", "gfx1250")
def test_copy_rows(on):
    x, y = integers(0, 2**15, 9, 5000, dtype=torch.int16), torch.full((9, 4096), -1, dtype=torch.int16)
    kernels.copy_rows[(3,)](x, y, 9, 5000, 4096, BLOCK=2048)
    assert torch.equal(y, x[:, :4096])


@archs("gfx1201", "gfx942")
def test_sort_argmax(on):
    x, out = integers(-1000, 1000, 256), torch.full((258,), -7777, dtype=torch.int32)
    kernels.sort_argmax[(1,)](x, out, N=256)
    assert torch.equal(out[:256], x.sort()[0])
    assert x[out[256]] == x.max()
    assert out[257] == -7777


@archs(*ARCHS)
def test_add_f32(on):
    x, y = integers(0, 100, 256).float(), torch.zeros(4)
    kernels.add_f32[(1,)](x, y, N=256)
    assert torch.equal(y, x.view(-1, 4).sum(0))


def _ping_pong(pe, rounds):
    heap = state.current().heap
    flag = heap.tensor((1,), torch.int32, "flag")
    flag.zero_()
    state.current().bootstrap.barrier()
    out = torch.full((1,), -1, dtype=torch.int32)
    kernels.ping_pong[(1,)](heap.peer_tensor(flag, 0), out, pe, rounds, num_warps=1)
    state.current().bootstrap.barrier()
    return int(heap.peer_tensor(flag, 0)[0])


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("seed", [None, 3])
def test_two_pes_ping_pong(arch, seed):
    assert local_world(2, arch=arch, seed=seed).run(_ping_pong, 100) == [200, 200]


def _all_reduce(pe, rounds, rows, hidden):
    here = state.current()
    n, wrong = here.n_pes, 0
    space = here.heap.tensor((4096 + n * rows * hidden * 2,), torch.uint8, "slots")
    space.zero_()
    bases = torch.tensor([here.heap.peer_address(space.data_ptr(), p) for p in range(n)])
    here.bootstrap.barrier()
    for it in range(rounds):
        xs = [random(rows, hidden, dtype=torch.bfloat16, seed=100 * it + p) for p in range(n)]
        out = nan(rows, hidden, dtype=torch.bfloat16)
        kernels.all_reduce[(4,)](bases, xs[pe], out, pe, n, hidden, rows, 4 * n * (it + 1), BLOCK=512)
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        wrong += int((out != total.bfloat16()).sum())
    return wrong


@pytest.mark.parametrize(
    ("n", "arch", "seed"),
    [
        (4, "gfx1201", None),
        (8, "gfx1201", None),
        (3, "gfx942", None),
        (4, "gfx1201", 1),
        (2, "gfx950", 2),
        (2, "gfx1250", 3),
    ],
)
def test_all_reduce_of_several_pes(n, arch, seed):
    assert local_world(n, arch=arch, seed=seed).run(_all_reduce, 3, 8, 1000) == [0] * n


def peer(path, me, rounds):
    """One side of a ping-pong and an all-reduce over memory that two processes share: (last flag, wrong elements)."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    words = torch.frombuffer(memory, dtype=torch.int32)
    active = emulator.activate("gfx1201")
    try:
        kernels.ping_pong[(1,)](words, torch.zeros(1, dtype=torch.int32), me, rounds, num_warps=1)
        base, space = words.data_ptr(), 4096 + 2 * 8 * 1000 * 2
        emulator.allow(emulator.current_device(), base, len(memory), "shared memory")
        bases = torch.tensor([base + 4096, base + 4096 + space])
        wrong = 0
        for it in range(3):
            xs = [random(8, 1000, dtype=torch.bfloat16, seed=10 * it + p) for p in range(2)]
            out = nan(8, 1000, dtype=torch.bfloat16)
            kernels.all_reduce[(4,)](bases, xs[me], out, me, 2, 1000, 8, 8 * (it + 1), BLOCK=512)
            wrong += int((out != (xs[0].float() + xs[1].float()).bfloat16()).sum())
        emulator.disallow(emulator.current_device(), base)
        return int(words[0]), wrong
    finally:
        active.deactivate()


def test_processes_meet_in_shared_memory(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 17))
    code = (
        f"import sys\nfrom tests.emulator import test_triton_kernels as t\nsys.exit(t.peer({str(path)!r}, 1, 300)[1])"
    )
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    other = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=Path(__file__).parent.parent.parent)
    try:
        assert peer(path, 0, 300) == (600, 0)
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


@archs(*ARCHS)
@pytest.mark.parametrize("grid", [(5, 3, 2), (1, 1, 7), (2, 9, 1)])
def test_grids_of_three_dimensions(on, grid):
    gx, gy, gz = grid
    out = torch.full((gx * gy * gz + 1,), -1, dtype=torch.int32)
    kernels.grid_ids[grid](out, num_warps=1)
    want = [
        ((x * 10 + y) * 10 + z) * 1000 + (gx * 10 + gy) * 10 + gz
        for z in range(gz) for y in range(gy) for x in range(gx)
    ]  # fmt: skip
    assert out.tolist() == [*want, -1]


@archs(*ARCHS)
@pytest.mark.parametrize(("y", "z"), [(True, False), (False, True), (True, True)])
def test_a_kernel_that_asks_for_some_ids(on, y, z):
    """Which scalar registers hold a workgroup's numbers on gfx9 depends on which of them a kernel asks for."""
    size = (3 if y else 1) * (4 if z else 1)
    out = torch.zeros(size + 1, dtype=torch.int32)
    kernels.some_ids[(2, 3, 4)](out, Y=y, Z=z, num_warps=1)
    assert out.tolist() == [*range(1, size + 1), 0]


@archs("gfx1201")
@pytest.mark.parametrize("grid", [(0,), (3, 0), (1, 1, 0)])
def test_an_empty_grid_does_nothing(on, grid):
    out = torch.full((4,), -1, dtype=torch.int32)
    kernels.grid_ids[grid](out)
    assert out.tolist() == [-1] * 4


@archs("gfx1201")
def test_a_grid_larger_than_the_device(on):
    x, y, out = random(64 * 3000), random(64 * 3000, seed=1), nan(64 * 3000)
    kernels.vadd[(3000,)](x, y, out, 64 * 3000, BLOCK=64, num_warps=2)
    assert torch.equal(out, x + y)


@archs("gfx1201", "gfx942")
def test_arguments_of_every_kind(on):
    out = nan(8, dtype=torch.float64)
    pointee = torch.tensor([11.5], dtype=torch.float16)
    kernels.all_kinds[(1,)](out, 2**40 + 1, -3, True, 2.5, 2**63 + 2**40, 2**31, pointee, T=3, num_warps=1)
    assert out.tolist() == [2**40 + 1, -3, 1, 2.5, 2**63 + 2**40, 2**31, 11.5, 3]
    out.fill_(float("nan"))
    kernels.all_kinds[(1,)](out, -(2**40), 0, False, float("inf"), 2, float("nan"), None, T=4, num_warps=1)
    assert out[:5].tolist() == [-(2**40), 0, 0, float("inf"), 2]
    assert out[5:7].isnan().all()
    assert out[7] == 4


@archs("gfx1201")
@pytest.mark.parametrize("num_warps", [1, 2, 8, 16])
def test_numbers_of_waves(on, num_warps):
    x, out = integers(-100, 100, 1024), torch.zeros(1026, dtype=torch.int32)
    kernels.scan_sum_max[(1,)](x, out, N=1024, num_warps=num_warps)
    assert torch.equal(out[:1024], x.cumsum(0).int())


@archs("gfx1201")
def test_autotune_chooses_something(on):
    tuned = triton.autotune(
        configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256}, num_warps=2)], key=["n"]
    )(kernels.vadd)
    x, y, out = random(1000), random(1000, seed=1), nan(1000)
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, out, 1000)
    assert torch.equal(out, x + y)
