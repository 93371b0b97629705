"""Signals, waits, their time limit, the barrier, arrive_last, address translation."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mori_triton import abi, emulator
from mori_triton.device.launch import launch
from tests.device import kernels
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu

SIG = 4096
ARCHS = ("gfx1201", "gfx942")
WAITS = {"eq": 2, "ne": 3, "gt": 4, "ge": 5, "lt": 6, "le": 7}
COMPARES = {
    "eq": abi.COMPARE_EQ,
    "ne": abi.COMPARE_NE,
    "gt": abi.COMPARE_GT,
    "ge": abi.COMPARE_GE,
    "lt": abi.COMPARE_LT,
    "le": abi.COMPARE_LE,
}


def call(pes: Pes, ctx, which: int, value: int, pe: int = -1, offset: int = SIG, num_warps: int = 2) -> int:
    """One signal or wait; every thread must have got the same result."""
    out = torch.full((64,), -99, dtype=torch.int64)
    launch(kernels.signal_kernel, (1,), ctx, out, pes.base(0) + offset, value, pe, which, num_warps=num_warps)
    assert len(set(out.tolist())) == 1
    return int(out[0])


# ---------------------------------------------------------------------------------------------------------- where is it


@pytest.mark.parametrize("arch", ARCHS)
def test_i19_pointer_of_a_bad_rank_or_address_is_null(arch: str) -> None:
    size = 1 << 16
    pes = Pes(3, arch, unreachable={(0, 2)})
    base = pes.base(0)
    offsets = {0: True, size - 1: True, 4097: True, -1: False, size: False, -(2**40): False, 2**40: False, 2**63: False}
    cases = [
        (base + offset, pe, inside)
        for offset, inside in offsets.items()
        for pe in (0, 1, 2, -1, 3, 2**31 - 1, -(2**31))
    ]
    n = 64
    assert len(cases) <= n
    cases += [(0, 0, False)] * (n - len(cases))
    with pes.current(0) as ctx:
        addresses = torch.tensor([a - 2**64 if a >= 2**63 else a for a, _, _ in cases])
        ranks = torch.tensor([pe for _, pe, _ in cases], dtype=torch.int32)
        out = torch.full((n + 2,), -99, dtype=torch.int64)
        launch(kernels.where_kernel, (1,), ctx, out, addresses, ranks, N=n, num_warps=1)
        want = [pes.base(pe) + a - base if inside and pe in (0, 1) else 0 for a, pe, inside in cases]
        assert out[:n].tolist() == want
        assert out[n:].tolist() == [0, 3]
        # a question is not an error
        assert pes.count(0) == 0


# -------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("arch", "num_warps"), [("gfx1201", 1), ("gfx942", 4)])
def test_signals_set_and_add_once(arch: str, num_warps: int) -> None:
    pes = Pes(2, arch)
    with pes.current(0) as ctx:
        word = pes.view(1, SIG, 1, torch.int64)
        word[0] = 0
        assert call(pes, ctx, 1, 2**40 + 1, 1, num_warps=num_warps) == 0
        assert call(pes, ctx, 1, -1, 1, num_warps=num_warps) == 0
        assert int(word[0]) == 2**40
        assert call(pes, ctx, 0, 7, 1, num_warps=num_warps) == 0
        assert int(word[0]) == 7
        for offset, pe in ((SIG, 2), (SIG, -1), (SIG + 4, 1), (1 << 16, 1), (-8, 1)):
            assert call(pes, ctx, 1, 1, pe, offset, num_warps) == -1
        assert int(word[0]) == 7
        assert pes.count(0) == 5


@pytest.mark.parametrize(("arch", "n", "programs"), [("gfx1201", 40, 5), ("gfx942", 70, 3), ("gfx1250", 2, 80)])
def test_the_last_of_many_programs_signals_for_all(arch: str, n: int, programs: int) -> None:
    pes = Pes(n, arch, heap_bytes=8192, unreachable={(0, n - 1)})
    counter = torch.zeros(1, dtype=torch.int32)
    for pe in range(n):
        pes.view(pe, SIG, 1, torch.int64)[0] = 0
    with pes.current(0) as ctx:
        for epoch in (1, 2):
            out = torch.full((programs,), -99, dtype=torch.int32)
            args = ctx, out, counter, pes.base(0) + SIG, epoch
            launch(kernels.signal_last_kernel, (programs,), *args, num_warps=2)
            assert sorted(out.tolist()) == [0] * (programs - 1) + [1]
            assert int(counter) == 0
            words = [int(pes.view(pe, SIG, 1, torch.int64)) for pe in range(n)]
            assert words == [epoch] * (n - 1) + [0]
        assert [(r["kind"], r["peer"]) for r in pes.records(0)] == [(abi.ERROR_REFUSED, n - 1)] * 2
        # a word that is nowhere: one record, whatever the number of programs
        launch(kernels.signal_last_kernel, (programs,), ctx, out, counter, pes.base(0) + 8192, 3, num_warps=2)
        assert pes.count(0) == 3
        assert int(counter) == 0


@pytest.mark.parametrize(("which", "good", "bad"), [(9, 0, -1), (10, 1, 1)], ids=["signal_set_all", "of the last"])
@pytest.mark.parametrize(("arch", "n", "num_warps"), [("gfx1201", 3, 1), ("gfx1201", 40, 1), ("gfx942", 70, 2)])
def test_signal_set_all_reaches_every_pe_that_can_be(
    arch: str, n: int, num_warps: int, which: int, good: int, bad: int
) -> None:
    pes = Pes(n, arch, heap_bytes=8192, unreachable={(0, 2)})
    with pes.current(0) as ctx:
        for pe in range(n):
            pes.view(pe, SIG, 3, torch.int64)[:] = -1
        assert call(pes, ctx, which, 77, offset=SIG + 8, num_warps=num_warps) == good
        words = [pes.view(pe, SIG, 3, torch.int64).tolist() for pe in range(n)]
        assert words == [[-1, -1 if pe == 2 else 77, -1] for pe in range(n)]
        assert [(r["kind"], r["peer"]) for r in pes.records(0)] == [(abi.ERROR_REFUSED, 2)]
        assert call(pes, ctx, which, 78, offset=8192, num_warps=num_warps) == bad
        assert call(pes, ctx, which, 78, offset=SIG + 4, num_warps=num_warps) == bad
        assert pes.count(0) == 3
        assert [pes.view(pe, SIG, 3, torch.int64).tolist() for pe in range(n)] == words


@pytest.mark.parametrize("arch", ARCHS)
def test_waits_compare_signed_and_return_what_they_saw(arch: str) -> None:
    pes = Pes(1, arch, timeout_s=0.001)
    holds = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
    }
    with pes.current(0) as ctx:
        word = pes.view(0, SIG, 1, torch.int64)
        for name, which in WAITS.items():
            for seen in (-3, 4, 5, 6):
                word[0] = seen
                pes.clear_log(0)
                assert call(pes, ctx, which, 5, pe=0) == seen
                records = pes.records(0)
                assert len(records) == (0 if holds[name](seen, 5) else 1), (name, seen)
                if records:
                    want = {
                        "kind": 1,
                        "pe": 0,
                        "peer": 0,
                        "tag": 9 + which,
                        "address": pes.base(0) + SIG,
                        "expected": 5,
                        "seen": seen % 2**64,
                        "compare": COMPARES[name],
                        "sequence": 1,
                        "symbol": 0,
                    }
                    assert records[0] == want


@pytest.mark.parametrize("arch", ARCHS)
def test_d20_a_timed_out_wait_says_what_was_missing(arch: str) -> None:
    pes = Pes(4, arch, timeout_s=0.05)
    with pes.current(0) as ctx:
        pes.view(0, SIG, 1, torch.int64)[0] = 2
        began = time.monotonic()
        assert call(pes, ctx, WAITS["ge"], 3, pe=1) == 2
        assert 0.05 <= time.monotonic() - began < 20
        (record,) = pes.records(0)
        assert (record["peer"], record["tag"], record["expected"], record["seen"]) == (1, 14, 3, 2)
        # the others never wrote: words 1 and 3 are missing
        pes.view(0, SIG, 4, torch.int64)[:] = torch.tensor([9, 1, 5, 4])
        pes.clear_log(0)
        assert call(pes, ctx, 8, 5, pe=4) in (1, 4)
        missing = sorted((r["peer"], r["seen"], r["address"] - pes.base(0) - SIG) for r in pes.records(0))
        assert missing == [(1, 1, 8), (3, 4, 24)]
        assert {(r["tag"], r["compare"], r["expected"]) for r in pes.records(0)} == {(17, abi.COMPARE_GE, 5)}


@pytest.mark.parametrize("num", [0, 1, 5, 300])
def test_wait_all_polls_every_word_with_any_number_of_threads(num: int) -> None:
    pes = Pes(1, "gfx1201", timeout_s=0.01)
    with pes.current(0) as ctx:
        words = pes.view(0, SIG, 300, torch.int64)
        words[:] = 6
        words[num:] = 0
        assert call(pes, ctx, 8, 6, pe=num, num_warps=1) == 6
        if num:
            words[num - 1] = -4
            assert call(pes, ctx, 8, 6, pe=num, num_warps=4) == -4
            assert [r["peer"] for r in pes.records(0)] == [num - 1]


def test_a_wait_on_no_word_ends_at_once() -> None:
    pes = Pes(1, "gfx1201", timeout_s=60)
    with pes.current(0) as ctx:
        assert call(pes, ctx, WAITS["ge"], 1, offset=-pes.base(0)) == 0
        assert call(pes, ctx, WAITS["ge"], 1, offset=SIG + 4) == 0
        assert [r["kind"] for r in pes.records(0)] == [abi.ERROR_REFUSED] * 2


@pytest.mark.parametrize(("arch", "n", "rounds"), [("gfx1201", 2, 20), ("gfx1201", 5, 6), ("gfx942", 3, 6)])
def test_a_row_is_there_once_its_signal_is(arch: str, n: int, rounds: int) -> None:
    row = 256
    pes = Pes(n, arch)
    for pe in range(n):
        pes.view(pe, SIG, 2, torch.int64).zero_()

    def program(pe: int, ctx) -> int:
        bad = torch.full((1,), -99, dtype=torch.int32)
        data, sig = pes.view(pe, 8192, 2 * row, torch.int32), pes.view(pe, SIG, 2, torch.int64)
        launch(kernels.ping_kernel, (1,), ctx, data, sig, bad, rounds, N=row, num_warps=2)
        return int(bad[0])

    assert pes.run(program) == [0] * n
    assert [pes.count(pe) for pe in range(n)] == [0] * n


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("style", ["wait", "wait_all", "atomic_add", "atomic_cas"])
def test_d18_a_thousand_rounds_end_whatever_polls(style: str, arch: str) -> None:
    """The library's waits, and Triton's atomics in a `while`, as kernels written without it have them."""
    rounds = 1000
    pes = Pes(2, arch)
    for pe in range(2):
        pes.view(pe, SIG, 1, torch.int64).zero_()

    def program(pe: int, ctx) -> int:
        seen = torch.full((1,), -99, dtype=torch.int64)
        sig = pes.view(pe, SIG, 1, torch.int64)
        launch(kernels.ball_kernel, (1,), ctx, sig, seen, rounds, STYLE=style, num_warps=2)
        return int(seen[0])

    assert pes.run(program) == [rounds] * 2
    assert [pes.count(pe) for pe in range(2)] == [0] * 2


# -------------------------------------------------------------------------------------------------------------- barrier


@pytest.mark.parametrize(
    ("arch", "n"), [*(("gfx1201", n) for n in (1, 2, 3, 5, 7, 8, 9, 12, 16, 17)), ("gfx942", 3), ("gfx942", 10)]
)
def test_barrier_all_of_any_number_of_pes_again_and_again(arch: str, n: int) -> None:
    rounds, launches = 4, 2
    pes = Pes(n, arch)

    def program(pe: int, ctx) -> list[int]:
        bads = []
        for _ in range(launches):
            bad = torch.full((1,), -99, dtype=torch.int32)
            launch(kernels.barrier_kernel, (1,), ctx, pes.view(pe, SIG, n, torch.int64), bad, rounds, num_warps=1)
            bads.append(int(bad[0]))
        return bads

    assert pes.run(program) == [[0] * launches] * n
    for pe in range(n):
        # the epoch is monotone and no word but the rounds' is touched
        words = pes.view(pe, 0, abi.BARRIER_WORDS, torch.int64)
        epoch = 2 * rounds * launches
        used = [step * j < n for step in (1, 8, 64, 512) for j in range(1, 8)]
        assert words[:-1].tolist() == [epoch * one for one in used] + [0] * (abi.BARRIER_WORDS - 1 - len(used))
        assert int(words[-1]) == epoch


def test_barriers_that_two_streams_of_a_pe_call_in_turn() -> None:
    """A stream of the emulated device is a thread that launches; who is next waits for the other one's kernel."""
    n, rounds, launches = 3, 2, 6
    pes = Pes(n, "gfx1201")

    def program(pe: int, ctx) -> list[int]:
        device, words = emulator.current_device(), pes.view(pe, SIG, n, torch.int64)
        bads = [torch.full((1,), -99, dtype=torch.int32) for _ in range(launches)]
        begun = [threading.Event() for _ in range(launches + 1)]
        begun[0].set()

        def stream(first: int) -> None:
            emulator.set_device(device)
            for i in range(first, launches, 2):
                assert begun[i].wait(30)
                launch(kernels.barrier_kernel, (1,), ctx, words, bads[i], rounds, num_warps=1)
                begun[i + 1].set()

        streams = [threading.Thread(target=stream, args=(first,)) for first in range(2)]
        for thread in streams:
            thread.start()
        for thread in streams:
            thread.join()
        return [int(bad[0]) for bad in bads]

    assert pes.run(program) == [[0] * launches] * n
    for pe in range(n):
        assert int(pes.view(pe, 0, abi.BARRIER_WORDS, torch.int64)[-1]) == 2 * rounds * launches
        assert pes.count(pe) == 0


