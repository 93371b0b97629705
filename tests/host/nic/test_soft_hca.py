"""The soft HCA carries out requests written by hand, in their order, on many queue pairs, as often as rings wrap."""

import pytest

from tests.host.nic.soft_cards import OPS, PROVIDERS, Request, World
from tests.host.nic.soft_requests import MASK, carried_out, request_of

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_operation_does_what_it_says_and_completes(provider: str, op: str, late: bool) -> None:
    world = World(provider, late=late)
    mine, _ = world.connect(1, 0)
    want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
    carried_out(want, 1, 0, request_of(op))
    mine.post(request_of(op))
    assert not world.hca.pending()
    mine.ring()
    assert world.hca.pending()
    world.drain()
    assert world.snapshot() == b"".join(want)
    done = mine.last_completion()
    assert (done.count, done.failed) == (1, False)
    assert world.hca.errors == []
    assert world.hca.counts(mine.number)[:4] == (1, 1, 1, 1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_compare_swap_that_finds_what_it_wants_swaps(provider: str) -> None:
    world = World(provider)
    mine, _ = world.connect(0, 1)
    old = world.heaps[1].word(1024)
    mine.post(Request("cas", local=8, remote=1024, value=0xFEDCBA9876543210, compare=old))
    mine.ring()
    world.drain()
    assert world.heaps[1].word(1024) == 0xFEDCBA9876543210
    assert world.heaps[0].word(8) == old


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 11, "most"])
def test_an_inline_write_carries_its_bytes(provider: str, num_bytes: int | str) -> None:
    most = {"mlx5": 28, "bnxt_re": 16, "ionic": 32}[provider]
    data = bytes(range(1, 1 + (most if isinstance(num_bytes, str) else num_bytes)))
    world = World(provider)
    mine, _ = world.connect(0, 1)
    before = world.heaps[1].get(0, 200)
    mine.post(Request("inline", remote=101, data=data))
    mine.ring()
    world.drain()
    assert world.heaps[1].get(0, 200) == before[:101] + data + before[101 + len(data) :]
    assert not mine.last_completion().failed


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("local", "remote", "num_bytes"), [(0, 0, 1 << 15), (3, 14, 15011), (1, 8, 4096), (8, 7, 4097)]
)
def test_messages_of_any_size_and_alignment(provider: str, local: int, remote: int, num_bytes: int) -> None:
    for op in ("write", "read"):
        for late in (False, True):
            world = World(provider, late=late)
            mine, _ = world.connect(0, 1)
            want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
            r = Request(op, local=local, remote=remote, num_bytes=num_bytes)
            carried_out(want, 0, 1, r)
            mine.post(r)
            mine.ring()
            world.drain()
            assert world.snapshot() == b"".join(want)
            assert world.hca.counts(mine.number).bytes == num_bytes


# ---------------------------------------------------------------------------------------- order, signals, many queues


@pytest.mark.parametrize("provider", PROVIDERS)
def test_only_signaled_requests_complete_and_stand_for_those_before(provider: str) -> None:
    world = World(provider)
    mine, _ = world.connect(0, 1)
    before = mine.memory["cq"].bytes.copy()
    mine.post(request_of("write", signaled=False))
    mine.post(request_of("inline", signaled=False))
    mine.ring()
    world.drain()
    assert (mine.memory["cq"].bytes == before).all()
    mine.post(request_of("add"))
    mine.ring()
    world.drain()
    done = mine.completion()
    assert done is not None
    assert done.count == 3
    assert mine.provider != "ionic" or mine.completion() is None


@pytest.mark.parametrize("provider", PROVIDERS)
def test_several_pes_and_queue_pairs(provider: str) -> None:
    world = World(provider, 4)
    ends = [end for pe in range(4) for peer in range(pe) for _ in range(2) for end in world.connect(pe, peer)]
    assert len({end.number for end in ends}) == 24
    want = [bytearray(heap.bytes.tobytes()) for heap in world.heaps]
    for at, end in enumerate(ends):
        for turn in range(5):
            r = Request("write", local=at * 64, remote=4096 + at * 320 + turn * 64, num_bytes=61)
            carried_out(want, end.pe, end.peer, r)
            end.post(r)
        end.ring()
    world.drain()
    assert world.snapshot() == b"".join(want)
    assert all(end.last_completion().count == 5 for end in ends)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_queue_pair_may_be_connected_to_itself(provider: str) -> None:
    world = World(provider)
    own, _ = world.connect(0, 0)
    own.post(Request("write", local=0, remote=512, num_bytes=100))
    own.ring()
    world.drain()
    assert world.heaps[0].get(512, 100) == world.heaps[0].get(0, 100)


@pytest.mark.parametrize("first", [0, (1 << 16) - 100, (1 << 24) - 100, (1 << 32) - 100])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_rings_and_counters_wrap(provider: str, first: int) -> None:
    """The ring of 8 (colors, epochs), 16 bits of mlx5, 24-bit counts of ionic, 24-bit packet numbers of bnxt_re."""
    world = World(provider, first=first, psn=(1 << 24) - 50)
    mine, _ = world.connect(0, 1)
    start, total = world.heaps[1].word(0), first
    # batches of every size that fits, so that doorbells fall everywhere
    while total < first + 200:
        batch = total % 7 + 1
        for i in range(batch):
            mine.post(Request("add", value=1, signaled=i == batch - 1))
        mine.ring()
        total += batch
        world.drain()
        newest = mine.last_completion()
        assert (newest.count, newest.failed) == (total, False), world.hca.errors
        mine.acknowledge()
    assert world.heaps[1].word(0) == (start + total - first) & MASK
    assert world.heaps[0].word(0) == (start + total - first - 1) & MASK


def test_bnxt_packet_numbers_count_the_packets_of_messages() -> None:
    world = World("bnxt_re", mtu=256, psn=(1 << 24) - 4)
    mine, _ = world.connect(0, 1)
    for op, num_bytes, want in (
        ("write", 1, -3),
        ("read", 256, -2),
        ("write", 257, 0),
        ("cas", 8, 1),
        ("read", 2000, 9),
    ):
        mine.post(Request(op, num_bytes=num_bytes))
        assert mine.psn == want % (1 << 24)
    mine.ring()
    world.drain()
    assert not world.hca.errors
