"""Atomics: exactly one operation a program whatever num_warps is (bug case M8), results in every thread, relaxed, all
widths.
"""

from __future__ import annotations

import pytest
import torch

from mori_triton import abi
from mori_triton.device.launch import launch
from tests.device import kernels
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu

AT32, AT64 = 8192, 12288
CASES = [
    ("gfx1201", 1),
    ("gfx1201", 2),
    ("gfx1201", 4),
    ("gfx1201", 8),
    ("gfx942", 1),
    ("gfx942", 4),
    ("gfx950", 2),
    ("gfx1250", 2),
]


def fetch_model(bits: int, start: int) -> tuple[list[int], int]:
    """What fetch_kernel sees on one word, in plain Python."""
    mask, word, seen = (1 << bits) - 1, start, []
    steps = (
        lambda w: w,
        lambda w: w + 5,
        lambda w: w + 1,
        lambda w: w & 0x0FF0,
        lambda w: w | 0x3000,
        lambda w: w ^ 0x5555,
        lambda w: 1234,
        lambda w: 4321 if w == 1234 else w,
    )
    for step in steps:
        seen.append(word)
        word = step(word) & mask
    return seen, word


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize(("arch", "num_warps"), CASES)
def test_m8_fetch_happens_once_and_reaches_every_thread(arch: str, num_warps: int) -> None:
    lanes = num_warps * (64 if arch.startswith("gfx9") else 32)
    pes = Pes(2, arch)
    with pes.current(0) as ctx:
        start32, start64 = 0xFFFF_FFFC, 0x0123_4567_FFFF_FFFC
        pes.view(1, AT32, 1, torch.int32)[0] = signed(start32, 32)
        pes.view(1, AT64, 1, torch.int64)[0] = start64
        out = torch.full((16, lanes), -99, dtype=torch.int64)
        p32, p64 = pes.view(0, AT32, 1, torch.int32), pes.view(0, AT64, 1, torch.int64)
        launch(kernels.fetch_kernel, (1,), ctx, out, p32, p64, 1, LANES=lanes, num_warps=num_warps)
        seen32, end32 = fetch_model(32, start32)
        seen64, end64 = fetch_model(64, start64)
        want = [signed(v, 32) for v in seen32] + [signed(v, 64) for v in seen64]
        assert torch.equal(out, torch.tensor(want)[:, None].expand(16, lanes))
        assert int(pes.view(1, AT32, 1, torch.int32)[0]) == end32
        assert int(pes.view(1, AT64, 1, torch.int64)[0]) == end64
        assert pes.count(0) == 0


@pytest.mark.parametrize(("arch", "num_warps"), CASES)
def test_m8_nonfetch_happens_once_a_program(arch: str, num_warps: int) -> None:
    programs = 3
    pes = Pes(2, arch)
    with pes.current(0) as ctx:
        words32, words64 = pes.view(1, AT32, 8, torch.int32), pes.view(1, AT64, 8, torch.int64)
        words32[:], words64[:] = 0xFFF, 0xFFF
        p32, p64 = pes.view(0, AT32, 8, torch.int32), pes.view(0, AT64, 8, torch.int64)
        launch(kernels.nonfetch_kernel, (programs,), ctx, p32, p64, 1, num_warps=num_warps)
        odd = 0xFFF ^ 0x0F0F  # three times
        want = [0xFFF + 7 * programs, 0xFFF + programs, 99, 0xFFF & 0x0F0F, 0xFFF | 0x0F0F, odd]
        assert words32.tolist() == [*want, 77, 0xFFF]
        assert words64.tolist() == [*want, 1 << 40, 0xFFF]


@pytest.mark.parametrize(("arch", "num_warps"), [("gfx1201", 4), ("gfx942", 4), ("gfx950", 1), ("gfx1250", 4)])
def test_broadcast_and_tritons_own_lds_do_not_overlap(arch: str, num_warps: int) -> None:
    n = 256
    pes = Pes(1, arch)
    with pes.current(0) as ctx:
        x = torch.randint(-1000, 1000, (n,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        out = torch.full((4, n), -99, dtype=torch.int32)
        counter = pes.view(0, AT32, 1, torch.int32)
        counter[0] = 10
        launch(kernels.mixed_lds_kernel, (1,), ctx, x, out, counter, N=n, num_warps=num_warps)
        total, top = int(x.sum()), int(x.max())
        seen = [10, 11, 11 + total, 11 + total + top]
        ordered, running = x.sort().values, x.cumsum(0)
        want = torch.stack([ordered + seen[0], running + seen[1], x.flip(0) + seen[2], torch.full((n,), seen[3])])
        assert torch.equal(out, want.int())


@pytest.mark.parametrize(
    ("at32", "at64", "pe"),
    [(AT32 + 2, AT64 + 4, 1), (-4, -8, 1), (1 << 16, 1 << 16, 1), (AT32, AT64, 2), (AT32, AT64, -1)],
)
def test_refused_atomics_change_nothing(at32: int, at64: int, pe: int) -> None:
    lanes = 64
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        before = [heap.clone() for heap in pes.heaps]
        out = torch.full((16, lanes), -99, dtype=torch.int64)
        i32, i64 = torch.int32, torch.int64
        p32 = pointer(pes.base(0) + at32, i32)
        p64 = pointer(pes.base(0) + at64, i64)
        launch(kernels.fetch_kernel, (1,), ctx, out, p32, p64, pe, LANES=lanes, num_warps=1)
        assert torch.equal(out, torch.zeros_like(out))
        assert pes.count(0) == 16
        assert {(r["kind"], r["peer"]) for r in pes.records(0)} == {(abi.ERROR_REFUSED, pe)}
        for heap, old in zip(pes.heaps, before, strict=True):
            assert torch.equal(heap, old)


class pointer:
    """An address that Triton takes as a typed pointer argument."""

    def __init__(self, address: int, dtype: torch.dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address
