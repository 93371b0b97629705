"""Loads, stores and atomics, lane by lane, against numpy; bounds checks; what other threads may see."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from mori_triton.emulator import asm, lift
from mori_triton.emulator import state as lay
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.bare import BareWave, Program

pytestmark = pytest.mark.cpu

GPUS = ["gfx1201", "gfx942", "gfx950", "gfx1250"]
# type: (bytes in memory, signed, where it goes in the register: None = all of it, else the first bit of a half)
LOADS = {
    "u8": (1, False, None), "i8": (1, True, None), "u16": (2, False, None), "i16": (2, True, None),
    "b32": (4, False, None), "b64": (8, False, None), "b96": (12, False, None), "b128": (16, False, None),
    "d16_b16": (2, False, 0), "d16_hi_b16": (2, False, 16), "d16_u8": (1, False, 0), "d16_hi_u8": (1, False, 16),
    "d16_i8": (1, True, 0), "d16_hi_i8": (1, True, 16),
}  # fmt: skip
STORES = {"b8": (1, 0), "b16": (2, 0), "d16_hi_b8": (1, 16), "d16_hi_b16": (2, 16)}
STORES |= {name: (size, 0) for name, size in (("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16))}
GFX9 = {
    "u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort", "b32": "dword", "b64": "dwordx2", "b96": "dwordx3",
    "b128": "dwordx4", "d16_b16": "short_d16", "d16_hi_b16": "short_d16_hi", "d16_u8": "ubyte_d16",
    "d16_hi_u8": "ubyte_d16_hi", "d16_i8": "sbyte_d16", "d16_hi_i8": "sbyte_d16_hi", "b8": "byte", "b16": "short",
    "d16_hi_b8": "byte_d16_hi",
}  # fmt: skip
MODES = ["base", "address", "flat", "buffer", "scratch"]
OFFSET = 8
PRIVATE = 64
SENTINEL = 0xDEADBEEF


def registers(first: int, num_bytes: int) -> str:
    n = max(1, num_bytes // 4)
    return f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"


def operands(kind: str, mode: str, data: str) -> str:
    """Operands of a load or store: offset in v10, address in v[12:13], base in s[4:5], resource in s[8:11]."""
    load = kind == "load"

    def order(address: str) -> str:
        return f"{data}, {address}" if load else f"{address}, {data}"

    return {
        "base": f"{order('v10')}, s[4:5] offset:{OFFSET}",
        "address": f"{order('v[12:13]')}, off offset:{OFFSET}",
        "flat": f"{order('v[12:13]')} offset:{OFFSET}",
        "buffer": f"{data}, v10, s[8:11], s6 offen offset:{OFFSET}",
        "scratch": f"{order('v10')}, s7 offset:{OFFSET}",
    }[mode]


def pieces(arch: str) -> dict[str, str]:
    gfx9, found = not arch.startswith("gfx12"), {}
    for kind, types in (("load", LOADS), ("store", STORES)):
        for ty, (size, *_) in types.items():
            for mode in MODES:
                space = "global" if mode in ("base", "address") else mode
                name = f"{space}_{kind}_{GFX9[ty] if gfx9 else ty}"
                found[f"{kind}_{ty}_{mode}"] = f"{name} {operands(kind, mode, registers(20, size))}"
    found["load_uniform"] = f"buffer_load_{'dwordx2' if gfx9 else 'b64'} v[20:21], off, s[8:11], s6 offset:{OFFSET}"
    found["load_over_address"] = f"global_load_{'dwordx4' if gfx9 else 'b128'} v[10:13], v[12:13], off"
    if arch == "gfx1250":
        found["load_scaled"] = f"global_load_b64 v[20:21], v10, s[4:5] offset:{OFFSET} scale_offset"
    for size, word in ((32, ""), (64, "_x2")):
        for op in ATOMICS:
            for returns in (False, True):
                name = f"global_atomic_{op}{word}" if gfx9 else f"global_atomic_{gfx12_atomic(op, size)}"
                data = registers(20, size // 8 * (2 if op == "cmpswap" else 1))
                out = f"{registers(30, size // 8)}, " if returns else ""
                bits = (" sc0" if gfx9 else " th:TH_ATOMIC_RETURN") if returns else ""
                found[f"atomic_{op}_{size}_{returns}"] = f"{name} {out}v10, {data}, s[4:5] offset:{OFFSET}{bits}"
    for op, number in (("fadd", "add_f32"), ("fmin", "min_num_f32"), ("fmax", "max_num_f32")):
        if not gfx9 or op == "fadd":
            found[f"atomic_{op}_32_False"] = f"global_atomic_{number} v10, v20, s[4:5] offset:{OFFSET}"
    for kind in ("f16", "bf16"):
        found[f"atomic_{kind}"] = f"global_atomic_pk_add_{kind} v10, v20, s[4:5] offset:{OFFSET}"
    return found


ATOMICS = ["add", "sub", "and", "or", "xor", "swap", "cmpswap", "smin", "smax", "umin", "umax", "inc", "dec"]


def gfx12_atomic(op: str, size: int) -> str:
    if op in ("smin", "smax", "umin", "umax"):
        return f"{op[1:]}_{'i' if op[0] == 's' else 'u'}{size}"
    return f"{op}_{'u' if op in ('add', 'sub', 'inc', 'dec') else 'b'}{size}"


@pytest.fixture(scope="module", params=GPUS)
def program(request):
    return Program(request.param, pieces(request.param), PRIVATE)


def masks(W: int, rng) -> list[int]:
    """All lanes, a run at the start, one in the middle, one lane, every second lane, random lanes."""
    full = (1 << W) - 1
    middle = ((1 << W // 3) - 1) << 5
    return [full, (1 << (W - 3)) - 1, middle, 1 << (W - 1), full // 3, int(rng.integers(1, 1 << 30)) * 5 & full]


def lane_offsets(W: int, size: int, room: int, rng) -> dict[str, np.ndarray]:
    """Byte offsets of the lanes: consecutive, all the same, reversed, with a gap, anywhere, anywhere aligned."""
    lanes = np.arange(W)
    return {
        "run": lanes * size,
        "same": np.full(W, 3 * size),
        "reversed": (W - 1 - lanes) * size,
        "gap": lanes * size + (lanes > W // 2) * 16,
        "anywhere": rng.integers(0, room - 16, W),
        "aligned": rng.integers(0, room // 16 - 1, W) * 16,
    }


def active(mask: int, W: int) -> np.ndarray:
    return np.array([bool(mask >> lane & 1) for lane in range(W)])


def set_resource(wave: BareWave, base: int, num_bytes: int) -> None:
    """A raw buffer in s[8:11]. gfx1250: 57 bits of address, 45 of size; others: 48 and, in the third word, 32."""
    bits = base | num_bytes << (57 if wave.p.program.arch == "gfx1250" else 64)
    wave.set64(8, bits & ((1 << 64) - 1))
    wave.set64(10, bits >> 64)


def prepare(wave: BareWave, memory: np.ndarray, start: int, offsets: np.ndarray, limit: int) -> None:
    """Point every addressing mode at memory[start + offsets]."""
    base = memory.ctypes.data + start
    wave.allow(memory)
    wave.v[10] = offsets
    address = base - OFFSET + offsets
    wave.v[12], wave.v[13] = address & 0xFFFFFFFF, address >> 32
    wave.set64(4, base - OFFSET)
    # the resource's base, half of the way as scalar offset; out of range from `limit` on
    set_resource(wave, base - OFFSET - 64, limit + OFFSET)
    wave.s[6], wave.s[7] = 64, 0


def loaded(raw: np.ndarray, old: np.ndarray, ty: str) -> np.ndarray:
    """Registers after a lane has loaded `raw` (its bytes); old: what they held."""
    size, signed, half = LOADS[ty]
    if size >= 4:
        return raw.view(np.uint32)
    value = int.from_bytes(raw.tobytes(), "little", signed=signed)
    if half is None:
        return np.array([value & 0xFFFFFFFF], np.uint32)
    keep = int(old[0]) & ~(0xFFFF << half)
    return np.array([keep | (value & 0xFFFF) << half], np.uint32)


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


def atomic_reference(op: str, size: int, old: int, x: int, compare: int) -> int:
    full = (1 << size) - 1

    def signed(v: int) -> int:
        return v - (1 << size) if v >> (size - 1) else v

    return {
        "add": lambda: old + x & full, "sub": lambda: old - x & full, "and": lambda: old & x, "or": lambda: old | x,
        "xor": lambda: old ^ x, "swap": lambda: x, "cmpswap": lambda: x if old == compare else old,
        "smin": lambda: old if signed(old) < signed(x) else x, "smax": lambda: old if signed(old) > signed(x) else x,
        "umin": lambda: min(old, x), "umax": lambda: max(old, x),
        "inc": lambda: 0 if old >= x else old + 1, "dec": lambda: x if old == 0 or old > x else old - 1,
    }[op]()  # fmt: skip


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
    torch.testing.assert_close(memory, want, rtol=0, atol=0, equal_nan=True)


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
    # atomics have to be aligned
    assert run(4 * lanes, full, "atomic_add_64_False") == (lay.FAULTED, 4, 8)
    assert wave.get(lay.FAULT) == 3
    assert run(8 * lanes, full, "atomic_add_64_False") == fits


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


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("gfx942", "buffer_load_dword v1, s[4:7], 0 offen lds"),
        ("gfx942", "global_load_lds_dword v1, s[2:3]"),
        ("gfx942", "buffer_load_dword v1, v2, s[4:7], 0 idxen"),
        ("gfx1250", "global_load_async_to_lds_b32 v1, v2, s[2:3]"),
        ("gfx1250", "global_load_tr8_b64 v[1:2], v3, s[2:3]"),
        ("gfx950", "ds_read_b64_tr_b16 v[2:3], v1"),
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
