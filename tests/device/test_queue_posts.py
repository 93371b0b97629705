"""Many programs post to one queue pair: nothing is lost, mixed up or overwritten; full and broken ones end in time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from mori_triton import abi
from tests.device import network_kernels as kernels
from tests.device.queue_pairs import NUMBER, PROVIDERS, Card, QueuePairs

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
SRC, DST, SIG, ROWS = 8192, 4096, 16384, 32768
# what a card counts in is narrower than an index; a run from just below crosses the end of 16 and of 24 bits
NEAR_END = 0x1_00FF_FFC0
WIDTH = 64  # elements of a row


def copy(
    pairs: QueuePairs, ctx, which: int, *, size: int = 64, op: int = 0, pe: int = 1, qp: int = 0, dst: int = DST
) -> int:
    """One copy of `copy_kernel`; its result."""
    out = torch.full((1,), -7, dtype=torch.int64)
    base = pairs.pes.base(0)
    args = (base + dst, base + SRC, size, base + SIG, 1, op, pe, qp, which)
    pairs.launch(kernels.copy_kernel, (1,), ctx, out, *args, num_warps=2)
    return int(out[0])


def crowd(pairs: QueuePairs, ctx, programs: int, rounds: int) -> torch.Tensor:
    """`crowd_kernel` of that many programs, and a look at all that it has brought."""
    pes = pairs.pes
    pes.heaps[1].zero_()
    out = torch.full((programs, rounds), -2, dtype=torch.int64)
    rows = pes.view(0, ROWS, 2 * programs * WIDTH, torch.int32)
    words = pes.view(0, DST, 1, torch.int64), pes.view(0, SIG, 1, torch.int64)
    args = (out, rows, *words, rounds, len(pairs.rings))
    pairs.launch(kernels.crowd_kernel, (programs,), ctx, *args, N=WIDTH, num_warps=1)
    size = 4 * WIDTH
    for program in range(programs):
        row = pes.view(1, ROWS + (programs + program) * size, WIDTH, torch.int32)
        assert torch.equal(row, torch.arange(WIDTH, dtype=torch.int32) + 1000 * (rounds - 1) + 100000 * program)
    assert int(pes.view(1, SIG, 1, torch.int64)[0]) == programs * rounds
    assert int(pes.view(1, DST, 1, torch.int64)[0]) == programs * rounds
    return out


def check_idle(pairs: QueuePairs) -> None:
    """Every index that was given out is posted and complete, and nobody holds anything."""
    for qp in range(len(pairs.rings)):
        queue = pairs.queue(qp)
        assert queue["reserved"] == queue["posted"] == queue["done"]
        assert (queue["ringing"], queue["polling"], queue["error"]) == (0, 0, 0)
        assert queue["free_results"] == 2**64 - 1
    assert pairs.pes.records(0) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("num_qps", "num_wqes", "start"), [(1, 4, 0), (1, 16, NEAR_END), (2, 8, 0xFFF0)])
def test_many_programs_share_a_queue_pair(arch: str, provider: str, num_qps: int, num_wqes: int, start: int) -> None:
    programs, rounds = 70, 3
    # as few completions as there may be: one more request than can be on its way
    sizes = {"num_wqes": num_wqes, "num_cqes": num_wqes}
    pairs = QueuePairs(arch, provider, num_qps=num_qps, **sizes, start=start, timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        out = crowd(pairs, ctx, programs, rounds)
        # each fetch saw the counter before it: nobody got another one's result
        assert sorted(out.flatten().tolist()) == list(range(programs * rounds))
        assert (out.diff(dim=1) > 0).all()
        check_idle(pairs)
        assert sum(card.served) - num_qps * start == 3 * programs * rounds
        # of three requests of a round the first one is not signaled
        assert sum(card.signaled) == 2 * programs * rounds
    for served in card.served:
        assert served - start >= 4 * num_wqes
    assert card.most_outstanding <= num_wqes - 1


@pytest.mark.parametrize("arch", ARCHS)
def test_more_fetches_than_result_words_wait_for_one(arch: str) -> None:
    programs = 150
    pairs = QueuePairs(arch, "mlx5", num_wqes=1024, timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        threading.Timer(0.5, card.hold.clear).start()
        out = crowd(pairs, ctx, programs, 2)
        assert sorted(out.flatten().tolist()) == list(range(2 * programs))
        check_idle(pairs)
    # all put and signal at first, but no more fetch at a time than there are words
    assert abi.RESULT_WORDS < card.most_outstanding <= 2 * programs + abi.RESULT_WORDS


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_full_queue_is_waited_for(arch: str, provider: str) -> None:
    pairs = QueuePairs(arch, provider, num_wqes=4, timeout_s=60)
    programs, rounds = 20, 5
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        threading.Timer(0.3, card.hold.clear).start()
        out = torch.full((programs,), -1, dtype=torch.int32)
        base = pairs.pes.base(0)
        pairs.launch(kernels.flood_kernel, (programs,), ctx, out, base + DST, base + SRC, 64, rounds, 0, num_warps=1)
        assert out.tolist() == [0] * programs
        assert copy(pairs, ctx, kernels.QUIET) == 0
        check_idle(pairs)
    assert card.most_outstanding == 3
    assert card.served[0] == programs * rounds


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_giving_up_for_want_of_room_leaves_no_hole(arch: str, provider: str) -> None:
    pairs = QueuePairs(arch, provider, num_wqes=8, start=6, timeout_s=0.2)
    programs, rounds = 20, 5
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        out = torch.full((programs,), -1, dtype=torch.int32)
        base = pairs.pes.base(0)
        pairs.launch(kernels.flood_kernel, (programs,), ctx, out, base + DST, base + SRC, 64, rounds, 0, num_warps=1)
        # exactly what there was room for
        assert int(out.sum()) == programs * rounds - 7
        queue = pairs.queue()
        assert (queue["reserved"], queue["posted"], queue["done"]) == (13, 13, 6)
        (record,) = pairs.pes.records(0)
        assert (record["kind"], record["peer"], record["tag"]) == (abi.ERROR_WAIT_TIMEOUT, 1, abi.TAG_NETWORK)
        # one more would be the 14th index: at least 7 of those given out had to be complete
        assert (record["expected"], record["seen"], record["compare"]) == (7, 6, abi.COMPARE_GE)
        # what was posted is all there
        card.hold.clear()
        deadline = time.monotonic() + 10
        while card.served[0] < 13 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert card.served[0] == 13
        start = time.monotonic()
        assert copy(pairs, ctx, kernels.PUT) == copy(pairs, ctx, kernels.QUIET) == -1
        assert time.monotonic() - start < 10
        assert pairs.pes.count(0) == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_a_completion_that_does_not_come_ends_at_the_limit(arch: str) -> None:
    pairs = QueuePairs(arch, "ionic", num_wqes=8, timeout_s=0.1)
    with pairs.current() as ctx, Card(pairs) as card:
        card.hold.set()
        assert copy(pairs, ctx, kernels.PUT) == -1
        (record,) = pairs.pes.records(0)
        assert (record["kind"], record["peer"], record["expected"], record["seen"]) == (abi.ERROR_WAIT_TIMEOUT, 1, 1, 0)
        assert pairs.queue()["error"] == 1 << 63


def test_a_quiet_of_many_queue_pairs_takes_one_limit() -> None:
    """A card that has died says nothing on any of them: each is a record, but no wait of its own."""
    pairs = QueuePairs("gfx1201", "mlx5", num_qps=8, timeout_s=0.5)
    with pairs.current() as ctx, Card(pairs) as card:
        # loads the kernel
        assert copy(pairs, ctx, kernels.QUIET, qp=-1) == 0
        card.hold.set()
        for qp in range(8):
            assert copy(pairs, ctx, kernels.PUT_NBI, qp=qp) == 0
        start = time.monotonic()
        assert copy(pairs, ctx, kernels.QUIET, qp=-1) == -1
        assert 0.5 <= time.monotonic() - start < 2
        assert [record["kind"] for record in pairs.pes.records(0)] == [abi.ERROR_WAIT_TIMEOUT] * 8


# provider -> what the completion says, the record's `seen`
STATUS = {"mlx5": (0x13, 0x13 | 0x51 << 8), "bnxt_re": (7, 7), "ionic": (0x0A, 0x0A)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_failed_request_is_one_record_and_breaks_its_queue_pair(arch: str, provider: str) -> None:
    status, seen = STATUS[provider]
    pairs = QueuePairs(arch, provider, num_qps=2, num_wqes=4, start=NEAR_END, timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        card.fail[1, NEAR_END + 2] = status
        assert copy(pairs, ctx, kernels.PUT, qp=1) == 0
        assert copy(pairs, ctx, kernels.PUT_NBI, qp=1) == 0
        assert copy(pairs, ctx, kernels.PUT, qp=1) == -1
        (record,) = pairs.pes.records(0)
        want = {"kind": abi.ERROR_NETWORK_FAILED, "pe": 0, "peer": 1, "tag": abi.TAG_NETWORK, "address": NUMBER + 1}
        want |= {"expected": NEAR_END + 2, "seen": seen, "compare": abi.PROVIDERS[provider]}
        assert {name: record[name] for name in want} == want
        assert pairs.queue(1)["error"] == 1 << 63 | seen
        reserved = pairs.queue(1)["reserved"]
        for which in (kernels.PUT, kernels.PUT_NBI, kernels.GET, kernels.PUT_SIGNAL, kernels.VALUE8, kernels.QUIET):
            assert copy(pairs, ctx, which, qp=1, op=abi.SIGNAL_ADD) == -1
        assert pairs.queue(1)["reserved"] == reserved
        # the other one is whole
        assert copy(pairs, ctx, kernels.PUT, qp=0) == copy(pairs, ctx, kernels.QUIET, qp=0) == 0
        # of all queue pairs one has failed
        assert copy(pairs, ctx, kernels.QUIET, pe=-1, qp=-1) == -1
        assert pairs.pes.count(0) == 1


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_programs_hear_of_one_failure(provider: str) -> None:
    pairs = QueuePairs("gfx1201", provider, num_wqes=8, timeout_s=60)
    programs = 30
    with pairs.current() as ctx, Card(pairs) as card:
        card.fail[0, 11] = STATUS[provider][0]
        out = torch.full((programs,), -1, dtype=torch.int32)
        base = pairs.pes.base(0)
        pairs.launch(kernels.flood_kernel, (programs,), ctx, out, base + DST, base + SRC, 64, 10, 0, num_warps=1)
        assert int(out.sum()) > programs * 10 - 30
        assert pairs.pes.count(0) == 1
        assert copy(pairs, ctx, kernels.QUIET) == -1


# -------------------------------------------------------------------------------------------------------------- atomics


def atomic(pairs: QueuePairs, ctx, which: int, offset: int, value: int, compare: int, op: int) -> int:
    out = torch.full((1,), -7, dtype=torch.int64)
    args = (pairs.pes.base(0) + offset, value, compare, op, 1, 0, which)
    pairs.launch(kernels.atomic_kernel, (1,), ctx, out, *args, num_warps=2)
    return int(out[0])


AFTER = {
    abi.ATOMIC_INC: lambda old, v, c: old + 1,
    abi.ATOMIC_SET: lambda old, v, c: v,
    abi.ATOMIC_ADD: lambda old, v, c: old + v,
    abi.ATOMIC_AND: lambda old, v, c: old & v,
    abi.ATOMIC_OR: lambda old, v, c: old | v,
    abi.ATOMIC_XOR: lambda old, v, c: old ^ v,
    abi.ATOMIC_FETCH: lambda old, v, c: old,
    abi.ATOMIC_FETCH_INC: lambda old, v, c: old + 1,
    abi.ATOMIC_FETCH_ADD: lambda old, v, c: old + v,
    abi.ATOMIC_FETCH_AND: lambda old, v, c: old & v,
    abi.ATOMIC_FETCH_OR: lambda old, v, c: old | v,
    abi.ATOMIC_FETCH_XOR: lambda old, v, c: old ^ v,
    abi.ATOMIC_SWAP: lambda old, v, c: v,
    abi.ATOMIC_COMPARE_SWAP: lambda old, v, c: v if old == c else old,
}


@pytest.mark.parametrize(("arch", "provider"), [("gfx1201", "mlx5"), ("gfx942", "bnxt_re"), ("gfx1201", "ionic")])
def test_every_atomic_of_both_widths(arch: str, provider: str) -> None:
    pairs = QueuePairs(arch, provider, num_wqes=4, timeout_s=60)
    rng = np.random.default_rng(7)
    with pairs.current() as ctx, Card(pairs):
        for op, after in AFTER.items():
            for width, fetches in ((8, True), (8, False), (4, True), (4, False)):
                words = pairs.pes.heaps[1].numpy()[DST : DST + 24].view(f"u{width}")
                words[:] = rng.integers(0, 2 ** (8 * width), words.size, dtype=words.dtype)
                if op == abi.ATOMIC_INC:
                    words[1] = 2 ** (8 * width) - 1  # no carry into the neighbour
                want, value = words.copy(), int(rng.integers(0, 2**62))
                old = int(words[1])
                # of both: one that is equal, one that is not
                compare = old if fetches else old ^ 1
                top = 2 ** (8 * width)
                want[1] = after(old, value % top, compare) % top
                signed = [v - 2**64 if v >= 2**63 else v for v in (value, compare)]
                which = {(8, True): kernels.FETCH8, (8, False): kernels.ATOMIC8, (4, True): kernels.FETCH4}
                got = atomic(pairs, ctx, which.get((width, fetches), kernels.ATOMIC4), DST + width, *signed, op)
                assert got % top == (old if fetches else 0), (op, width, fetches)
                assert copy(pairs, ctx, kernels.QUIET) == 0
                assert words.tolist() == want.tolist(), (op, width, fetches)
        check_idle(pairs)


@pytest.mark.parametrize("arch", ARCHS)
def test_narrow_atomics_of_many_programs_keep_their_neighbour(arch: str) -> None:
    pairs = QueuePairs(arch, "mlx5", num_wqes=8, timeout_s=60)
    with pairs.current() as ctx, Card(pairs):
        words = pairs.pes.view(1, DST, 2, torch.int32)
        words[0], words[1] = 2**31 - 5, -3
        pairs.launch(kernels.neighbours_kernel, (24,), ctx, pairs.pes.base(0) + DST, 3, num_warps=1)
        # 12 programs each, three times
        assert words.tolist() == [2**31 - 5 + 36 * 7 - 2**32, -3 + 36 * 11]
        check_idle(pairs)


# ------------------------------------------------------------------------------------------------------------ which one


def test_any_number_chooses_a_queue_pair() -> None:
    pairs = QueuePairs("gfx1201", "bnxt_re", num_qps=3, num_wqes=16, timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        for qp in (0, 1, 2, 3, 2**31 - 1, -1, -(2**31)):
            assert copy(pairs, ctx, kernels.PUT, qp=qp) == 0
        # 2^31 - 1 is 1 modulo 3
        assert card.served == [4, 2, 1]
        assert copy(pairs, ctx, kernels.QUIET, pe=-1, qp=-1) == 0
        check_idle(pairs)


def test_refusals_post_nothing() -> None:
    size = 1 << 18
    pairs = QueuePairs("gfx1201", "ionic", timeout_s=60)
    with pairs.current() as ctx, Card(pairs) as card:
        for change in ({"pe": 2}, {"pe": -1}, {"dst": size - 63}, {"dst": -8}, {"size": size}):
            assert copy(pairs, ctx, kernels.PUT, **change) == -1
        assert {record["kind"] for record in pairs.pes.records(0)} == {abi.ERROR_REFUSED}
        assert pairs.pes.count(0) == 5
        assert card.served == [0]
        assert pairs.queue()["reserved"] == 0
        # nothing to do is no error
        assert copy(pairs, ctx, kernels.PUT, size=0) == 0


def test_a_kernel_built_for_another_card_is_refused() -> None:
    pairs = QueuePairs("gfx1201", "ionic", build="mlx5")
    with pairs.current() as ctx:
        assert copy(pairs, ctx, kernels.PUT) == -1
        assert [record["kind"] for record in pairs.pes.records(0)] == [abi.ERROR_REFUSED]
        assert copy(pairs, ctx, kernels.QUIET) == -1
        assert pairs.queue()["reserved"] == 0
    assert (pairs.rings[0].memory["sq"] == 0xA5).all()


def test_a_library_for_all_cards_looks_up_which_one() -> None:
    for provider in PROVIDERS:
        pairs = QueuePairs("gfx942", provider, build="any", timeout_s=60)
        with pairs.current() as ctx, Card(pairs) as card:
            assert copy(pairs, ctx, kernels.PUT) == 0
            assert card.served == [1]
