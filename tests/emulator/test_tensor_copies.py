"""gfx1250's copies of tiles between global memory and LDS, against numpy."""

import functools
import mmap

import numpy as np
import pytest

from mori_triton.emulator import state as lay
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.bare import BareWave, Program
from tests.emulator.harness import Wave

pytestmark = pytest.mark.cpu

# name: (first bit, bits) of the 128, 256, 128 and 128 bits of a descriptor's groups
FIRST = {"kind": (0, 2), "lds": (32, 32), "address": (64, 57), "type": (126, 2)}
SECOND = {
    "mask": (0, 16), "log_size": (16, 2), "barrier": (18, 1), "iterate": (19, 1), "gaps": (20, 1), "interval": (22, 3),
    "gap": (25, 7), "width": (48, 32), "height": (80, 32), "columns": (112, 16), "rows": (128, 16), "depth": (144, 16),
    "stride": (160, 48), "stride_2": (208, 48),
}  # fmt: skip
THIRD = {"size_2": (0, 32), "size_3": (32, 32), "stride_3": (64, 48), "tile_3": (112, 16)}
FOURTH = {"stride_4": (0, 48), "size_4": (48, 32), "tile_4": (80, 16)}
# of Linux; Python 3.13 has it in mmap
MAP_NORESERVE = 0x4000
LDS_BYTES, LDS_AT, ROWS, COLUMNS = 8192, 256, 40, 24


@functools.cache
def program():
    pieces = {"load": "tensor_load_to_lds s[12:15], s[4:11]", "store": "tensor_store_from_lds s[12:15], s[4:11]"}
    groups = "s[12:15], s[4:11], s[16:19], s[20:23]"
    pieces |= {"load_5": f"tensor_load_to_lds {groups}", "store_5": f"tensor_store_from_lds {groups}"}
    return Program("gfx1250", {**pieces, "registers": "v_mov_b32 v9, 0"})


class Copy:
    """A tensor [ROWS, COLUMNS] of random bytes with a descriptor of a tile that starts at `start`."""

    def __init__(self, log_size, start, **fields):
        self.rng, self.size = np.random.default_rng(log_size), 1 << log_size
        self.tensor = self.rng.integers(0, 256, (ROWS, COLUMNS, self.size), np.uint8)
        self.lds = np.full(LDS_BYTES, 0xEE, np.uint8)
        self.wave, (row, column) = BareWave(program()), start
        self.wave.set_lds(self.lds)
        self.wave.allow(self.tensor)
        values = {
            "kind": 1, "type": 2, "lds": LDS_AT, "log_size": log_size, "stride": COLUMNS,
            "address": self.tensor.ctypes.data + (row * COLUMNS + column) * self.size,
            "height": ROWS - row, "width": COLUMNS - column,
        } | fields  # fmt: skip
        for at, table in ((12, FIRST), (4, SECOND), (16, THIRD), (20, FOURTH)):
            whole = sum(values.get(name, 0) << bit for name, (bit, _) in table.items())
            for i in range(8 if at == 4 else 4):
                self.wave.s[at + i] = whole >> (32 * i) & 0xFFFFFFFF
        # stale registers, that no copy may keep
        self.wave.v[:] = 0xDEADBEEF

    def run(self, piece):
        # lanes that are not active do not matter
        return self.wave(piece, 0x10)


@pytest.mark.parametrize("log_size", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("start", "rows", "columns", "gaps"),
    [
        ((0, 0), 8, 8, None),
        ((32, 16), 16, 16, None),
        ((5, 20), 3, 7, (2, 1)),
        ((0, 0), 10, 24, (0, 4)),
        ((7, 3), 0, 9, None),
    ],
)
def test_load(log_size, start, rows, columns, gaps):
    """Rows one behind the other, zeros beyond the tensor, after each 2 ** (interval + 1) words a gap that is kept."""
    fields = {"gaps": 1, "interval": gaps[0], "gap": gaps[1]} if gaps else {}
    # gap fields without the flag mean nothing
    fields = fields or {"interval": 1, "gap": 3}
    copy = Copy(log_size, start, rows=rows, columns=columns, **fields)
    before = copy.tensor.copy()
    assert copy.run("load") == lay.DONE
    tile = np.zeros((max(rows, 1), columns, copy.size), np.uint8)
    part = before[start[0] : start[0] + len(tile), start[1] : start[1] + columns]
    tile[: part.shape[0], : part.shape[1]] = part
    stream, want, at = tile.ravel(), np.full(LDS_BYTES, 0xEE, np.uint8), LDS_AT
    every = 4 << (gaps[0] + 1) if gaps else len(stream)
    for first in range(0, len(stream), every):
        chunk = stream[first : first + every]
        want[at : at + len(chunk)] = chunk
        at += len(chunk) + (4 * (gaps[1] + 1) if gaps else 0)
    np.testing.assert_array_equal(copy.lds, want)
    np.testing.assert_array_equal(copy.tensor, before)


