"""Weak memory and network cards: what a card reads and writes, and what kernels owe each other across it."""

import numpy as np
import pytest
import triton
import triton.language as tl

from mori_triton.emulator import scheduler
from mori_triton.emulator.device import ARCHS
from mori_triton.emulator.weak import WeakMemory
from mori_triton.errors import ArgumentError, Deadlock, KernelFault, WeakMemoryError
from tests.emulator.cards import Card, Dma
from tests.emulator.hosts import cause, in_threads
from tests.emulator.litmus import (
    BROKEN_SEEDS,
    CLEAN_SEEDS,
    POINTERS2,
    POINTERS3,
    WANTED,
    Litmus,
    N,
    fill,
    read,
    receive,
    send,
    signal,
)

pytestmark = pytest.mark.cpu


def message(seed, release="release sys", acquire="acquire sys", *, arch="gfx1201", ring=True):
    """PE 0 stores words and rings its card, which puts them into PE 1's memory and sets a flag there.

    -> (the error that ended the world or None, words as wanted, trace hash, words that were read)
    """
    coordinator = scheduler.Coordinator(2, seed, weak_memory=True)
    run = Litmus(seed, arch=arch, coordinator=coordinator)
    source, doorbell = run.buffer(0, N, name="source"), run.buffer(0, 1, name="doorbell")
    data, flag, out = run.buffer(1, N, name="data"), run.buffer(1, 1, name="flag"), run.buffer(1, N, name="out")
    out[:] = -1
    coordinator.agents.append(Card(run.weak, 0, doorbell, source, data, flag))
    (s, sc), (r, rc) = release.split(), acquire.split()
    puts = run.launch(0, send, (source, doorbell), POINTERS2, SEM=s, SCOPE=sc, N=N)
    gets = run.launch(1, receive, (data, flag, out), POINTERS3, SEM=r, SCOPE=rc, N=N)
    results = in_threads(
        coordinator, lambda host: host.execute(puts) if ring else None, lambda host: host.execute(gets)
    )
    error = None if results == [None] * 2 else cause(results)
    return error, (out == WANTED).all(), coordinator.trace_hash, out.tolist()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_message_through_a_card_is_clean_when_synchronised(arch):
    for seed in CLEAN_SEEDS if arch == "gfx1201" else range(12):
        error, right, *_ = message(seed, arch=arch)
        assert error is None, (seed, error)
        assert right, seed


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("release", ["relaxed sys", "release gpu"])
def test_a_card_that_moves_unreleased_bytes_is_reported(arch, release):
    for seed in BROKEN_SEEDS:
        error, *_ = message(seed, release, arch=arch)
        assert isinstance(error, WeakMemoryError), seed
        first, second, third, missing, *_ = str(error).splitlines()[1:]
        assert first.startswith("the network card of PE 0")
        assert second.startswith("  reads source + ")
        assert third.startswith("  send of PE 0, workgroup 0, wave 0, line ")
        assert "store" in third
        assert missing.startswith("  missing: ")
        assert "a release of system scope on PE 0 after the store reached it" in missing


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("acquire", "missing"),
    [
        ("relaxed sys", "missing: an acquire of system scope on PE 1 since then"),
        ("acquire gpu", "missing: system scope of the load itself"),
    ],
)
def test_a_kernel_that_does_not_acquire_what_a_card_wrote_is_reported(arch, acquire, missing):
    outcomes = set()
    for seed in BROKEN_SEEDS:
        error, right, *_ = message(seed, acquire=acquire, arch=arch)
        assert isinstance(error, WeakMemoryError), seed
        assert "receive of PE 1, workgroup 0, wave 0, line " in str(error)
        assert ", stored by\n  the network card of PE 0\n" in str(error)
        assert missing in str(error)
        outcomes.add(bool(right))
    assert acquire != "relaxed sys" or False in outcomes, "every load saw the new value"


def test_what_a_card_moves_too_early_ends_the_world_though_no_kernel_comes_after_it():
    for seed in BROKEN_SEEDS:
        coordinator = scheduler.Coordinator(2, seed, weak_memory=True)
        run = Litmus(seed, coordinator=coordinator)
        source, doorbell, data, flag = (run.buffer(pe, num) for pe, num in ((0, N), (0, 1), (1, N), (1, 1)))
        coordinator.agents.append(Card(run.weak, 0, doorbell, source, data, flag))
        puts = run.launch(0, send, (source, doorbell), POINTERS2, SEM="relaxed", SCOPE="sys", N=N)
        results = in_threads(
            coordinator,
            lambda host, puts=puts: host.execute(puts),
            lambda host, flag=flag: host.wait(lambda: flag[0] == 1, "the card"),
        )
        error = cause(results)
        assert isinstance(error, WeakMemoryError)
        assert "the network card of PE 0" in str(error)
        assert not data.all(), "the world went on"


