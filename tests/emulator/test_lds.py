"""LDS accesses and lane permutes, lane by lane, against numpy."""

import numpy as np
import pytest

from mori_triton.emulator import lds
from mori_triton.emulator import state as lay
from tests.emulator.accesses import LOADS, SENTINEL, STORES, active, atomic_reference, loaded, masks, registers
from tests.emulator.bare import BareWave, Program

pytestmark = pytest.mark.cpu

GPUS = ["gfx1201", "gfx942", "gfx950", "gfx1250"]
LDS_BYTES, OFFSET = 2048, 12
# in the ISA's spelling
HALVES = {
    "d16_b16": "u16_d16", "d16_hi_b16": "u16_d16_hi", "d16_u8": "u8_d16", "d16_hi_u8": "u8_d16_hi", "d16_i8": "i8_d16",
    "d16_hi_i8": "i8_d16_hi", "d16_hi_b8": "b8_d16_hi",
}  # fmt: skip
ATOMICS = {
    "add": "add_u",
    "sub": "sub_u",
    "smax": "max_i",
    "umin": "min_u",
    "or": "or_b",
    "inc": "inc_u",
    "dec": "dec_u",
}
SWIZZLES = {
    "swap": "swizzle(SWAP,4)", "reverse": "swizzle(REVERSE,8)", "quad": "swizzle(QUAD_PERM, 3,1,0,2)",
    "broadcast": "swizzle(BROADCAST,16,5)", "raw": "0x0c1f", "raw_quad": "0x801b",
}  # fmt: skip


def pieces(arch: str) -> dict[str, str]:
    gfx9, found = not arch.startswith("gfx12"), {}
    load, store = ("ds_read", "ds_write") if gfx9 else ("ds_load", "ds_store")
    for ty, (size, *_) in LOADS.items():
        found[f"load_{ty}"] = f"{load}_{HALVES.get(ty, ty)} {registers(20, size)}, v10 offset:{OFFSET}"
    for ty, (size, _) in STORES.items():
        name = "b16_d16_hi" if ty == "d16_hi_b16" else HALVES.get(ty, ty)
        found[f"store_{ty}"] = f"{store}_{name} v10, {registers(20, size)} offset:{OFFSET}"
    for size in (4, 8):
        bits = 8 * size
        two, far = ("2_b", "2st64_b") if gfx9 else ("_2addr_b", "_2addr_stride64_b")
        pair, values = registers(20, 2 * size), f"{registers(20, size)}, {registers(24, size)}"
        found[f"load_pair_{size}"] = f"{load}{two}{bits} {pair}, v10 offset0:3 offset1:5"
        found[f"load_far_{size}"] = f"{load}{far}{bits} {pair}, v10 offset1:1"
        found[f"store_pair_{size}"] = f"{store}{two}{bits} v10, {values} offset0:3 offset1:5"
        found[f"store_far_{size}"] = f"{store}{far}{bits} v10, {values} offset0:1"
        # the address lies in the first or the second half of the destination
        found[f"load_into_first_{size}"] = f"{load}{two}{bits} {registers(10, 2 * size)}, v10 offset0:3 offset1:5"
        found[f"load_into_second_{size}"] = (
            f"{load}{two}{bits} {registers(10 - size // 4, 2 * size)}, v10 offset0:3 offset1:5"
        )
    for op, name in ATOMICS.items():
        for size in (32, 64):
            text = f"v10, {registers(20, size // 8)} offset:{OFFSET}"
            found[f"atomic_{op}_{size}"] = f"ds_{name}{size} {text}"
            rtn = name.replace("_", "_rtn_")
            found[f"atomic_{op}_{size}_rtn"] = f"ds_{rtn}{size} {registers(30, size // 8)}, {text}"
    exchange = "ds_wrxchg_rtn_b32" if gfx9 else "ds_storexchg_rtn_b32"
    found["atomic_swap_32_rtn"] = f"{exchange} v30, v10, v20 offset:{OFFSET}"
    found["bpermute"] = "ds_bpermute_b32 v30, v10, v20 offset:8"
    found["permute"] = "ds_permute_b32 v30, v10, v20"
    found |= {f"swizzle_{name}": f"ds_swizzle_b32 v30, v20 offset:{spec}" for name, spec in SWIZZLES.items()}
    return found


