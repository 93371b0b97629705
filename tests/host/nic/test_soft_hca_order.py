"""In late mode the soft HCA delivers late and out of order wherever it may, and nowhere else; its words decide it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host.nic.soft_cards import HEAP_BYTES, PROVIDERS, STATUS, QueuePair, Request, World

pytestmark = pytest.mark.cpu

MASK = (1 << 64) - 1
# where things lie in every heap: what is sent, where it arrives, the answers of atomics, the word that they add to
SENT, ARRIVES, ANSWERS, COUNTER = 0, 16384, 32768, 49152
PLACE = 160  # bytes for each message

op = st.sampled_from(["write", "read", "inline", "add"])
# of each request: queue pair, what, bytes, alignment, whether it is signaled, whether the doorbell is rung behind it
programs = st.lists(
    st.tuples(st.integers(0, 3), op, st.integers(1, 150), st.integers(0, 7), st.booleans(), st.booleans()),
    min_size=1, max_size=30,
)  # fmt: skip
words = st.lists(st.integers(0, MASK), min_size=1, max_size=40)


@dataclass
class Sent:
    """A request under way: where it arrives (a heap and an offset) and as what."""

    queue: QueuePair
    index: int
    op: str
    heap: int
    at: int
    want: bytes
    signaled: bool

    def placed(self) -> tuple[bool, bool]:
        """Whether something of it has arrived, and all of it."""
        got = self.queue.heaps[self.heap].get(self.at, len(self.want))
        if self.op == "add":
            return got != b"\xff" * 8, got != b"\xff" * 8
        same = [a == b for a, b in zip(got, self.want, strict=True)]
        assert all(a in {0, b} for a, b in zip(got, self.want, strict=True))
        return any(same), all(same)


class Program:
    """Random requests on four queue pairs of three PEs, each to a place of its own, checked after every step."""

    def __init__(self, provider: str, late: bool) -> None:
        self.late, self.world = late, World(provider, 3, late=late, num_wqes=32, num_cqes=64)
        for heap in self.world.heaps:
            heap.bytes[:ARRIVES] = [1 + i * 7 % 255 for i in range(ARRIVES)]
            heap.bytes[ARRIVES:ANSWERS] = 0
            heap.bytes[ANSWERS:COUNTER] = 0xFF
            heap.bytes[COUNTER:] = 0
        self.queues = [self.world.connect(*ends)[0] for ends in ((0, 1), (0, 1), (1, 0), (2, 1))]
        self.sent: list[Sent] = []
        self.history: list[bytes] = []

    def post(self, at: int, what: str, num_bytes: int, shift: int, signaled: bool) -> None:
        queue, place = self.queues[at], len(self.sent) * PLACE
        inline = min(num_bytes, {"mlx5": 12, "bnxt_re": 16, "ionic": 32}[queue.provider])
        own = self.world.heaps[queue.pe].get(SENT + place, num_bytes)
        other = self.world.heaps[queue.peer].get(SENT + place, num_bytes)
        arrives = ARRIVES + place + shift
        if what == "write":
            r = Request(what, SENT + place, arrives, num_bytes)
            sent = Sent(queue, 0, what, queue.peer, arrives, own, signaled)
        elif what == "read":
            r = Request(what, arrives, SENT + place, num_bytes)
            sent = Sent(queue, 0, what, queue.pe, arrives, other, signaled)
        elif what == "inline":
            r = Request(what, remote=arrives, data=own[:inline])
            sent = Sent(queue, 0, what, queue.peer, arrives, own[:inline], signaled)
        else:
            r = Request(what, ANSWERS + place, COUNTER, value=1)
            sent = Sent(queue, 0, what, queue.pe, ANSWERS + place, bytes(8), signaled)
        r.signaled = signaled
        sent.index = queue.post(r)
        self.sent.append(sent)

    def step(self, word: int) -> bool:
        moved = self.world.hca.step(word)
        self.check()
        self.history.append(hashlib.sha256(self.world.snapshot()).digest())
        return moved

    def check(self) -> None:
        assert self.world.hca.errors == []
        for queue in self.queues:
            mine = [sent for sent in self.sent if sent.queue is queue]
            some, whole = zip(*[sent.placed() for sent in mine], strict=True) if mine else ((), ())
            # nothing of a request arrives before all of every earlier one on its queue pair has, but for writes, which
            # late cards let overtake reads and atomics
            first_missing = whole.index(False) if False in whole else len(mine)
            for at, sent in enumerate(mine):
                writes = self.late and sent.op in {"write", "inline"}
                before = [whole[i] for i in range(at) if not (writes and mine[i].op in {"read", "add"})]
                assert all(before) or not some[at]
            done = queue.last_completion()
            assert done.count <= first_missing
            assert done.count == 0 or mine[done.count - 1].signaled

    def finish(self, more: Iterator[int]) -> None:
        for word in more:
            if not self.world.hca.pending():
                break
            self.step(word)
        assert not self.world.hca.pending()
        assert all(all(sent.placed()) for sent in self.sent)
        for queue in self.queues:
            signaled = [sent.index + 1 for sent in self.sent if sent.queue is queue and sent.signaled]
            assert queue.last_completion().count == max(signaled, default=0)
        for pe in range(3):
            # adds are atomic, and those of one queue pair take effect in their order
            olds: dict[int, list[int]] = {}
            for sent in self.sent:
                if sent.op == "add" and sent.queue.peer == pe:
                    old = self.world.heaps[sent.heap].word(sent.at)
                    olds.setdefault(sent.queue.number, []).append(old)
            assert all(each == sorted(each) for each in olds.values())
            everything = sorted(old for each in olds.values() for old in each)
            assert everything == list(range(len(everything)))
            assert self.world.heaps[pe].word(COUNTER) == len(everything)


def run(provider: str, late: bool, program: list[tuple[int, str, int, int, bool, bool]], chosen: list[int]) -> Program:
    made, at = Program(provider, late), 0
    for queue, what, num_bytes, shift, signaled, rings in program:
        made.post(queue, what, num_bytes, shift, signaled)
        if rings:
            made.queues[queue].ring()
            made.step(chosen[at % len(chosen)] + at)
            at += 1
    for queue in made.queues:
        if queue.posted:
            queue.ring()
    made.finish(word * 0x9E3779B1 for word in range(20_000))
    return made


@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=40, deadline=None)
@given(late=st.booleans(), program=programs, chosen=words)
def test_any_program_is_carried_out_in_order(
    provider: str, late: bool, program: list[tuple[int, str, int, int, bool, bool]], chosen: list[int]
) -> None:
    made = run(provider, late, program, chosen)
    # nothing beside the places of the requests has changed
    for pe, heap in enumerate(made.world.heaps):
        expected = bytearray(HEAP_BYTES)
        expected[:ARRIVES] = bytes(1 + i * 7 % 255 for i in range(ARRIVES))
        expected[ANSWERS:COUNTER] = b"\xff" * (COUNTER - ANSWERS)
        expected[COUNTER : COUNTER + 8] = heap.get(COUNTER, 8)
        for sent in made.sent:
            if sent.heap == pe:
                expected[sent.at : sent.at + len(sent.want)] = heap.get(sent.at, len(sent.want))
        assert heap.bytes.tobytes() == bytes(expected)


@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=10, deadline=None)
@given(late=st.booleans(), program=programs, chosen=words)
def test_the_same_words_give_the_same_history(
    provider: str, late: bool, program: list[tuple[int, str, int, int, bool, bool]], chosen: list[int]
) -> None:
    assert run(provider, late, program, chosen).history == run(provider, late, program, chosen).history


# ------------------------------------------------------------------------------------------------------ how late it is


class Race:
    """Queue pair A of PE 0 sends 64 bytes to PE 1, then B, of PE 0 too, a signal: what can be seen, over many words."""

    def __init__(self, provider: str, late: bool) -> None:
        self.provider, self.late = provider, late
        self.seen: set[str] = set()
        for seed in range(300):
            self.one(seed)

    def one(self, seed: int) -> None:
        world = World(self.provider, late=self.late)
        a, b = (world.connect(0, 1)[0] for _ in range(2))
        old, new = bytes(64), bytes(range(1, 65))
        world.heaps[0].put(0, new)
        world.heaps[1].put(0, old)
        world.heaps[1].set_word(0, 512)
        a.post(Request("write", 0, 0, 64))
        a.ring()
        b.post(Request("inline", remote=512, data=b"\1" * 8))
        b.ring()
        changed = False
        for at in range(2000):
            if not world.hca.pending():
                break
            if not world.hca.step(seed << 32 | at):
                self.seen.add("put off")
            data, signal = world.heaps[1].get(0, 64), world.heaps[1].word(512)
            counts = world.hca.counts(a.number)
            arrived = [byte != 0 for byte in data]
            if signal and not any(arrived):
                self.seen.add("signal first")
            if not signal and all(arrived):
                self.seen.add("data first")
            if any(arrived) and not all(arrived):
                self.seen.add("in pieces")
                if arrived[-1] and not arrived[0]:
                    self.seen.add("last bytes first")
            a_done, b_done = a.last_completion().count, b.last_completion().count
            if b_done and not a_done:
                self.seen.add("b completes first")
            if a_done and not b_done:
                self.seen.add("a completes first")
            if counts.placed and not a_done:
                self.seen.add("completion after data")
            if counts.fetched and not changed:
                # the source, before its completion
                changed = True
                world.heaps[0].put(0, bytes(range(101, 165)))
            if all(arrived) and a_done:
                kinds = {byte > 100 for byte in data}
                self.seen.add(
                    "source read " + ("early and late" if len(kinds) == 2 else "late" if True in kinds else "early")
                )
        assert not world.hca.pending()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_mode_shows_everything_that_may_happen(provider: str) -> None:
    assert Race(provider, late=True).seen == {
        "put off", "signal first", "data first", "in pieces", "last bytes first", "b completes first",
        "a completes first", "completion after data", "source read late",
    }  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
def test_normal_mode_does_a_request_at_once(provider: str) -> None:
    assert Race(provider, late=False).seen == {
        "signal first", "data first", "b completes first", "a completes first", "source read early",
    }  # fmt: skip


def overtaken(provider: str, late: bool, op: str) -> set[str]:
    """What can be seen of a read of a word and a write of 64 bytes over it, posted behind it on the same queue pair; or
    of an add to a word and a write of what follows that.
    """
    seen = set()
    for seed in range(150):
        world = World(provider, late=late)
        mine, _ = world.connect(0, 1)
        world.heaps[1].put(0, bytes(72))
        world.heaps[0].set_word(2**64 - 1, 512)
        world.heaps[0].put(1024, bytes(range(1, 65)))
        mine.post(Request(op, 512, 0, 8, value=1))
        mine.post(Request("write", 1024, 0 if op == "read" else 8, 64))
        mine.ring()
        for at in range(2000):
            if not world.hca.pending():
                break
            world.hca.step(seed << 32 | at)
            answered = world.heaps[0].word(512) != 2**64 - 1
            written = world.heaps[1].word(64 if op == "add" else 56) != 0
            if written and not answered:
                seen.add("write before the answer")
            if op == "add" and written and world.heaps[1].word(0) == 0:
                seen.add("write before the addition")
            if answered and not written:
                seen.add("answer before the write")
            # and yet they complete in order
            assert mine.last_completion().count == 0 or answered
        assert world.hca.errors == []
        assert mine.last_completion().count == 2
        answer = world.heaps[0].word(512)
        seen.add("old" if answer == 0 else "new")
    return seen


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_writes_overtake_reads_and_atomics(provider: str) -> None:
    answers = {"write before the answer", "answer before the write"}
    # the read finds what was posted behind it
    assert overtaken(provider, True, "read") == answers | {"old", "new"}
    assert overtaken(provider, True, "add") == answers | {"write before the addition", "old"}
    # at once: each request in its turn
    assert overtaken(provider, False, "read") == overtaken(provider, False, "add") == {"answer before the write", "old"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_fails_is_not_overtaken(provider: str) -> None:
    for seed in range(40):
        world = World(provider, late=True)
        mine, _ = world.connect(0, 1)
        before = world.snapshot()
        # beyond the heap
        mine.post(Request("read", 0, HEAP_BYTES - 4, 8))
        mine.post(Request("write", 0, 512, 64))
        mine.ring()
        world.drain(seed << 32)
        assert world.snapshot() == before
        (error,) = world.hca.errors
        assert (error.index, error.fault) == (0, "remote_access")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_has_overtaken_a_read_that_fails_is_flushed(provider: str) -> None:
    """The peer's memory goes while the read is put off."""
    tried = 0
    for seed in range(60):
        world = World(provider, late=True)
        mine, _ = world.connect(0, 1)
        second = world.hca.add_memory(1, world.heaps[1].address, 256)
        mine.keys = [mine.keys[0], second]
        wqe = mine.build(Request("read", 0, 0, 64, signaled=False))
        mine.keys = world.keys
        mine.post(Request("read", 0, 0, 64, signaled=False), wqe)
        mine.post(Request("write", 1024, 512, 8))
        mine.ring()
        untouched = world.heaps[0].get(0, 64)
        for at in range(2000):
            if world.heaps[1].get(512, 8) == world.heaps[0].get(1024, 8):
                break
            world.hca.step(seed << 32 | at)
        if world.heaps[0].get(0, 64) != untouched:
            continue
        tried += 1
        world.hca.remove_memory(second)
        world.drain(seed << 32 | 5000)
        assert [(error.index, error.fault) for error in world.hca.errors] == [(0, "remote_access")]
        last = mine.last_completion()
        assert (last.count, last.failed, last.status) == (2, True, STATUS["flush"][provider])
        assert world.heaps[0].get(0, 64) == untouched
    assert tried > 3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_requests_are_fetched_ahead_and_put_off_for_a_bounded_time(provider: str) -> None:
    world = World(provider, late=True, num_wqes=32, num_cqes=64)
    mine, _ = world.connect(0, 1)
    ahead = idle = longest = 0
    for _ in range(20):
        for _ in range(31):
            mine.post(Request("write", num_bytes=100))
        mine.ring()
        word = 0
        while world.hca.pending():
            idle = 0 if world.hca.step(word) else idle + 1
            word += 1
            longest = max(longest, idle)
            counts = world.hca.counts(mine.number)
            ahead = max(ahead, counts.fetched - counts.placed)
        mine.last_completion()
        mine.acknowledge()
    assert 8 <= ahead <= 16
    assert 64 < longest <= 128


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("word", [0, 1, MASK, -1, 1 << 70])
def test_one_word_again_and_again_ends_too(provider: str, word: int) -> None:
    made = Program(provider, late=True)
    for at in range(20):
        made.post(at % 4, ("write", "read", "inline", "add")[at // 4 % 4], 33, at % 8, at % 3 == 0)
    for queue in made.queues:
        queue.ring()
    made.finish(word for _ in range(5000))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_words_of_a_message_are_not_torn(provider: str) -> None:
    """Pieces are cut at 8-byte words of the target: what polls one sees it as it was, or as it will be."""
    for seed in range(50):
        world = World(provider, late=True)
        mine, _ = world.connect(0, 1)
        before, after = world.heaps[1].get(512, 96), world.heaps[0].get(3, 90)
        mine.post(Request("write", local=3, remote=517, num_bytes=90))
        mine.ring()
        want = before[:5] + after + before[95:]
        for at in range(5000):
            if not world.hca.pending():
                break
            world.hca.step(seed << 32 | at)
            now = world.heaps[1].get(512, 96)
            for i in range(0, 96, 8):
                assert now[i : i + 8] in {before[i : i + 8], want[i : i + 8]}
        assert world.heaps[1].get(512, 96) == want
