"""Transposing loads and copies to LDS, lane by lane, against what the documents say of rows and columns."""

import numpy as np
import pytest

from mori_triton.emulator import state as lay
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.bare import BareWave, Program
from tests.emulator.harness import Wave

pytestmark = pytest.mark.cpu

EVERYONE = {32: (1 << 32) - 1, 64: (1 << 64) - 1}
# instruction: (GPU, lanes of a group, (lane of the group that loads row, column), element bits, registers)
# gfx9: neighbours load a row of 16 elements. gfx12, 16 bits: a lane a row of 8; 8 bits: rows of 16, 4 + 4 lanes
TRANSPOSES = {
    "ds_read_b64_tr_b16 v[4:5], v2 offset:16": ("gfx950", 16, lambda r, c: 4 * r + c // 4, 16, 2),
    "ds_read_b64_tr_b8 v[4:5], v2 offset:16": ("gfx950", 16, lambda r, c: 2 * r + c // 8, 8, 2),
    "ds_read_b64_tr_b4 v[4:5], v2 offset:16": ("gfx950", 16, lambda r, c: r, 4, 2),
    "ds_load_tr16_b128 v[4:7], v2 offset:16": ("gfx1250", 8, lambda r, c: r, 16, 4),
    "ds_load_tr8_b64 v[4:5], v2 offset:16": ("gfx1250", 16, lambda r, c: r // 4 * 8 + c // 8 * 4 + r % 4, 8, 2),
    "global_load_tr16_b128 v[4:7], v2, s[4:5] offset:16": ("gfx1250", 8, lambda r, c: r, 16, 4),
    "global_load_tr8_b64 v[4:5], v[8:9], off offset:16": (
        "gfx1250", 16, lambda r, c: r // 4 * 8 + c // 8 * 4 + r % 4, 8, 2,
    ),
    "global_load_tr_b128 v[4:7], v2, s[4:5] offset:16": ("gfx1201", 8, lambda r, c: r, 16, 4),
    # the address lies in the destination
    "ds_load_tr16_b128 v[1:4], v2 offset:16": ("gfx1250", 8, lambda r, c: r, 16, 4),
}  # fmt: skip


@pytest.mark.parametrize("line", TRANSPOSES)
def test_transposing_load(line):
    """Every lane gets a column of its group's matrix, whatever the lanes' addresses are."""
    arch, group, loader, bits, registers = TRANSPOSES[line]
    p = Program(arch, {"one": line, "more_registers": "v_mov_b32 v20, 0"})
    wave, rng = BareWave(p), np.random.default_rng(3)
    memory = rng.integers(0, 256, 1 << 14, np.uint8)
    wave.set_lds(memory)
    wave.allow(memory)
    size = 4 * registers
    at = rng.permutation(len(memory) // 32)[: p.W] * 32
    wave.v[2] = at
    wave.set64(4, memory.ctypes.data)
    address = memory.ctypes.data + at
    wave.v[8], wave.v[9] = address & 0xFFFFFFFF, address >> 32
    # lanes that are not active take part
    assert wave("one", EVERYONE[p.W] if arch == "gfx950" else 0x0F) == lay.DONE
    per_lane = 8 * size // bits
    columns = group if arch == "gfx950" or bits == 8 else per_lane
    first = int(line.split("v[")[1].split(":")[0])
    for lane in range(p.W):
        column, base = lane % group % columns, lane // group * group
        if group > columns:
            raise AssertionError
        whole = 0
        for row in range(per_lane):
            source = base + loader(row, column)
            raw = int.from_bytes(memory[at[source] + 16 : at[source] + 16 + size].tobytes(), "little")
            whole |= (raw >> (bits * (column % per_lane)) & ((1 << bits) - 1)) << (bits * row)
        got = sum(int(wave.v[first + r, lane]) << (32 * r) for r in range(registers))
        assert got == whole, lane


def copy_setup(arch, line):
    p = Program(arch, {"one": line, "more_registers": "v_mov_b32 v20, 0"})
    wave, rng = BareWave(p), np.random.default_rng(4)
    memory, lds = rng.integers(0, 256, 4096, np.uint8), np.full(8192, 0xEE, np.uint8)
    wave.set_lds(lds)
    wave.allow(memory)
    wave.set64(4, memory.ctypes.data)
    # resource of the first 2048 bytes
    wave.set64(8, memory.ctypes.data)
    wave.set64(10, 2048)
    at = rng.permutation(128)[: p.W] * 16
    wave.v[2] = at
    address = memory.ctypes.data + at
    wave.v[6], wave.v[7] = address & 0xFFFFFFFF, address >> 32
    return wave, memory, lds, at


ACTIVE = 0x0000FFFF3FFC1234


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("buffer_load_dwordx4 v2, s[8:11], s3 offen offset:32 lds", 16),
        ("buffer_load_dword v2, s[8:11], s3 offen lds", 4),
        ("global_load_lds_dwordx4 v[6:7], off offset:16", 16),
        ("global_load_lds_dword v2, s[4:5]", 4),
    ],
)
def test_copy_to_consecutive_places(line, size):
    """m0 and the lane's number say where in LDS; the offset counts for both; what is past a buffer's end reads as 0."""
    wave, memory, lds, at = copy_setup("gfx950", line)
    wave.s[125], wave.s[3] = 100 * 4, 64
    before = wave.v.copy()
    assert wave("one", ACTIVE) == lay.DONE
    offset = int(line.split("offset:")[1].split()[0]) if "offset" in line else 0
    want = np.full(8192, 0xEE, np.uint8)
    step = 16 if size > 4 else 4
    outside = 0
    for lane in range(64):
        if not ACTIVE >> lane & 1:
            continue
        start = at[lane] + offset + (64 if "buffer" in line else 0)
        data = memory[start : start + size]
        if "buffer" in line and at[lane] + offset + size > 2048:
            data, outside = 0, outside + 1
        want[400 + offset + step * lane :][:size] = data
    np.testing.assert_array_equal(lds, want)
    np.testing.assert_array_equal(wave.v[:8], before[:8])
    assert outside or "buffer_load_dwordx4" not in line


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("global_load_async_to_lds_b128 v1, v[6:7], off offset:16", 16),
        ("global_load_async_to_lds_b64 v1, v2, s[4:5]", 8),
        ("global_load_async_to_lds_b32 v1, v2, s[4:5]", 4),
        ("global_load_async_to_lds_b8 v1, v2, s[4:5]", 1),
    ],
)
def test_copy_to_places_of_each_lane(line, size):
    """A lane with the address 0x7fffffff in LDS neither loads nor stores."""
    wave, memory, lds, at = copy_setup("gfx1250", line + "\nv_mov_b32 v11, 0x7fffffff\nds_store_b32 v1, v12")
    where = np.random.default_rng(5).permutation(128)[:32] * 32
    wave.v[1] = where
    wave.v[1, 5] = wave.v[1, 9] = 0x7FFFFFFF
    # such a lane's address in memory may be anything
    wave.v[2, 5] = wave.v[7, 5] = 0x7FFFFFF0
    wave.v[12] = 0x04030201
    mask = 0xFFFF_0FF1 | 1 << 5 | 1 << 9
    assert wave("one", mask) == lay.DONE
    offset = 16 if "offset" in line else 0
    want = np.full(8192, 0xEE, np.uint8)
    for lane in range(32):
        if mask >> lane & 1 and lane not in (5, 9):
            want[where[lane] + offset :][:size] = memory[at[lane] + offset :][:size]
            want[where[lane] :][:4] = [1, 2, 3, 4]
    np.testing.assert_array_equal(lds, want)


