"""Who tells whom in `barrier_all`, as emulated devices do it; then everybody has heard of everybody."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from tests.device.pes import Pes

pytestmark = pytest.mark.cpu

WORDS = abi.BARRIER_WORDS - 1  # the last one is the epoch
PER_ROUND = 7
MOST = 130
ALL = 2**40  # more than any epoch here: that PE has come


@triton.jit
def once_kernel(ctx, out):
    """One barrier; its result. out: int32 [1]."""
    tl.store(out, shmem.barrier_all(ctx))


class Alone:
    """One PE of `n` whose barrier runs while no other does."""

    def __init__(self, n: int, arch: str = "gfx1201", **options):
        self.pes = Pes(n, arch, heap_bytes=8 * abi.BARRIER_WORDS, timeout_s=0.002, **options)

    def words(self, pe: int) -> torch.Tensor:
        return self.pes.view(pe, 0, WORDS, torch.int64)

    def barrier(self, pe: int, missing: tuple[int, ...] = ()) -> tuple[int, set[tuple[int, int]]]:
        """Its result, and (word, PE) of all that it tells; its words but the `missing` say that their PEs have come."""
        pes = self.pes
        for q in range(pes.n):
            self.words(q).zero_()
        self.words(pe)[:] = ALL
        self.words(pe)[list(missing)] = 0
        pes.view(pe, 8 * WORDS, 1, torch.int64)[0] = 41
        pes.clear_log(pe)
        out = torch.full((1,), -99, dtype=torch.int32)
        with pes.current(pe) as ctx:
            launch(once_kernel, (1,), ctx, out, num_warps=1)
        told = torch.stack([self.words(q) for q in range(pes.n)])
        told[pe][told[pe] == ALL] = 0
        assert set(told.flatten().tolist()) <= {0, 42}
        assert int(pes.view(pe, 8 * WORDS, 1, torch.int64)) == 42
        return int(out[0]), {(word, q) for q, word in torch.nonzero(told).tolist()}


def test_everybody_has_heard_of_everybody() -> None:
    """The words that PEs really write, for each number of PEs; what follows from them is counted here, by sets."""
    for n in range(1, MOST + 1):
        alone = Alone(n)
        results = {pe: alone.barrier(pe) for pe in {0, n // 2, n - 1}}
        assert {result for result, _ in results.values()} == {0}
        assert [alone.pes.count(pe) for pe in results] == [0] * len(results)
        distances = {(word, (to - pe) % n) for pe, (_, told) in results.items() for word, to in told}
        # all PEs do the same, and none tells itself, or another one twice in a round
        assert all(told == {(w, (pe + d) % n) for w, d in distances} for pe, (_, told) in results.items())
        for done in range(0, WORDS, PER_ROUND):
            now = [d for w, d in distances if done <= w < done + PER_ROUND]
            assert 0 not in now
            assert len(set(now)) == len(now)
        # a word is written by one PE
        by_word = dict(distances)
        assert len(by_word) == len(distances)
        # bit q of heard[pe]: that PE q has come
        heard = [1 << pe for pe in range(n)]
        rounds = 0
        while rounds * PER_ROUND <= max(by_word, default=-1):
            now = [by_word.get(rounds * PER_ROUND + i) for i in range(PER_ROUND)]
            before = list(heard)
            for distance in filter(None, now):
                for pe in range(n):
                    heard[pe] |= before[pe - distance]
            rounds += 1
        assert heard == [(1 << n) - 1] * n, n
        assert rounds == (0 if n == 1 else 1 if n <= 8 else 2 if n <= 64 else 3)


@pytest.mark.parametrize(
    ("arch", "n"), [("gfx1201", n) for n in (2, 3, 5, 7, 8, 9, 12, 16, 17, 64, 65, MOST)] + [("gfx942", 17)]
)
def test_each_word_is_waited_for_and_its_writer_named(arch: str, n: int) -> None:
    alone = Alone(n, arch)
    pe = n // 3
    status, told = alone.barrier(pe)
    assert status == 0
    for word, to in told:
        # who is as far behind as this one is ahead
        writer = (2 * pe - to) % n
        assert (word, pe) in alone.barrier(writer)[1]
        status, now_told = alone.barrier(pe, missing=(word,))
        assert status == -1
        (record,) = alone.pes.records(pe)
        assert (record["kind"], record["tag"]) == (abi.ERROR_WAIT_TIMEOUT, abi.TAG_BARRIER_ALL)
        assert (record["peer"], record["address"]) == (writer, alone.pes.base(pe) + 8 * word)
        assert (record["expected"], record["seen"]) == (42, 0)
        # nobody of a later round may take this PE's word for it
        assert now_told == {(w, q) for w, q in told if w // PER_ROUND <= word // PER_ROUND}


def test_all_that_are_missing_are_named() -> None:
    alone = Alone(8)
    status, told = alone.barrier(3, missing=tuple(range(PER_ROUND)))
    assert status == -1
    assert len(told) == PER_ROUND
    assert sorted(r["peer"] for r in alone.pes.records(3)) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("n", [8, 20])
def test_a_pe_that_cannot_be_told_is_named_and_the_others_are_told(n: int) -> None:
    whole = Alone(n).barrier(1)[1]
    alone = Alone(n, unreachable={(1, 4)})
    status, told = alone.barrier(1)
    assert status == -1
    assert told == {(w, q) for w, q in whole if w < PER_ROUND and q != 4}
    (record,) = alone.pes.records(1)
    assert (record["kind"], record["peer"], record["tag"]) == (abi.ERROR_REFUSED, 4, abi.TAG_BARRIER_ALL)
    assert record["address"] == alone.pes.base(1) + 8 * 2
