"""A doorbell, record, packet-number table or count of completions that is wrong makes an error completion."""

import struct
from collections.abc import Callable

import pytest

from tests.host.nic.soft_cards import PROVIDERS, QueuePair, Request, World
from tests.host.nic.soft_refusals import REQUESTS, fails

pytestmark = pytest.mark.cpu


def with_doorbell(change: Callable[[int], int], num_requests: int = 1) -> Callable[[QueuePair], None]:
    def post(mine: QueuePair) -> None:
        for _ in range(num_requests):
            mine.post(REQUESTS["write"])
        if mine.provider == "mlx5":
            mine.memory["record"].put(0, struct.pack(">I", mine.posted & 0xFFFF))
        mine.memory["doorbell"].set_word(change(mine.doorbell_word()))

    return post


def with_record(change: Callable[[int], int]) -> Callable[[QueuePair], None]:
    def post(mine: QueuePair) -> None:
        mine.post(REQUESTS["write"])
        mine.memory["record"].put(0, struct.pack(">I", change(mine.posted)))
        mine.memory["doorbell"].set_word(mine.doorbell_word())

    return post


MLX5_DOORBELLS = {
    # the record
    "not written": (with_record(lambda n: n - 1), "request that the doorbell names: .* up to 0x0, got 0x1"),
    "upper half": (with_record(lambda n: n | 1 << 16), "doorbell record: want at most 0xffff, got 0x10002"),
    "other byte order": (
        with_record(lambda n: int.from_bytes(n.to_bytes(4, "little"), "big")), "doorbell record: want at most 0xffff",
    ),
    "too far": (with_record(lambda n: n + 7), "requests under way: want at most 7, got 8"),
    # the register; byte n of the request is bits 8n
    "other queue pair": (with_doorbell(lambda d: d ^ 1 << 48), "queue pair in the doorbell: want 0xa0101, got 0xa0100"),
    "a request ahead": (with_doorbell(lambda d: d + (2 << 16)), "request that the doorbell names: .* got 0x3"),
    "a request that was named": (
        with_doorbell(lambda d: d - (1 << 16), 2), "doorbell: want the first 8 bytes of the last request",
    ),
    "other opcode": (with_doorbell(lambda d: d ^ 1 << 24), "doorbell: want the first 8 bytes of the last request"),
    "other ds": (with_doorbell(lambda d: d ^ 1 << 56), "doorbell: want the first 8 bytes of the last request"),
    "index not swapped": (
        with_doorbell(lambda d: d & ~0xFFFF00 | (d & 0xFF00) << 8 | (d & 0xFF0000) >> 8),
        "request that the doorbell names: .* got 0x100",
    ),
}  # fmt: skip
BNXT_DOORBELLS = {
    "other queue pair": (lambda d: d ^ 1 << 32, "doorbell's upper half: .* want queue pair, valid, type SQ, 0x40a0101"),
    "not valid": (lambda d: d ^ 1 << 58, "doorbell's upper half: .* got 0xa0101"),
    "of a completion queue": (lambda d: d | 4 << 60, "doorbell's upper half: .* got 0x440a0101"),
    "toggled": (lambda d: d | 1 << 25, "bits 25 to 31 of the doorbell: want 0, got 0x1"),
    "no multiple of 3": (lambda d: d + 1, "slot in the doorbell: want a multiple of 3 below 24, got 7"),
    "slot beyond the ring": (lambda d: d + 24, "slot in the doorbell: want a multiple of 3 below 24, got 30"),
    "epoch": (lambda d: d ^ 1 << 24, "epoch in the doorbell: want 0, got 1"),
}
IONIC_DOORBELLS = {
    "other queue pair": (
        lambda d: d ^ 1 << 24,
        "bits around the doorbell's index: want 0xa0101000000, got 0xa0100000000",
    ),
    "index not masked": (lambda d: d | 8, "bits around the doorbell's index: .* got 0xa0101000008"),
    "nothing around it": (lambda d: d & 7, "bits around the doorbell's index: .* got 0x0"),
    "of the completion queue": (lambda d: d | 1 << 48, "bits around the doorbell's index: .* got 0x10a0101000000"),
}


@pytest.mark.parametrize("name", MLX5_DOORBELLS)
def test_mlx5_doorbells(name: str) -> None:
    post, says = MLX5_DOORBELLS[name]
    if name == "a request that was named":
        # the card takes the register for request 1 and sees that its bytes are not those of request 1
        post = with_doorbell(lambda d: (d - (1 << 16)) ^ 1 << 56, 2)
    fails("mlx5", post, "operation", says)


@pytest.mark.parametrize("name", BNXT_DOORBELLS)
def test_bnxt_doorbells(name: str) -> None:
    change, says = BNXT_DOORBELLS[name]
    fails("bnxt_re", with_doorbell(change), "operation", says.replace(".* want", "want"))


