"""Atomics, lane by lane, against numpy and torch; alignment; several threads at once."""

import threading

import numpy as np
import pytest
import torch

from mori_triton.emulator import state as lay
from tests.emulator.accesses import (
    ATOMICS,
    GPUS,
    SENTINEL,
    active,
    atomic_reference,
    atomics,
    masks,
    prepare,
)
from tests.emulator.bare import BareWave, Program

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", params=GPUS)
def program(request):
    return Program(request.param, atomics(request.param))


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("op", ATOMICS)
def test_atomics(program, op, size):
    rng, W, step = np.random.default_rng(6), program.W, size // 8
    wave, words = BareWave(program), size // 32
    kind = np.dtype(f"u{step}")
    for pattern in (np.arange(W), np.zeros(W, int), rng.integers(0, 8, W)):
        for mask in masks(W, rng)[::2]:
            for returns in (False, True):
                memory = rng.integers(0, 6, 256, kind) - kind.type(3)
                data = rng.integers(0, 6, W, kind) - kind.type(3)
                compare = rng.integers(0, 6, W, kind) - kind.type(3)
                prepare(wave, memory.view(np.uint8), 0, pattern * step, 4096)
                for i, values in enumerate((data, compare)):
                    for k in range(words):
                        wave.v[20 + i * words + k] = values >> kind.type(32 * k) & kind.type(0xFFFFFFFF)
                wave.v[30:32] = SENTINEL
                want, old = memory.copy(), wave.v[30:32].copy()
                for lane in np.flatnonzero(active(mask, W)):
                    before = int(want[pattern[lane]])
                    want[pattern[lane]] = atomic_reference(op, size, before, int(data[lane]), int(compare[lane]))
                    if returns:
                        old[:words, lane] = [before >> 32 * k & 0xFFFFFFFF for k in range(words)]
                assert wave(f"atomic_{op}_{size}_{returns}", mask) == lay.DONE
                np.testing.assert_array_equal(memory, want)
                np.testing.assert_array_equal(wave.v[30:32], old)


@pytest.mark.parametrize("op", ["fadd", "fmin", "fmax"])
def test_float_atomics(program, op):
    if f".Latomic_{op}_32_False" not in program.program.labels:
        pytest.skip("this GPU has no such instruction")
    rng, W = np.random.default_rng(7), program.W
    wave = BareWave(program)
    memory, data = rng.standard_normal(W).astype(np.float32), rng.standard_normal(W).astype(np.float32)
    # two lanes share a word; a number and a NaN meet in either order
    where = np.maximum(np.arange(W), 1)
    data[8], memory[9] = np.nan, np.nan
    prepare(wave, memory.view(np.uint8), 0, where * 4, 4096)
    wave.v[20] = data.view(np.uint32)
    want = memory.copy()
    for lane in range(W):
        a, b = want[where[lane]], data[lane]
        want[where[lane]] = a + b if op == "fadd" else (np.fmin if op == "fmin" else np.fmax)(a, b)
    assert wave(f"atomic_{op}_32_False", (1 << W) - 1) == lay.DONE
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_float_atomics(program, kind):
    dtype, W = {"f16": torch.float16, "bf16": torch.bfloat16}[kind], program.W
    wave, generator = BareWave(program), torch.Generator().manual_seed(1)
    memory = torch.randn(2 * W, generator=generator).to(dtype)
    data = (torch.randn(2 * W, generator=generator) * 2 ** torch.randint(-9, 9, (2 * W,), generator=generator)).to(
        dtype
    )
    data[5], data[6], data[7] = float("inf"), float("nan"), 0.0
    # sums that are denormal, tie, overflow
    small, top = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    memory[8:16] = torch.tensor([small, small / 4, -small / 8, 1.0, 1.0, top, top, -top]).to(dtype)
    data[8:16] = torch.tensor([-small / 2, small / 8, 0, 2**-11, 3 * 2**-11, top, top / 8192, -top / 2048]).to(dtype)
    want = memory + data
    prepare(wave, memory.view(torch.uint8).numpy(), 0, np.arange(W) * 4, 4096)
    wave.v[20] = data.view(torch.int32).numpy().view(np.uint32)
    assert wave(f"atomic_{kind}", (1 << W) - 1) == lay.DONE
    np.testing.assert_array_equal(memory.float().numpy(), want.float().numpy())


def test_atomics_have_to_be_aligned(program):
    wave, memory, lanes = BareWave(program), np.zeros(4096, np.uint8), np.arange(program.W)
    full = (1 << program.W) - 1
    wave.v[20:22] = 0
    prepare(wave, memory, 0, 4 * lanes, 4096)
    assert wave("atomic_add_64_False", full) == lay.FAULTED
    assert [wave.get(f) for f in (lay.FAULT, lay.FAULT_ADDR, lay.FAULT_SIZE)] == [3, memory.ctypes.data + 4, 8]
    prepare(wave, memory, 0, 8 * lanes, 4096)
    assert wave("atomic_add_64_False", full) == lay.DONE


def test_atomics_of_several_threads_lose_nothing(program):
    W, rounds = program.W, 3000
    memory = np.zeros(4, np.uint32)

    def add():
        wave = BareWave(program)
        prepare(wave, memory.view(np.uint8), 0, np.arange(W) % 4 * 4, 4096)
        wave.v[20] = 1
        for _ in range(rounds):
            wave("atomic_add_32_False", (1 << W) - 1)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (memory == 2 * rounds * W // 4).all()
