"""put, get and put_signal against plain byte copies: every size class, alignment, scope and wave width."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mori_triton import abi
from mori_triton.device.launch import launch
from tests.device import kernels
from tests.device.pes import SENTINEL, Pes, pattern

pytestmark = pytest.mark.cpu

SIZES = (0, 1, 3, 15, 16, 17, 255, 4096)
DST, SRC, SIG = 8192, 1024, 16384


def copy(
    pes: Pes, ctx, which: int, dst: int, src: int, num_bytes: int, pe: int, *, op=abi.SIGNAL_SET, value=1, sig=SIG
):
    """Launch one copy from PE 0; offsets are in the heap. Returns what the function returned."""
    out = torch.full((1,), -99, dtype=torch.int64)
    base = pes.base(0)
    args = (ctx, out, base + dst, base + src, num_bytes, pe, base + sig, value, op, which)
    # a kernel of all copies is large, and code for waves of 64 slow to build
    launch(kernels.copy_kernel, (1,), *args, FULL=pes.arch == "gfx1201", num_warps=2)
    return int(out[0])


@pytest.mark.parametrize(
    ("arch", "skews"), [("gfx1201", (0, 1, 4, 15)), ("gfx942", (0, 1, 4)), ("gfx950", (0, 3)), ("gfx1250", (0, 3))]
)
def test_copies_every_size_and_alignment(arch: str, skews: tuple[int, ...]) -> None:
    pes = Pes(2, arch)
    with pes.current(0) as ctx:
        whiches = range(12 if arch == "gfx1201" else kernels.PART + 1)
        for which, num_bytes, a, b in itertools.product(whiches, SIZES, skews, skews):
            if num_bytes == 4096 and which > kernels.PART:
                continue
            here, there = pes.heaps[0].numpy(), pes.heaps[1].numpy()
            here[512:].fill(SENTINEL)
            there[512:].fill(SENTINEL)
            pes.view(1, SIG, 1, torch.int64)[0] = 0
            data = pattern(num_bytes, 7 * which + num_bytes)
            source, target = (there, here) if which in kernels.GETS else (here, there)
            source[SRC + a : SRC + a + num_bytes] = data
            want = target.copy()
            want[DST + b : DST + b + num_bytes] = data
            if which in kernels.SIGNALS:
                want[SIG : SIG + 8].view(np.int64)[0] = 42
            assert copy(pes, ctx, which, DST + b, SRC + a, num_bytes, 1, value=42) == 0
            # bitwise, and not one byte around it
            np.testing.assert_array_equal(target[512:], want[512:], err_msg=f"{which=} {num_bytes=} src+{a} dst+{b}")
        assert pes.count(0) == 0


def test_put_reads_what_other_threads_have_just_written() -> None:
    n = 512
    pes = Pes(2, "gfx942")
    with pes.current(0) as ctx:
        scratch = torch.full((n,), -5, dtype=torch.int32)
        got = torch.full((2 * n,), -5, dtype=torch.int32)
        launch(
            kernels.put_after_store_kernel, (1,), ctx, pes.view(0, DST, n, torch.int32), scratch, got, N=n, num_warps=4
        )
        row = torch.arange(n - 1, -1, -1, dtype=torch.int32)
        assert torch.equal(pes.view(1, DST, n, torch.int32), row)
        assert torch.equal(got, torch.cat([row, row.flip(0)]))
        assert torch.equal(scratch, torch.full((n,), -1, dtype=torch.int32))


@pytest.mark.parametrize("which", kernels.SIGNALS)
def test_d21_put_signal_of_zero_bytes_still_signals(which: int) -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        word = pes.view(1, SIG, 1, torch.int64)
        word[0] = 5
        for op, value, want in (
            (abi.SIGNAL_SET, 9, 9),
            (abi.SIGNAL_ADD, 3, 12),
            (abi.ATOMIC_ADD, 1, 13),
            (abi.ATOMIC_SET, 2, 2),
        ):
            assert copy(pes, ctx, which, DST, SRC, 0, 1, op=op, value=value) == 0
            assert int(word[0]) == want
        # only the word changed
        changed = (pes.heaps[1][512:] != SENTINEL).nonzero().flatten() + 512
        assert changed.min() >= SIG
        assert changed.max() < SIG + 8
        # my own word is the address, not the target
        assert int(pes.view(0, SIG, 1, torch.int64)[0]) != 2


REFUSED = {
    "pe -1": {"pe": -1},
    "pe n_pes": {"pe": 3},
    "pe 2^31-1": {"pe": 2**31 - 1},
    "not mapped": {"pe": 2},
    "before the heap": {"dst": -1, "src": -1},
    "ends past the heap": {"dst": (1 << 16) - 15, "src": (1 << 16) - 15},
    "past the heap": {"dst": 1 << 16, "src": 1 << 16},
    "size wraps": {"num_bytes": -1},
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_copies_touch_nothing_and_say_so(case: str) -> None:
    pes = Pes(3, "gfx1201", unreachable={(0, 2)})
    with pes.current(0) as ctx:
        for which in kernels.PUTS + kernels.GETS + kernels.SIGNALS:
            before = [heap.clone() for heap in pes.heaps]
            pes.clear_log(0)
            args = {"dst": DST, "src": SRC, "num_bytes": 16, "pe": 1} | REFUSED[case]
            assert copy(pes, ctx, which, args["dst"], args["src"], args["num_bytes"], args["pe"]) == -1
            for heap, old in zip(pes.heaps, before, strict=True):
                assert torch.equal(heap, old)
            records = pes.records(0)
            assert records
            assert pes.count(0) == len(records) <= 2
            for record in records:
                assert (record["kind"], record["pe"], record["peer"]) == (abi.ERROR_REFUSED, 0, args["pe"])
            wanted = args["src"] if which in kernels.GETS else args["dst"]
            assert pes.base(0) + wanted in [r["address"] for r in records] or which in kernels.SIGNALS
            assert args["num_bytes"] % 2**64 in [r["expected"] for r in records] or which in kernels.SIGNALS


@pytest.mark.parametrize("which", kernels.SIGNALS)
@pytest.mark.parametrize(("op", "sig"), [(7, SIG), (abi.SIGNAL_SET, SIG + 4), (abi.SIGNAL_ADD, 1 << 16)])
def test_put_signal_with_a_bad_signal_sends_no_data_either(which: int, op: int, sig: int) -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        before = pes.heaps[1].clone()
        assert copy(pes, ctx, which, DST, SRC, 16, 1, op=op, sig=sig) == -1
        assert torch.equal(pes.heaps[1], before)
        assert [r["address"] for r in pes.records(0)] == [pes.base(0) + sig]


def test_a_full_error_log_counts_on_and_stays_in_its_memory() -> None:
    pes = Pes(2, "gfx1201")
    with pes.current(0) as ctx:
        for _ in range(abi.ERROR_CAPACITY + 3):
            copy(pes, ctx, 0, DST, SRC, 16, 5)
    assert pes.count(0) == abi.ERROR_CAPACITY + 3
    assert len(pes.records(0)) == abi.ERROR_CAPACITY
    assert {r["peer"] for r in pes.records(0)} == {5}