@pytest.mark.parametrize("name", IONIC_DOORBELLS)
def test_ionic_doorbells(name: str) -> None:
    change, says = IONIC_DOORBELLS[name]
    fails("ionic", with_doorbell(change), "operation", says)


def test_a_record_may_be_ahead_of_its_doorbell() -> None:
    """One doorbell is seen while the record already covers the next batch."""
    world = World("mlx5")
    mine, _ = world.connect(0, 1)
    mine.post(REQUESTS["write"])
    first = mine.doorbell_word()
    mine.post(REQUESTS["read"])
    mine.memory["record"].put(0, struct.pack(">I", 2))
    mine.memory["doorbell"].set_word(first)
    world.drain()
    assert world.hca.counts(mine.number).completed == 2
    # and then the doorbell that names what has been taken
    mine.memory["doorbell"].set_word(mine.doorbell_word())
    world.drain()
    assert world.hca.errors == []
    mine.post(REQUESTS["write"])
    mine.ring()
    world.drain()
    assert (mine.last_completion().count, mine.last_completion().failed) == (3, False)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_more_requests_than_the_ring_holds(provider: str) -> None:
    """The card has to see the second doorbell while it still has the first one's requests."""
    for word in range(100):
        world = World(provider, late=True)
        mine, _ = world.connect(0, 1)
        for _ in range(5):
            mine.post(Request("inline", remote=0, data=b"12345678"))
        mine.ring()
        world.hca.step(word)
        # only told, not written: that would be over requests that the card has not taken
        mine.posted += 5
        mine.ring()
        if provider == "mlx5":
            # the register names the last of them
            mine.memory["doorbell"].set_word(mine.doorbell_word() + (8 << 16))
        world.drain(word)
        if world.hca.errors:
            break
    assert "requests under way: want at most 7, got 10" in str(world.hca.errors[0])
    assert world.hca.errors[0].index == 5


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_first_of_two_bad_doorbells_is_what_failed(provider: str) -> None:
    queue_pair_at = {"mlx5": 48, "bnxt_re": 32, "ionic": 24}[provider]
    for word in range(30):
        world = World(provider, late=True)
        mine, _ = world.connect(0, 1)
        for turn in (1, 2):
            with_doorbell(lambda d, turn=turn: d ^ turn << queue_pair_at)(mine)  # type: ignore[misc]
            world.hca.step(word)
        world.drain(word)
        (error,) = world.hca.errors
        assert error.index == 0
        assert error.what.endswith({"mlx5": "0xa0100", "bnxt_re": "0x40a0100", "ionic": "0xa0100000000"}[provider])
        assert mine.last_completion().failed


@pytest.mark.parametrize(
    ("shift", "bits"), [(0, 1), (23, 1), (24, 1), (47, 1), (48, 1), (63, 1)], ids=str
)  # fmt: skip
def test_bnxt_packet_numbers(shift: int, bits: int) -> None:
    for request in ("write", "read", "inline", "add"):

        def post(mine: QueuePair, request: str = request) -> None:
            mine.post(REQUESTS[request])
            table = mine.memory["psn_table"]
            table.set_word(table.word(8) ^ bits << shift, 8)
            mine.ring()

        fails(
            "bnxt_re", post, "operation", r"packet number table \(slot, next, start\): want 0x0003000002000001, got 0x"
        )


# ----------------------------------------------------------------------------------------- ionic's completion doorbell


def ionic_completes(num_requests: int, acknowledge: Callable[[QueuePair], None]) -> World:
    world = World("ionic", num_cqes=8)
    mine, _ = world.connect(0, 1)
    for _ in range(num_requests):
        mine.post(REQUESTS["inline"])
        mine.ring()
        world.drain()
        acknowledge(mine)
    return world


def test_ionic_completions_that_nobody_acknowledges_overrun() -> None:
    assert ionic_completes(7, lambda mine: None).hca.errors == []
    world = ionic_completes(8, lambda mine: None)
    (error,) = world.hca.errors
    assert (error.index, error.what) == (7, "completions not acknowledged: want fewer than 7, got 7")
    assert world.hca.counts(error.number).broken


def test_ionic_acknowledges_what_there_is() -> None:
    def too_many(mine: QueuePair) -> None:
        mine.taken += 1
        mine.acknowledge()
        mine.taken += 1

    def elsewhere(mine: QueuePair) -> None:
        mine.memory["cq_doorbell"].set_word(1 | (mine.number ^ 1) << 24 | 1 << 48)

    def right(mine: QueuePair) -> None:
        mine.last_completion()
        mine.acknowledge()

    assert ionic_completes(100, right).hca.errors == []
    (error,) = ionic_completes(3, too_many).hca.errors
    assert error.what == "completions acknowledged: want at most 2, got 3"
    (error,) = ionic_completes(2, elsewhere).hca.errors
    assert error.what.startswith(
        "bits around the completion doorbell's index: want 0x10a0101000000, got 0x10a0100000000"
    )
