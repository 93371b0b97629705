"""Loads and stores, lane by lane, against numpy; bounds checks; what other threads may see."""

import ctypes
import threading

import numpy as np
import pytest

from mori_triton.emulator import asm, lift
from mori_triton.emulator import state as lay
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.accesses import (
    GPUS,
    LOADS,
    OFFSET,
    PRIVATE,
    SENTINEL,
    STORES,
    active,
    lane_offsets,
    loaded,
    loads_and_stores,
    masks,
    prepare,
    set_resource,
)
from tests.emulator.bare import BareWave, Program

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", params=GPUS)
def program(request):
    return Program(request.param, loads_and_stores(request.param), PRIVATE)


@pytest.mark.parametrize("ty", LOADS)
def test_loads(program, ty):
    rng, W, size = np.random.default_rng(1), program.W, LOADS[ty][0]
    memory = rng.integers(0, 256, 4096, np.uint8)
    wave, words = BareWave(program), max(1, size // 4)
    for start in (0, 1, 2, 4, 8, 16):
        for offsets in lane_offsets(W, size, 1500, rng).values():
            for mask in masks(W, rng):
                prepare(wave, memory, start, offsets, 4096)
                wave.v[20:24] = SENTINEL
                want = wave.v[20:24].copy()
                for lane in np.flatnonzero(active(mask, W)):
                    at = start + offsets[lane]
                    want[:words, lane] = loaded(memory[at : at + size], want[:, lane], ty)
                for mode in ("base", "address", "flat", "buffer"):
                    wave.v[20:24] = SENTINEL
                    assert wave(f"load_{ty}_{mode}", mask) == lay.DONE
                    np.testing.assert_array_equal(wave.v[20:24], want, err_msg=f"{mode} {start} {mask:#x}")


@pytest.mark.parametrize("ty", STORES)
def test_stores(program, ty):
    rng, W, (size, shift) = np.random.default_rng(2), program.W, STORES[ty]
    wave = BareWave(program)
    wave.v[20:24] = rng.integers(0, 1 << 32, (4, W), np.uint64)
    raw = np.ascontiguousarray(wave.v[20:24].T)
    for start in (0, 1, 2, 4, 8, 16):
        for name, offsets in lane_offsets(W, size, 1500, rng).items():
            for mask in masks(W, rng):
                if name in ("anywhere", "same") and len(set(offsets[active(mask, W)].tolist())) < active(mask, W).sum():
                    # lanes that overlap: the highest wins here, but no kernel may count on it
                    offsets = offsets + np.arange(W) * 16  # noqa: PLW2901
                for mode in ("base", "address", "flat", "buffer"):
                    memory = np.full(4096, 0xCD, np.uint8)
                    want = memory.copy()
                    for lane in np.flatnonzero(active(mask, W)):
                        at = start + offsets[lane]
                        value = raw[lane].view(np.uint8) if shift == 0 else (raw[lane] >> shift).view(np.uint8)
                        want[at : at + size] = value[:size]
                    prepare(wave, memory, start, offsets, 4096)
                    assert wave(f"store_{ty}_{mode}", mask) == lay.DONE
                    np.testing.assert_array_equal(memory, want, err_msg=f"{mode} {start} {mask:#x}")


def test_scratch_is_private_to_a_lane(program):
    rng, W = np.random.default_rng(3), program.W
    wave = BareWave(program)
    mask = masks(W, rng)[-1]
    wave.allow()
    wave.s[7] = 4
    wave.v[10] = rng.integers(0, 8, W) * 4
    wave.v[20:22] = rng.integers(0, 1 << 32, (2, W), np.uint64)
    want = np.zeros((W, PRIVATE), np.uint8)
    for lane in np.flatnonzero(active(mask, W)):
        at = wave.v[10, lane] + 4 + OFFSET
        want[lane, at : at + 8] = np.ascontiguousarray(wave.v[20:22, lane]).view(np.uint8)
    assert wave("store_b64_scratch", mask) == lay.DONE
    np.testing.assert_array_equal(wave.scratch.reshape(W, PRIVATE), want)
    stored = wave.v[20:22].copy()
    wave.v[20:22] = SENTINEL
    assert wave("load_b64_scratch", mask) == lay.DONE
    np.testing.assert_array_equal(wave.v[20:22], np.where(active(mask, W), stored, SENTINEL))
    wave.v[10, 3] = PRIVATE - 4 - OFFSET - 4
    assert wave("load_b64_scratch", 1 << 3) == lay.FAULTED
    assert wave.get(lay.FAULT) == 5


def test_buffers_end_where_their_resource_says(program):
    """Past the end loads give 0 and stores are dropped, lane by lane, whether or not there is memory."""
    rng, W = np.random.default_rng(4), program.W
    wave, memory = BareWave(program), rng.integers(0, 256, 4096, np.uint8)
    for limit in (0, 4, 40, 41, 43, 44, 4 * W):
        offsets = np.arange(W) * 4
        prepare(wave, memory, 0, offsets, limit)
        inside = offsets + 4 <= limit
        wave.v[20] = SENTINEL
        assert wave("load_b32_buffer", (1 << W) - 1) == lay.DONE
        np.testing.assert_array_equal(wave.v[20], np.where(inside, memory.view(np.uint32)[:W], 0))
        before = memory.copy()
        wave.v[20] = 0x01020304
        assert wave("store_b32_buffer", (1 << W) - 1) == lay.DONE
        before.view(np.uint32)[:W][inside] = 0x01020304
        np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("num_bytes", [(1 << 31) - 2, (1 << 32) - 1, 1 << 32, (1 << 45) - 1])
def test_large_buffers_have_all_their_bytes(program, num_bytes):
    if num_bytes >= 1 << 32 and program.program.arch != "gfx1250":
        pytest.skip("sizes have 32 bits")
    wave, memory = BareWave(program), np.zeros(1 << 25, np.uint8)
    memory[-4:] = 1, 2, 3, 4
    prepare(wave, memory, 0, np.full(program.W, (1 << 25) - 4), 0)
    set_resource(wave, memory.ctypes.data - OFFSET - 64, num_bytes)
    wave.v[20] = SENTINEL
    assert wave("load_b32_buffer", (1 << program.W) - 1) == lay.DONE
    assert (wave.v[20] == 0x04030201).all()


def test_other_forms(program):
    rng, W = np.random.default_rng(5), program.W
    wave, memory = BareWave(program), rng.integers(0, 256, 4096, np.uint8)
    prepare(wave, memory, 0, np.arange(W), 4096)
    assert wave("load_uniform", (1 << W) - 1) == lay.DONE
    np.testing.assert_array_equal(wave.v[20:22], np.repeat(memory.view(np.uint32)[:2, None], W, 1))
    # the address registers are part of the destination
    where = rng.integers(0, 1000, W)
    wave.v[12], wave.v[13] = (memory.ctypes.data + where) & 0xFFFFFFFF, (memory.ctypes.data + where) >> 32
    assert wave("load_over_address", (1 << W) - 1) == lay.DONE
    want = np.stack([memory[at : at + 16].copy().view(np.uint32) for at in where], 1)
    np.testing.assert_array_equal(wave.v[10:14], want)
    if ".Lload_scaled" in program.program.labels:
        index = rng.integers(0, 500, W)
        prepare(wave, memory, 0, index, 4096)
        assert wave("load_scaled", (1 << W) - 1) == lay.DONE
        np.testing.assert_array_equal(
            wave.v[20] | wave.v[21].astype(np.uint64) << np.uint64(32), memory.view(np.uint64)[index]
        )


def test_every_lane_must_lie_in_one_allocation(program):
    W, arena = program.W, np.zeros(8192, np.uint8)
    first, second = arena[1024:2048], arena[2048:4096]
    wave = BareWave(program)

    def run(offsets: np.ndarray, mask: int, piece: str, origin: np.ndarray = first) -> tuple[int, int, int]:
        base = origin.ctypes.data
        wave.set64(4, base - OFFSET)
        wave.v[10] = offsets
        address = base - OFFSET + offsets.astype(np.int64)
        wave.v[12], wave.v[13] = address & 0xFFFFFFFF, address >> 32
        wave.allow(first, second)
        wave.put(lay.FAULT, 0)
        status = wave(piece, mask)
        return (
            (status, wave.get(lay.FAULT_ADDR) - base, wave.get(lay.FAULT_SIZE))
            if status != lay.DONE
            else (status, 0, 0)
        )

    lanes, full = np.arange(W), (1 << W) - 1
    fits = (lay.DONE, 0, 0)
    assert run(1024 - 8 * W + 8 * lanes, full, "load_b64_base") == fits
    # both allocations, no lane in two of them
    assert run(1024 - 16 + 4 * lanes, full, "load_b32_base") == fits
    # lane 2 lies across the border, which nothing may
    assert run(1024 - 18 + 8 * lanes, full, "load_b64_base") == (lay.FAULTED, 1024 - 2, 8)
    assert run(1024 - 18 + 8 * lanes, 0b11, "load_b64_base") == fits
    # the end of the last one, and before the first
    end = 3072
    assert run(end - 8 + 4 * lanes, full, "store_b32_base") == (lay.FAULTED, end, 4)
    assert not arena.any()
    assert run(end - 8 + 4 * lanes, 0b11, "store_b32_base") == fits
    assert run(4 * lanes - 4, full, "load_b32_address")[:2] == (lay.FAULTED, -4)
    assert run(4 * lanes - 4, full - 1, "load_b32_address") == fits
    # one lane of a gather
    where = np.where(lanes == 7, end + 100, 4 * lanes)
    assert run(where, full, "load_b32_base") == (lay.FAULTED, end + 100, 4)
    assert run(where, full - (1 << 7), "load_b32_base") == fits
    # the same address for all
    assert run(np.full(W, end - 1), full, "load_u16_base") == (lay.FAULTED, end - 1, 2)
    # an address that wraps around
    wave.v[12], wave.v[13] = 0xFFFFFFFC, 0xFFFFFFFF
    assert wave("load_b128_address", 1) == lay.FAULTED


def test_unaligned_lanes_and_holes_leave_the_neighbours_alone(program):
    """A store never touches bytes of lanes that are off, nor what lies between."""
    W = program.W
    wave = BareWave(program)
    wave.v[20:22] = 0xFFFFFFFF
    memory = np.zeros(4096, np.uint8)
    prepare(wave, memory, 3, np.arange(W) * 12, 4096)
    assert wave("store_b64_base", 0x5) == lay.DONE
    assert sorted(np.flatnonzero(memory)) == [*range(3, 11), *range(27, 35)]


@pytest.mark.parametrize("piece", ["store_b64_base", "store_b128_base", "store_b64_address"])
def test_other_threads_never_see_half_a_lane(program, piece):
    """One thread stores 8-byte lanes whose halves are equal; another one loads them."""
    W, rounds = program.W, 20000
    memory = np.zeros(16 * W // 8 + 1, np.uint64)
    if memory.ctypes.data % 16 == 0:
        memory = memory[1:]
    writer, reader = BareWave(program), BareWave(program)
    size = 16 if "b128" in piece else 8
    for wave in (writer, reader):
        prepare(wave, memory.view(np.uint8), 0, np.arange(W) * size, 4096)
    load, full, torn, stop = piece.replace("store", "load"), (1 << W) - 1, 0, threading.Event()

    def write():
        for i in range(rounds):
            writer.v[20:24] = i
            writer(piece, full)
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not stop.is_set():
        reader(load, full)
        torn += (reader.v[20] != reader.v[21]).sum()
        seen.add(int(reader.v[20, 0]))
    thread.join()
    assert torn == 0
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("gfx942", "buffer_load_dword v1, v2, s[4:7], 0 idxen"),
        ("gfx1201", "global_atomic_ordered_add_b64 v1, v[2:3], s[2:3]"),
        ("gfx1201", "global_load_b32 v1, v2, s[2:3] unheard_of"),
        ("gfx1201", "ds_append v1"),
    ],
)
def test_what_is_not_known_is_refused(arch, text):
    lines = [
        f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"',
        ".text",
        "kernel:",
        text,
        "s_endpgm",
        ".amdhsa_kernel kernel",
    ]
    with pytest.raises(UnsupportedInstruction, match=text.split()[0]):
        lift.Lifter(asm.parse("\n".join(lines))).lift()


def test_header_offsets_match_the_bitcode(program):
    """state.py against the words that the C++ functions use, seen from outside."""
    wave = BareWave(program)
    wave.allow(np.zeros(4, np.uint8))
    wave.v[12:14] = 0
    assert wave("load_b32_address", 1) == lay.FAULTED
    assert [wave.get(f) for f in (lay.FAULT, lay.FAULT_ADDR, lay.FAULT_SIZE)] == [1, OFFSET, 4]
    assert wave.get(lay.FAULT_PC) == wave.p.program.labels[".Lload_b32_address"]
    assert ctypes.sizeof(ctypes.c_void_p) == 8