@pytest.mark.parametrize("log_size", [0, 1, 2, 3])
def test_store(log_size):
    """What lies beyond the tensor is not written; gaps are for loads only."""
    copy = Copy(log_size, (30, 12), rows=16, columns=15, gaps=1, interval=2, gap=3)
    copy.lds[:] = copy.rng.integers(0, 256, LDS_BYTES, np.uint8)
    want, lds = copy.tensor.copy(), copy.lds.copy()
    assert copy.run("store") == lay.DONE
    tile = lds[LDS_AT : LDS_AT + 16 * 15 * copy.size].reshape(16, 15, copy.size)
    want[30:40, 12:24] = tile[:10, :12]
    np.testing.assert_array_equal(copy.tensor, want)
    np.testing.assert_array_equal(copy.lds, lds)


class Tall(Copy):
    """A tensor of three to five dimensions, a tile that starts at `start`."""

    def __init__(self, shape, start, tile, log_size=2, **fields):
        outer = shape[:-2]
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        left = [n - s for n, s in zip(shape, start, strict=True)]
        fields |= {"columns": tile[-1], "rows": tile[-2], "depth": tile[-3], "stride": strides[-2]}
        fields |= {"width": left[-1], "height": left[-2], "stride_2": strides[-3], "size_2": left[-3]}
        for i in range(3, len(outer) + 2):
            fields |= {f"tile_{i}": tile[-1 - i], f"size_{i}": left[-1 - i], f"stride_{i}": strides[-1 - i]}
        super().__init__(log_size, (0, 0), **fields, address=0)
        self.tensor = self.rng.integers(0, 256, (*shape, self.size), np.uint8)
        self.wave.allow(self.tensor)
        address = self.tensor.ctypes.data + self.size * sum(s * n for s, n in zip(start, strides, strict=True))
        self.wave.s[14], self.wave.s[15] = address & 0xFFFFFFFF, address >> 32 | 2 << 30
        self.part = tuple(slice(s, s + n) for s, n in zip(start, tile, strict=True))
        self.inside = tuple(slice(0, max(0, min(n, m))) for n, m in zip(tile, left, strict=True))
        self.tile = (*tile, self.size)


TALL = [
    ((5, 6, 7), (1, 2, 3), (2, 3, 4)),
    ((5, 6, 7), (3, 4, 2), (4, 4, 8)),
    ((3, 4, 5, 6), (0, 1, 2, 3), (2, 2, 3, 5)),
    ((4, 3, 4, 5, 6), (1, 0, 1, 2, 3), (2, 4, 2, 1, 3)),
    ((4, 3, 4, 5, 6), (3, 2, 3, 4, 5), (2, 2, 2, 2, 2)),
]


@pytest.mark.parametrize(("shape", "start", "tile"), TALL)
@pytest.mark.parametrize("log_size", [1, 2])
def test_load_of_more_dimensions(shape, start, tile, log_size):
    copy = Tall(shape, start, tile, log_size)
    assert copy.run("load_5") == lay.DONE
    want = np.zeros(copy.tile, np.uint8)
    want[copy.inside] = copy.tensor[copy.part]
    num_bytes = want.size
    np.testing.assert_array_equal(copy.lds[LDS_AT : LDS_AT + num_bytes].reshape(want.shape), want)
    assert (copy.lds[:LDS_AT] == 0xEE).all()
    assert (copy.lds[LDS_AT + num_bytes :] == 0xEE).all()


@pytest.mark.parametrize(("shape", "start", "tile"), TALL)
def test_store_of_more_dimensions(shape, start, tile):
    copy = Tall(shape, start, tile)
    copy.lds[:] = copy.rng.integers(0, 256, LDS_BYTES, np.uint8)
    want = copy.tensor.copy()
    values = copy.lds[LDS_AT : LDS_AT + int(np.prod(copy.tile))].reshape(copy.tile)
    want[copy.part] = values[copy.inside]
    assert copy.run("store_5") == lay.DONE
    np.testing.assert_array_equal(copy.tensor, want)