def test_lds_is_checked():
    wave, *_ = copy_setup("gfx950", "buffer_load_dwordx4 v2, s[8:11], s3 offen lds")
    wave.s[125], wave.s[3] = 8192 - 63 * 16, 0
    assert wave("one", EVERYONE[64]) == lay.FAULTED
    assert wave.get(lay.FAULT) == 2


@pytest.mark.parametrize(
    ("arch", "line"),
    [
        ("gfx950", "ds_read_b96_tr_b6 v[0:2], v3"),
        ("gfx942", "buffer_load_dwordx2 v0, s[0:3], 0 offen lds"),
        ("gfx942", "buffer_load_ushort v0, s[0:3], 0 offen lds"),
        ("gfx1250", "ds_load_tr4_b64 v[0:1], v3"),
        ("gfx1250", "global_store_async_from_lds_b128 v[0:1], v3, off"),
    ],
)
def test_refused(arch, line):
    with pytest.raises(UnsupportedInstruction):
        Wave(arch, [line])


@pytest.mark.parametrize("arch", ["gfx942", "gfx1250"])
def test_flat_addresses_of_lds_and_stack(arch):
    """One instruction reaches global memory, LDS and the stack, each lane where its address says."""
    old_names = arch == "gfx942"
    word, returns = ("dword", "sc0") if old_names else ("b32", "th:TH_ATOMIC_RETURN")
    one = f"""
    s_mov_b64 s[12:13], src_shared_base
    s_mov_b64 s[14:15], src_private_base
    flat_load_{word} v3, v[6:7] offset:4
    flat_store_{word} v[6:7], v10 offset:8
    flat_atomic_add{"" if old_names else "_u32"} v11, v[6:7], v10 {returns}
    """
    p = Program(arch, {"one": one, "more_registers": "v_mov_b32 v20, 0"}, private_bytes=64)
    wave, rng = BareWave(p), np.random.default_rng(6)
    memory, lds = (rng.integers(0, 1 << 30, 1024, np.uint32) for _ in range(2))
    wave.set_lds(lds.view(np.uint8))
    wave.allow(memory)
    stack = wave.scratch.view(np.uint32).reshape(p.W, 16)
    stack[:] = rng.integers(0, 1 << 30, stack.shape)
    before = [memory.copy(), lds.copy(), stack.copy()]
    bases = [memory.ctypes.data, lay.SHARED_BASE, lay.PRIVATE_BASE]
    space, index = rng.integers(0, 3, p.W), rng.permutation(p.W) * 4
    index[space == 2] = rng.integers(0, 13, p.W)[space == 2]
    for lane in range(p.W):
        address = bases[space[lane]] + 4 * int(index[lane])
        wave.v[6, lane], wave.v[7, lane] = address & 0xFFFFFFFF, address >> 32
    wave.v[10] = np.arange(p.W) + 7
    assert wave("one", EVERYONE[p.W]) == lay.DONE
    assert (int(wave.s[13]) << 32, int(wave.s[15]) << 32) == (lay.SHARED_BASE, lay.PRIVATE_BASE)
    for lane in range(p.W):
        old = before[space[lane]][lane] if space[lane] == 2 else before[space[lane]]
        new = [memory, lds, stack[lane]][space[lane]]
        i = index[lane]
        assert wave.v[3, lane] == old[i + 1]
        assert wave.v[11, lane] == old[i]
        assert (new[i], new[i + 1], new[i + 2]) == (old[i] + lane + 7, old[i + 1], lane + 7)


def test_flat_addresses_are_checked():
    p = Program("gfx942", {"one": "s_mov_b64 s[12:13], src_private_base\nflat_load_dword v3, v[6:7]"}, private_bytes=64)
    wave = BareWave(p)
    wave.v[7] = lay.PRIVATE_BASE >> 32
    assert wave("one", 1) == lay.DONE
    wave.v[6] = 61
    assert wave("one", 1) == lay.FAULTED
    assert wave.get(lay.FAULT) == 5
