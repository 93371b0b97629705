"""A request with a wrong field, range, key or end makes an error completion, and changes no memory."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.host.nic.soft_cards import HEAP_BYTES, PROVIDERS, STATUS, QueuePair, World
from tests.host.nic.soft_refusals import REQUESTS, fails

pytestmark = pytest.mark.cpu


class Case(NamedTuple):
    """Bytes `new` at `at` of an otherwise right request fail it."""

    provider: str
    request: str
    at: int
    new: bytes
    fault: str
    says: str


def cases() -> list[Case]:
    found = []

    def add(provider: str, requests: str, at: int, new: bytes, fault: str, says: str) -> None:
        found.extend(Case(provider, request, at, new, fault, says) for request in requests.split("|"))

    everything, data = "write|read|inline|add|cas", "write|read"
    atomics = "add|cas"

    add("mlx5", everything, 0, b"\1", "operation", "opcode modifier: want 0, got 0x1")
    add("mlx5", everything, 1, b"\0\2", "operation", "index in the request: want 0x1, got 0x2")
    add("mlx5", everything, 1, b"\1\0", "operation", "index in the request: want 0x1, got 0x100")
    for opcode in (0x00, 0x01, 0x0A, 0x0B, 0x14, 0x15):
        add("mlx5", everything, 3, bytes([opcode]), "operation", f"opcode: .* got {opcode:#x}")
    add("mlx5", everything, 4, b"\x01\x02\x03", "operation", "queue pair in the request: want 0xa0101, got 0x10203")
    for units in (0, 2, 4, 5):
        add("mlx5", f"{data}|inline", 7, bytes([units]), "operation", f"ds: want 3, got {units}")
    add("mlx5", f"{atomics}|long inline", 7, b"\3", "operation", "ds: want 4, got 3")
    for at in (8, 9, 10, 12, 13, 14, 15, 28, 31):
        add("mlx5", everything, at, b"\x40", "operation", f"byte {at} of the request carries nothing: want 0, got 0x40")
    for mode in (0x04, 0x0C, 0x28, 0x02):
        add("mlx5", everything, 11, bytes([mode]), "operation", f"byte 11, completion mode: want 0 or 8, got {mode:#x}")
    add("mlx5", data, 32, bytes(4), "length", "length: want 1 to 1073741824, got 0")
    add("mlx5", data, 32, b"\x40\0\0\1", "length", "length: want 1 to 1073741824, got 1073741825")
    add("mlx5", "inline", 32, b"\x80\0\0\0", "length", "length: want 1 to 28, got 0")
    add("mlx5", "inline", 32, b"\x80\0\0\x1d", "length", "length: want 1 to 28, got 29")
    add("mlx5", "inline", 44, b"9", "operation", "byte 44 of the request carries nothing")
    add("mlx5", "inline|long inline", 63, b"9", "operation", "byte 63 of the request carries nothing")
    add("mlx5", data, 48, b"9", "operation", "byte 48 of the request carries nothing")
    add("mlx5", atomics, 48, b"\0\0\0\4", "length", "length of an atomic: want 8, got 4")

    for opcode in (0x00, 0x02, 0x05, 0x07, 0x09, 0x0A, 0x80):
        add("bnxt_re", everything, 0, bytes([opcode]), "operation", f"opcode: .* got {opcode:#x}")
    for flags in (0x02, 0x04, 0x08, 0x20, 0x40, 0x81):
        add("bnxt_re", everything, 1, bytes([flags]), "operation", f"flags: .* got {flags:#x}")
    add("bnxt_re", f"read|{atomics}", 1, b"\x11", "operation", "flags: want only bits of 0x1, got 0x11")
    add("bnxt_re", everything, 2, b"\2", "operation", "ws: want 3, got 2")
    add("bnxt_re", everything, 3, b"\1", "operation", "byte 3 of the request carries nothing")
    for at in (4, 7, 28, 31):
        add("bnxt_re", f"{data}|inline", at, b"\x40", "operation", f"byte {at} of the request carries nothing: want 0")
    add("bnxt_re", data, 8, bytes(8), "length", "length: want 1 to 1073741824, got 0")
    add("bnxt_re", data, 8, b"\1\0\0\x40", "length", "length: want 1 to 1073741824, got 1073741825")
    add("bnxt_re", data, 12, b"\1", "length", "length: want 1 to 1073741824, got 4294967344")
    add("bnxt_re", data, 44, b"\x2f", "length", "length of the local part: want that of the request, 48, got 47")
    add("bnxt_re", "inline", 8, bytes(8), "length", "length: want 1 to 16, got 0")
    add("bnxt_re", "inline", 8, b"\x11", "length", "length: want 1 to 16, got 17")
    add("bnxt_re", "inline", 47, b"9", "operation", "byte 47 of the request carries nothing")
    add("bnxt_re", atomics, 44, b"\4", "length", "length of an atomic: want 8, got 4")

    add("ionic", everything, 0, b"\0", "operation", "index in the request: want 0x1, got 0x0")
    add("ionic", everything, 4, b"\1", "operation", "index in the request: want 0x1, got 0x100000001")
    for opcode in (0x00, 0x01, 0x03, 0x06, 0x20, 0x22):
        add("ionic", everything.replace("inline|", ""), 8, bytes([opcode]), "operation", f"opcode: .* got {opcode:#x}")
    add("ionic", f"{data}|{atomics}", 9, b"\0", "operation", "number of local parts: want 1, got 0")
    add("ionic", f"{data}|{atomics}", 9, b"\2", "operation", "number of local parts: want 1, got 2")
    add("ionic", "inline", 9, b"\1", "operation", "number of local parts: want 0, got 1")
    add("ionic", everything, 10, b"\0\x08", "operation", "color: want 0x10, got 0x0")
    for flags in (0x11, 0x12, 0x30, 0x118):
        says = f"flags: .* got {flags:#x}"
        add("ionic", everything, 10, flags.to_bytes(2, "big"), "operation", says)
    add("ionic", f"read|{atomics}", 10, b"\0\x1c", "operation", "flags: want only bits of 0x18, got 0x1c")
    for at in (12, 15):
        add("ionic", everything, at, b"\x40", "operation", f"byte {at} of the request carries nothing: want 0")
    add("ionic", data, 28, bytes(4), "length", "length: want 1 to 1073741824, got 0")
    add("ionic", data, 28, b"\x40\0\0\1", "length", "length: want 1 to 1073741824, got 1073741825")
    add("ionic", data, 40, b"\0\0\0\x2f", "length", "length of the local part: want that of the request, 48, got 47")
    add("ionic", data, 48, b"9", "operation", "byte 48 of the request carries nothing")
    add("ionic", "inline", 28, bytes(4), "length", "length: want 1 to 32, got 0")
    add("ionic", "inline", 28, b"\0\0\0\x21", "length", "length: want 1 to 32, got 33")
    add("ionic", "inline", 63, b"9", "operation", "byte 63 of the request carries nothing")
    add("ionic", atomics, 63, b"9", "operation", "byte 63 of the request carries nothing")

    # keys that nobody has
    for provider, requests, at, order in (
        ("mlx5", everything, 24, "big"), ("bnxt_re", f"{data}|inline", 24, "little"),
        ("bnxt_re", atomics, 4, "little"), ("ionic", everything, 24, "big"),
    ):  # fmt: skip
        for key in (0, 0x110100, 0xFFFFFFFF):
            new = key.to_bytes(4, order)  # type: ignore[arg-type]
            add(provider, requests, at, new, "remote_access", f"rkey: want one of PE 1, got {key:#x}")
    for provider, requests, at, order in (
        ("mlx5", data, 36, "big"), ("mlx5", atomics, 52, "big"), ("bnxt_re", f"{data}|{atomics}", 40, "little"),
        ("ionic", f"{data}|{atomics}", 44, "big"),
    ):  # fmt: skip
        for key in (0, 0x110100, 0xFFFFFFFF):
            new = key.to_bytes(4, order)  # type: ignore[arg-type]
            add(provider, requests, at, new, "protection", f"lkey: want one of PE 0, got {key:#x}")
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c.provider}-{c.request}-{c.at}-{c.new.hex()}")
def test_a_request_with_a_wrong_field(case: Case) -> None:
    def post(mine: QueuePair) -> None:
        r = replace(REQUESTS[case.request], signaled=case.at % 2 == 0)
        wqe = mine.build(r)
        assert wqe[case.at : case.at + len(case.new)] != case.new
        wqe[case.at : case.at + len(case.new)] = case.new
        mine.post(r, wqe)
        # the doorbell of mlx5 repeats the beginning of the last request
        mine.post(REQUESTS["inline"])
        mine.ring()

    fails(case.provider, post, case.fault, case.says)


# offsets beyond the heap's two ends, and addresses that wrap
OUTSIDE = {"behind": HEAP_BYTES, "over the end": HEAP_BYTES - 40, "before": -48, "over the start": -8}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", OUTSIDE)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_ranges(provider: str, where: str, late: bool) -> None:
    for op in ("write", "read"):
        for side, fault in (("local", "protection"), ("remote", "remote_access")):

            def post(mine: QueuePair, op: str = op, side: str = side) -> None:
                mine.post(replace(REQUESTS[op], **{side: OUTSIDE[where]}))
                mine.ring()

            says = "address 0x[0-9a-f]+: want all of 48 bytes in the memory of its key"
            fails(provider, post, fault, says, late=late)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_address_that_wraps(provider: str) -> None:
    def post(mine: QueuePair) -> None:
        mine.post(replace(REQUESTS["write"], remote=(1 << 64) - 8 - mine.heaps[1].address))
        mine.ring()

    fails(provider, post, "remote_access", "address 0xfffffffffffffff8: want all of 48 bytes")


@pytest.mark.parametrize("op", ["add", "cas"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_atomics_are_aligned(provider: str, op: str) -> None:
    for side, fault in (("local", "operation"), ("remote", "remote_invalid")):
        for offset in (1, 4):

            def post(mine: QueuePair, side: str = side, offset: int = offset) -> None:
                mine.post(replace(REQUESTS[op], **{side: 64 + offset}))
                mine.ring()

            fails(provider, post, fault, f"{side} address: want a multiple of 8, got 0x")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_keys_are_good_for_their_own_side_only(provider: str) -> None:
    def swapped(mine: QueuePair) -> None:
        mine.keys = mine.keys[::-1]
        mine.post(REQUESTS["write"])
        mine.ring()

    def local_only(mine: QueuePair) -> None:
        key = mine.hca.add_memory(1, mine.heaps[1].address, HEAP_BYTES, remote=False)
        mine.keys = [mine.keys[0], key]
        mine.post(REQUESTS["write"])
        mine.ring()

    def removed(mine: QueuePair) -> None:
        mine.hca.remove_memory(mine.keys[1])
        # whoever gets the place gets another key
        assert mine.hca.add_memory(1, mine.heaps[1].address, HEAP_BYTES) not in mine.keys
        mine.post(REQUESTS["write"])
        mine.ring()

    fails(provider, swapped, "protection", "lkey: want one of PE 0, got 0x")
    fails(provider, local_only, "remote_access", "rkey: want one of PE 1, got 0x")
    fails(provider, removed, "remote_access", "rkey: want one of PE 1, got 0x")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ends_have_to_be_connected(provider: str) -> None:
    for half, fault, says in (
        (False, "operation", "queue pair: want a connected one, got 0x"),
        (True, "retry", "the peer's queue pair 0x?[0-9a-f]+: want one that is connected to 0x[0-9a-f]+, there is none"),
    ):
        world = World(provider)
        before = world.snapshot()
        ends = [QueuePair(world.hca, provider, pe, world.heaps, world.keys, 1 - pe) for pe in (0, 1)]
        if half:
            world.hca.connect(ends[0].number, ends[1].number)
        ends[0].post(REQUESTS["write"])
        ends[0].ring()
        world.drain()
        assert ends[0].last_completion().status == STATUS[fault][provider]
        assert world.snapshot() == before
        assert re.fullmatch(says + ".*", world.hca.errors[0].what), world.hca.errors


def test_ionic_colors_of_a_second_pass() -> None:
    world = World("ionic", first=8)
    mine, _ = world.connect(0, 1)
    wqe = mine.build(REQUESTS["write"])
    assert wqe[11] == 0x08
    wqe[11] = 0x18
    mine.post(REQUESTS["write"], wqe)
    mine.ring()
    world.drain()
    assert "color: want 0x0, got 0x10" in str(world.hca.errors[0])