def test_same_seed_same_run_with_a_card():
    for acquire in ("acquire sys", "relaxed sys"):
        runs = [[message(seed, acquire=acquire)[1:] for seed in (3, 4, 5, 6)] for _ in range(2)]
        assert runs[0] == runs[1]
        assert len({trace for _, trace, _ in runs[0]}) == 4


def test_a_doorbell_that_nobody_rings_is_a_deadlock():
    error, *_ = message(1, ring=False)
    assert isinstance(error, Deadlock)
    assert "receive of PE 1, workgroup 0, wave 0, line " in str(error)
    assert "the card has moved 0 of 256 bytes" in str(error)


def test_a_card_reads_what_has_reached_the_system():
    """A store that no release covers is reported wherever it is; those of another device and of the host likewise."""
    stale = 0
    for seed in range(20):
        run = Litmus(seed)
        data, flag = run.buffer(1, N, name="data"), run.buffer(1, 1)
        data[:] = 5
        card = Dma(run.weak, 1)
        assert (np.frombuffer(card.read(data.ctypes.data, data.nbytes), np.int32) == 5).all()
        run.submit(0, fill, (data,), ("*i32",), N=N)
        run.run()
        got = np.frombuffer(card.read(data.ctypes.data, data.nbytes), np.int32)
        assert ((got == 5) | (got == WANTED)).all()
        stale += not (got == WANTED).all()
        assert seed % 2 == 0 or (got == 5).sum() >= N - 1, "nothing arrives by itself with odd seeds"
        # one for each store instruction, and none for the word that was 5 before
        races = run.weak.races()
        assert sum(int(race.split("(")[1].split()[0]) for race in races) == N - 1
        for race in races:
            assert race.startswith("the network card of PE 1 (")
            assert "\n  reads data + " in race
            assert "\n  fill of PE 0, workgroup 0, wave 0, line " in race
            assert race.endswith("missing: a release of system scope on PE 0 after the store reached it")
        with pytest.raises(WeakMemoryError, match="the network card of PE 1"):
            run.weak.raise_races()
        run.submit(0, signal, (flag,), ("*i32",), SEM="release")
        run.run()
        assert (np.frombuffer(card.read(data.ctypes.data, data.nbytes), np.int32) == WANTED).all()
        assert run.weak.races() == []
    assert stale > 10


def test_bytes_of_a_word_that_a_kernel_left_alone_are_no_race():
    run = Litmus(1)
    data = run.buffer(0, 8, np.int8)
    run.submit(0, fill, (data[:2],), ("*i8",), N=2)
    run.run()
    card = Dma(run.weak, 0)
    assert card.read(data.ctypes.data + 2, 6) == bytes(6)
    assert run.weak.races() == []
    card.write(data.ctypes.data + 1, b"\x09\x08\x07\x06\x05")
    assert card.read(data.ctypes.data + 1, 7) == b"\x09\x08\x07\x06\x05\0\0"
    assert run.weak.races() == []
    run.weak.drain()
    assert data.tolist() == [1, 9, 8, 7, 6, 5, 0, 0]


def test_what_a_card_writes_is_there_for_hosts_and_other_cards_at_once():
    for seed in range(4):
        run = Litmus(seed)
        cards = [Dma(run.weak, pe) for pe in range(2)]
        for home in (0, 1, run.weak.card(0), run.weak.card(1), None):
            data = run.buffer(home, N) if home is not None else np.zeros(N, np.int32)
            for i, card in enumerate((*cards, *cards)):
                card.write(data.ctypes.data, (WANTED + i).astype(np.int32).tobytes())
                assert (data == WANTED + i).all()
                assert cards[0].read(data.ctypes.data, data.nbytes) == cards[1].read(data.ctypes.data, data.nbytes)
            # and what the host writes is there for cards
            data[:] = 7
            assert (np.frombuffer(cards[0].read(data.ctypes.data, data.nbytes), np.int32) == 7).all()
        assert run.weak.pending() == 0
        assert run.weak.races() == []


@pytest.mark.parametrize("release", ["release", "relaxed"])
def test_host_memory_of_a_card_holds_what_is_at_the_system(release):
    """A ring: the card's host part sees a kernel's stores once a release of system scope has brought them there."""
    for seed in (1, 3, 5):
        run = Litmus(seed)
        ring, flag = run.buffer(run.weak.card(0), N), run.buffer(0, 1)
        run.submit(0, fill, (ring,), ("*i32",), N=N)
        run.run()
        assert (ring == 0).all()
        run.submit(0, signal, (flag,), ("*i32",), SEM=release)
        run.run()
        assert (ring == (WANTED if release == "release" else 0)).all()
    run.weak.forget(ring.ctypes.data, ring.nbytes)
    assert run.weak.pending() == 0