def test_long_strides():
    """All of 48 bits, as far as there are addresses: bytes far apart in memory that nobody else has."""
    strides = [7, 2**16 + 3, 2**32 + 5, 2**33 + 2**16 + 9]
    reach = sum(strides) + 2
    far = np.frombuffer(mmap.mmap(-1, reach, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), np.uint8)
    copy = Tall((2,) * 5, (0,) * 5, (2,) * 5, 0)
    for name, (bit, _), start in (
        ("stride", SECOND["stride"], 4), ("stride_2", SECOND["stride_2"], 4),
        ("stride_3", THIRD["stride_3"], 16), ("stride_4", FOURTH["stride_4"], 20),
    ):  # fmt: skip
        value = strides[("stride", "stride_2", "stride_3", "stride_4").index(name)]
        for i in range(48):
            register, place = start + (bit + i) // 32, (bit + i) % 32
            copy.wave.s[register] = int(copy.wave.s[register]) & ~(1 << place) | (value >> i & 1) << place
    copy.wave.allow(far)
    copy.wave.s[14], copy.wave.s[15] = far.ctypes.data & 0xFFFFFFFF, far.ctypes.data >> 32 | 2 << 30
    want = np.arange(1, 33, dtype=np.uint8)
    copy.lds[LDS_AT : LDS_AT + 32] = want
    assert copy.run("store_5") == lay.DONE
    places = [sum(s for i, s in enumerate([1, *strides]) if e >> i & 1) for e in range(32)]
    np.testing.assert_array_equal(far[places], want)
    copy.lds[:] = 0
    assert copy.run("load_5") == lay.DONE
    np.testing.assert_array_equal(copy.lds[LDS_AT : LDS_AT + 32], want)


def test_two_dimensions_with_all_groups():
    """A dimension of which the tile has 0 is not there."""
    copy = Copy(2, (5, 20), rows=3, columns=4)
    assert copy.run("load_5") == lay.DONE
    want = copy.tensor[5:8, 20:24]
    np.testing.assert_array_equal(copy.lds[LDS_AT : LDS_AT + want.size].reshape(want.shape), want)


@pytest.mark.parametrize("fields", [{"kind": 0}, {"rows": 4, "columns": 0}, {"width": 0}, {"height": 0}])
def test_nothing_to_store(fields):
    copy = Copy(2, (0, 0), **({"rows": 4, "columns": 4} | fields))
    before = copy.tensor.copy()
    assert copy.run("store") == lay.DONE
    np.testing.assert_array_equal(copy.tensor, before)


@pytest.mark.parametrize("piece", ["load", "store"])
@pytest.mark.parametrize("fields", [{"kind": 2}, {"mask": 3}, {"barrier": 1}, {"iterate": 1}, {"depth": 2}])
def test_other_kinds_are_faults(piece, fields):
    """Lists of rows, copies to other workgroups, barriers, repetitions, three dimensions without the words for them."""
    copy = Copy(2, (0, 0), **({"rows": 4, "columns": 4} | fields))
    before = copy.tensor.copy(), copy.lds.copy()
    assert copy.run(piece) == lay.FAULTED
    assert copy.wave.get(lay.FAULT) & 0xFFFFFFFF == lay.UNKNOWN_COPY
    np.testing.assert_array_equal(copy.tensor, before[0])
    np.testing.assert_array_equal(copy.lds, before[1])


def test_a_copy_stays_in_its_memory():
    copy = Copy(2, (0, 0), rows=41, columns=4, height=41)
    assert copy.run("load") == lay.FAULTED
    assert copy.wave.get(lay.FAULT) & 0xFFFFFFFF == 1


@pytest.mark.parametrize(
    ("arch", "line"),
    [
        ("gfx1250", "tensor_load_to_lds s[0:3], s[4:11], s[12:15]"),
        ("gfx1250", "tensor_load_to_lds s[0:3], s[4:11], s[12:15], v[16:19]"),
        ("gfx1250", "tensor_load_to_lds s[0:3], s[4:11] th:TH_LOAD_NT"),
        ("gfx1201", "tensor_load_to_lds s[0:3], s[4:11]"),
    ],
)
def test_refused(arch, line):
    with pytest.raises(UnsupportedInstruction):
        Wave(arch, [line])