@pytest.fixture(scope="module", params=GPUS)
def program(request):
    return Program(request.param, pieces(request.param))


@pytest.fixture
def wave(program):
    wave = BareWave(program)
    wave.set_lds(np.random.default_rng(1).integers(0, 256, LDS_BYTES, np.uint8))
    return wave


def patterns(W: int, size: int, rng) -> list[np.ndarray]:
    lanes = np.arange(W)
    return [lanes * size, np.full(W, 40), (W - 1 - lanes) * size, rng.integers(0, LDS_BYTES - 64, W)]


@pytest.mark.parametrize("ty", LOADS)
def test_loads(wave, ty):
    rng, W, size = np.random.default_rng(2), wave.p.W, LOADS[ty][0]
    for offsets in patterns(W, size, rng):
        for mask in masks(W, rng):
            wave.v[10], wave.v[20:24] = offsets, SENTINEL
            want = wave.v[20:24].copy()
            for lane in np.flatnonzero(active(mask, W)):
                at = offsets[lane] + OFFSET
                want[: max(1, size // 4), lane] = loaded(wave.lds[at : at + size], want[:, lane], ty)
            assert wave(f"load_{ty}", mask) == lay.DONE
            np.testing.assert_array_equal(wave.v[20:24], want)


@pytest.mark.parametrize("ty", STORES)
def test_stores(wave, ty):
    rng, W, (size, shift) = np.random.default_rng(3), wave.p.W, STORES[ty]
    wave.v[20:24] = rng.integers(0, 1 << 32, (4, W), np.uint64)
    raw = np.ascontiguousarray(wave.v[20:24].T)
    for offsets in (np.arange(W) * size, np.arange(W)[::-1] * 20 + 1):
        for mask in masks(W, rng):
            wave.v[10] = offsets
            want = wave.lds.copy()
            for lane in np.flatnonzero(active(mask, W)):
                at = offsets[lane] + OFFSET
                value = raw[lane].view(np.uint8) if shift == 0 else (raw[lane] >> shift).view(np.uint8)
                want[at : at + size] = value[:size]
            assert wave(f"store_{ty}", mask) == lay.DONE
            np.testing.assert_array_equal(wave.lds, want)


@pytest.mark.parametrize("size", [4, 8])
def test_two_addresses(wave, size):
    rng, W, words = np.random.default_rng(4), wave.p.W, size // 4
    offsets = rng.integers(0, 8, W) * 8
    mask = masks(W, rng)[-1]
    on = active(mask, W)

    def value(at: np.ndarray) -> np.ndarray:
        return np.stack([wave.lds[a : a + size].view(np.uint32) for a in at], 1)

    for piece, first, second in (("pair", 3 * size, 5 * size), ("far", 0, 64 * size)):
        wave.v[10], wave.v[20:24] = offsets, SENTINEL
        assert wave(f"load_{piece}_{size}", mask) == lay.DONE
        want = np.concatenate([value(offsets + first), value(offsets + second)])
        np.testing.assert_array_equal(wave.v[20 : 20 + 2 * words], np.where(on, want, SENTINEL))
    for piece, register in (("first", 10), ("second", 10 - words)):
        wave.v[10] = offsets
        assert wave(f"load_into_{piece}_{size}", (1 << W) - 1) == lay.DONE
        want = np.concatenate([value(offsets + 3 * size), value(offsets + 5 * size)])
        np.testing.assert_array_equal(wave.v[register : register + 2 * words], want)
    wave.v[20:26] = rng.integers(0, 1 << 32, (6, W), np.uint64)
    for piece, first, second in (("pair", 3 * size, 5 * size), ("far", 64 * size, 0)):
        wave.v[10] = np.arange(W) * 8 * size % 512
        want = wave.lds.copy()
        for lane in np.flatnonzero(on[: 512 // (8 * size)]):
            for register, at in ((20, first), (24, second)):
                data = np.ascontiguousarray(wave.v[register : register + words, lane]).view(np.uint8)
                want[wave.v[10, lane] + at :][:size] = data
        assert wave(f"store_{piece}_{size}", mask & ((1 << 512 // (8 * size)) - 1)) == lay.DONE
        np.testing.assert_array_equal(wave.lds, want)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("op", [*ATOMICS, "swap"])
def test_atomics(wave, op, size):
    if op == "swap" and size == 64:
        pytest.skip("not in this test's code")
    rng, W, step = np.random.default_rng(5), wave.p.W, size // 8
    kind = np.dtype(f"u{step}")
    for rtn in ("", "_rtn") if op != "swap" else ("_rtn",):
        wave.lds = np.zeros(LDS_BYTES, np.uint8)
        wave.set_lds(wave.lds)
        memory = wave.lds[OFFSET + 4 :][: 16 * step].view(kind)
        memory[:] = rng.integers(0, 6, 16, kind) - kind.type(3)
        where, data = rng.integers(0, 16, W), rng.integers(0, 6, W, kind) - kind.type(3)
        wave.v[10], wave.v[30:32] = where * step + 4, SENTINEL
        for k in range(size // 32):
            wave.v[20 + k] = data >> kind.type(32 * k) & kind.type(0xFFFFFFFF)
        mask = masks(W, rng)[-1]
        want, old = memory.copy(), wave.v[30:32].copy()
        for lane in np.flatnonzero(active(mask, W)):
            before = int(want[where[lane]])
            want[where[lane]] = atomic_reference(op, size, before, int(data[lane]), 0)
            if rtn:
                old[: size // 32, lane] = [before >> 32 * k & 0xFFFFFFFF for k in range(size // 32)]
        assert wave(f"atomic_{op}_{size}{rtn}", mask) == lay.DONE
        np.testing.assert_array_equal(memory, want)
        np.testing.assert_array_equal(wave.v[30:32], old)


def test_bounds(wave):
    W = wave.p.W
    wave.v[10] = np.arange(W) * 4 + LDS_BYTES - OFFSET - 4 * W
    assert wave("load_b32", (1 << W) - 1) == lay.DONE
    wave.v[10] += 1
    assert wave("load_b32", (1 << W) - 1) == lay.FAULTED
    # LDS faults name the offset, the first one that is outside
    assert (wave.get(lay.FAULT), wave.get(lay.FAULT_SIZE)) == (2, 4)
    wave.v[10] = 0
    wave.v[10, 5] = LDS_BYTES - OFFSET
    before = wave.lds.copy()
    assert wave("store_b8", 0b100000) == lay.FAULTED
    assert wave.get(lay.FAULT_ADDR) == LDS_BYTES
    np.testing.assert_array_equal(wave.lds, before)
    wave.v[10] = 2
    assert wave("atomic_add_32", 1) == lay.FAULTED
    assert wave.get(lay.FAULT) == 6


def test_permutes(wave):
    rng, W = np.random.default_rng(6), wave.p.W
    for mask in masks(W, rng):
        on = active(mask, W)
        wave.v[20], wave.v[30] = rng.integers(0, 1 << 32, W, np.uint64), SENTINEL
        wave.v[10] = rng.integers(0, 1 << 32, W, np.uint64)
        # the hardware looks at the lane number's bits only; lanes that are off give 0
        lane = ((wave.v[10].astype(np.uint64) + 8) >> 2 & (W - 1)).astype(int)
        want = np.where(on, np.where(on[lane], wave.v[20, lane], 0), SENTINEL)
        assert wave("bpermute", mask) == lay.DONE
        np.testing.assert_array_equal(wave.v[30], want)
        wave.v[10], wave.v[30] = 4 * rng.permutation(W), SENTINEL
        sent = np.zeros(W, np.uint32)
        sent[(wave.v[10] // 4)[on]] = wave.v[20][on]
        assert wave("permute", mask) == lay.DONE
        np.testing.assert_array_equal(wave.v[30], np.where(on, sent, SENTINEL))


def test_swizzles(wave):
    W = wave.p.W
    lanes = np.arange(W)
    want = {
        "swap": lanes ^ 4, "reverse": lanes ^ 7, "quad": lanes - lanes % 4 + np.array([3, 1, 0, 2])[lanes % 4],
        "broadcast": lanes - lanes % 16 + 5, "raw": lanes ^ 3, "raw_quad": lanes ^ 3,
    }  # fmt: skip
    wave.v[20] = lanes + 100
    for name, source in want.items():
        assert wave(f"swizzle_{name}", (1 << W) - 1) == lay.DONE
        np.testing.assert_array_equal(wave.v[30], source + 100, err_msg=name)
    with pytest.raises(KeyError, match="FFT"):
        lds.swizzle_lanes("swizzle(FFT,1)", W)