def test_a_barrier_that_misses_a_pe_ends_and_names_it() -> None:
    pes = Pes(3, "gfx1201", timeout_s=0.05)
    with pes.current(0) as ctx:
        bad = torch.full((1,), -99, dtype=torch.int32)
        launch(kernels.barrier_kernel, (1,), ctx, pes.view(0, SIG, 3, torch.int64), bad, 1, num_warps=1)
    # both, in any order, and again in the second barrier
    records = pes.records(0)
    assert sorted((r["peer"], r["address"] - pes.base(0)) for r in records[:2]) == [(1, 8), (2, 0)]
    assert [(r["kind"], r["tag"], r["expected"], r["seen"]) for r in records] == [
        (abi.ERROR_WAIT_TIMEOUT, abi.TAG_BARRIER_ALL, epoch, 0) for epoch in (1, 1, 2, 2)
    ]


# ------------------------------------------------------------------------------------------------------ last, and order


@pytest.mark.parametrize(("arch", "programs"), [("gfx1201", 1), ("gfx1201", 7), ("gfx942", 5)])
def test_the_last_program_sees_all_and_the_counter_is_zero_again(arch: str, programs: int) -> None:
    n = 256
    pes = Pes(1, arch)
    with pes.current(0) as ctx:
        counter = torch.zeros(1, dtype=torch.int32)
        for launched in range(1, 3):
            parts = torch.full((programs, n), -1, dtype=torch.int32)
            out = torch.tensor([launched - 1, -99], dtype=torch.int32)
            launch(kernels.last_kernel, (programs,), ctx, out, counter, parts, N=n, num_warps=2)
            want = sum(n * (n - 1) // 2 + n * i for i in range(programs))
            assert out.tolist() == [launched, want]
            assert int(counter[0]) == 0


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "gfx950", "gfx1250"])
def test_fence_quiet_acquire_run(arch: str) -> None:
    pes = Pes(1, arch)
    with pes.current(0) as ctx:
        data, sig = torch.full((768,), -1, dtype=torch.int32), pes.view(0, SIG, 1, torch.int64)
        launch(kernels.order_kernel, (1,), ctx, data, sig, num_warps=4)
        row = torch.arange(256, dtype=torch.int32)
        assert torch.equal(data[:512], torch.cat([row, row]))
        assert int(sig[0]) == 1