@pytest.mark.parametrize("named", [True, False])
def test_a_kernel_without_an_acquire_may_read_what_was_there_before_a_card_wrote(named):
    """Memory that was never said to be anybody's is the card's own PE's."""
    seen = set()
    for seed in range(10):
        run = Litmus(seed)
        data, out = run.buffer(1, N, name="data") if named else np.zeros(N, np.int32), run.buffer(1, N)
        Dma(run.weak, 1).write(data.ctypes.data, WANTED.astype(np.int32).tobytes())
        run.submit(1, read, (data, out), POINTERS2, N=N)
        run.run()
        assert all(x in (0, w) for x, w in zip(out, WANTED, strict=True))
        seen |= {bool(x) for x in out}
        races, text = run.weak.races(), "an acquire of system scope on PE 1 since then"
        assert races
        assert all(f"stored by\n  the network card of PE 1\n  missing: {text}" in race for race in races)
    assert seen == {False, True}


@triton.jit
def _count(counter, old, N: tl.constexpr):
    offs = tl.arange(0, N)
    seen = tl.atomic_add(counter + offs * 0, 1, sem="relaxed", scope="sys")
    tl.store(old + tl.program_id(0) * N + offs, seen)


class _Counts:
    """A card that adds to a counter, by additions or by compare-and-swap as the seed says."""

    def __init__(self, dma, counter, num):
        self.dma, self.address, self.left, self.olds, self.guess = dma, counter.ctypes.data, num, [], 0

    def pending(self):
        return self.left > 0

    def step(self, word):
        if word % 2:
            self.olds.append(self.dma.add(self.address, 1))
            self.left -= 1
            return True
        seen = self.dma.swap_if(self.address, self.guess, self.guess + 1)
        if seen == self.guess:
            self.olds.append(seen)
            self.left -= 1
        self.guess = seen if seen != self.guess else seen + 1
        return self.olds[-1:] == [seen]

    def describe(self):
        return []


def test_atomics_of_cards_and_kernels_lose_nothing():
    """Across the boundary of the two words too."""
    for seed in range(12):
        coordinator = scheduler.Coordinator(2, seed, weak_memory=True)
        run = Litmus(seed, coordinator=coordinator)
        start = (1 << 32) - 60
        counter, olds = run.buffer(1, 1, np.int64), [run.buffer(pe, 2 * N, np.int64) for pe in range(2)]
        counter[0] = start
        cards = [_Counts(Dma(run.weak, pe), counter, 40) for pe in range(2)]
        for card in cards:
            card.guess = start
        coordinator.agents += cards
        launches = [run.launch(pe, _count, (counter, olds[pe]), ("*i64",) * 2, grid=2, N=N) for pe in range(2)]

        def body(host, launches=launches, cards=cards):
            host.execute(launches[host.index])
            host.wait(lambda: not any(card.left for card in cards), "the cards")

        assert in_threads(coordinator, body, body) == [None] * 2
        num = 4 * N + 80
        assert counter[0] == start + num
        handed_out = sorted([*np.concatenate(olds).tolist(), *cards[0].olds, *cards[1].olds])
        assert handed_out == list(range(start, start + num)), seed


@triton.jit
def _set(data, SCOPE: tl.constexpr):
    tl.atomic_xchg(data, 7, sem="relaxed", scope=SCOPE)


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_an_atomic_of_a_card_acts_on_what_is_in_the_memory_of_its_owner(scope):
    """A device's own atomic is in its memory; another device's waits in that one's cache unless of system scope."""
    for seed in (1, 3):
        for device in (0, 1):
            run = Litmus(seed)
            data = run.buffer(1, 1, np.int64)
            run.submit(device, _set, (data,), ("*i64",), SCOPE=scope)
            run.run()
            there = device == 1 or scope == "sys"
            card = Dma(run.weak, 0)
            assert card.add(data.ctypes.data, 1) == (7 if there else 0)
            assert data[0] == (8 if there else 1)
            assert card.swap_if(data.ctypes.data, 3, 9) == data[0]
            # what was on its way arrives on top
            run.weak.drain()
            assert data[0] == (8 if there else 7)


def test_a_poll_that_misses_a_cards_write_is_reported():
    """Only loads of system scope look again: with some seeds the kernel polls for ever."""
    hung = 0
    for seed in range(12):
        error, *_ = message(seed, acquire="relaxed gpu")
        assert isinstance(error, WeakMemoryError)
        hung += "polls wait for stores that need not arrive" in str(error)
        assert "stored by\n  the network card of PE 0\n  missing: system scope of the load itself" in str(error)
    assert 0 < hung < 12


def test_errors():
    weak = WeakMemory(0, 2, arena_bytes=1 << 20)
    for call in (weak.card, weak.dma):
        with pytest.raises(ArgumentError, match="pe: want below 2, got 2"):
            call(2)
    assert weak.dma(1) == weak.dma(1)
    assert len({weak.dma(pe)[0] for pe in range(2)}) == 2
    # a card cannot fault in the middle of its work: whoever lets it act is told
    memory = np.zeros(1 << 18, np.uint8)
    Dma(weak, 0).write(memory.ctypes.data, b"\1" * len(memory))
    with pytest.raises(KernelFault, match="no memory left for what network cards have written"):
        weak.raise_races()
