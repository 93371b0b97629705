"""Connection facts: the record byte by byte, its limits, and what PEs find out about each other."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from mori_triton.errors import ArgumentError, StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.nic import connection
from mori_triton.host.nic.connection import NO_QUEUE_PAIR, ConnectionFacts, QueuePairEnd, check, exchange, unpack
from tests.host.worlds import run_threads

pytestmark = pytest.mark.cpu


def facts(pe: int = 0, n_pes: int = 2, **changes) -> ConnectionFacts:
    """PE 0 and 1 of two, each with two connections to the other and none to itself."""
    # no more than somebody looks at, of PEs that are too many
    ends = [
        QueuePairEnd(0x100 + 4 * pe + at, 7) if other != pe else NO_QUEUE_PAIR
        for other in range(min(n_pes, 9))
        for at in range(2)
    ]
    values = {
        "pe": pe, "n_pes": n_pes, "num_qp_per_pe": 2, "provider": "mlx5", "link_layer": "Ethernet", "port": 1, "mtu": 5,
        "lid": 0, "gid_index": 3, "gid": bytes(10) + b"\xff\xff\x0a\0\0\1", "mac": b"\xee\x0d\x9a\0\0\1",
        "heap_address": 0x7F0000000000, "heap_bytes": 4 << 30, "heap_rkey": 0x1234, "queue_pairs": tuple(ends),
    }  # fmt: skip
    return ConnectionFacts(**{**values, **changes})


LIMITS = {
    "provider": ["mlx5", "bnxt_re", "ionic"],
    "link_layer": ["InfiniBand", "Ethernet"],
    "port": [1, 255],
    "mtu": [1, 5],
    "lid": [0, 1, 0xBFFF, 0xFFFF],
    "gid_index": [0, 255, 0xFFFF],
    "gid": [bytes(16), b"\xff" * 16, bytes(range(16))],
    "mac": [bytes(6), b"\xff" * 6, bytes(range(6))],
    "heap_address": [0, 1, 2**31, 2**32, 2**47, 2**63, 2**64 - 1],
    "heap_bytes": [0, 2**31, 2**64 - 1],
    "heap_rkey": [0, 2**31, 2**32 - 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in LIMITS.items() for value in values])
def test_a10_each_field_comes_back_at_its_limits(name: str, value: object) -> None:
    made = facts(1, **{name: value})
    assert unpack(made.pack(), 1) == made
    # and only that field's bytes are other than before
    plain = facts(1)
    changed = [at for at, (a, b) in enumerate(zip(made.pack(), plain.pack(), strict=True)) if a != b]
    where, num_bytes = PLACES[name]
    assert all(where <= at < where + num_bytes for at in changed)
    assert bool(changed) == (getattr(plain, name) != value)


# name: offset and size in the record
PLACES = {
    "pe": (12, 4), "n_pes": (16, 4), "num_qp_per_pe": (20, 4), "provider": (24, 1), "link_layer": (25, 1),
    "port": (26, 1), "mtu": (27, 1), "lid": (28, 2), "gid_index": (30, 2), "gid": (32, 16), "mac": (48, 6),
    "heap_address": (56, 8), "heap_bytes": (64, 8), "heap_rkey": (72, 4),
}  # fmt: skip
HEAD_BYTES = 76


def test_a10_the_record_byte_by_byte() -> None:
    record = facts(1).pack()
    assert record[:12] == b"MRDM\x01\0\0\0" + struct.pack("<I", HEAD_BYTES + 4 * 8)
    assert record[12:32].hex(" ", 4) == "01000000 02000000 02000000 00010105 00000300"
    assert record[32:56] == facts().gid + facts().mac + b"\0\0"
    assert record[56:76] == struct.pack("<QQI", 0x7F0000000000, 4 << 30, 0x1234)
    assert record[76:] == struct.pack("<8I", 0x104, 7, 0x105, 7, 0, 0, 0, 0)
    assert {field.name for field in dataclasses.fields(ConnectionFacts)} == {*PLACES, "queue_pairs"}


@pytest.mark.parametrize(("n_pes", "per_pe"), [(1, 1), (1, 255), (72, 16), (1024, 4)])
def test_a10_many_queue_pairs(n_pes: int, per_pe: int) -> None:
    ends = tuple(QueuePairEnd(2**24 - 1 - at, at * 7919 % 2**24) for at in range(n_pes * per_pe))
    made = facts(n_pes - 1, n_pes, num_qp_per_pe=per_pe, queue_pairs=ends)
    got = unpack(made.pack(), n_pes - 1)
    assert got == made
    assert got.end(n_pes - 1, per_pe - 1) == ends[-1]
    assert got.end(n_pes // 2, 0) == ends[n_pes // 2 * per_pe]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pe", -1), ("pe", 2), ("n_pes", 0), ("n_pes", 2**32), ("num_qp_per_pe", 0), ("provider", "other"), ("port", 0),
        ("link_layer", "unknown"), ("port", 256), ("mtu", 0), ("mtu", 6), ("lid", -1), ("lid", 2**16),
        ("gid", bytes(15)),
        ("mac", bytes(7)), ("heap_address", -1), ("heap_address", 2**64), ("heap_rkey", 2**32), ("queue_pairs", ()),
        ("num_qp_per_pe", 3), ("gid_index", 2**16), ("heap_bytes", 2**64),
    ],
)  # fmt: skip
def test_a10_beyond_the_limits(name: str, value: object) -> None:
    with pytest.raises(ArgumentError):
        facts(**{name: value})


@pytest.mark.parametrize("ends", [(2**24, 0), (-1, 0), (1, 2**24), (1, -1)])
def test_a10_numbers_of_24_bits(ends: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"2\^24 - 1"):
        QueuePairEnd(*ends)


def test_k10_other_records_are_refused() -> None:
    record = facts(1).pack()
    cases = {
        b"": "not such a record",
        b"MRDM": "not such a record",
        b'{"handle": 5}': "not such a record",
        record[:4] + b"\x02\0" + record[6:]: "version 2, this PE's is 1",
        # a later version may be shorter
        record[:4] + b"\x02\0": "version 2, this PE's is 1",
        record[:40]: "40 bytes, want at least 76",
        record[:-8]: "100 bytes, want 108",
        record + bytes(8): "116 bytes, want 108",
        record[:20] + b"\x03" + record[21:]: "108 bytes, want 108 for 2 PEs with 3",
        record[:24] + b"\x07" + record[25:]: "out of range",
        record[:26] + b"\0" + record[27:]: "port: want 1 to 255, got 0",
        record[:79] + b"\1" + record[80:]: "number: want 0 to",
    }
    for bad, text in cases.items():
        with pytest.raises(StateError, match="PE 1's connection facts: ") as caught:
            unpack(bad, 1)
        assert text in str(caught.value)
    with pytest.raises(StateError, match="PE 0's connection facts: they are of PE 1"):
        unpack(record, 0)


def exchanged(made: list[ConnectionFacts]) -> list:
    """What each PE gets, or the error it gets."""
    group = ThreadGroup(len(made))

    def program(pe: int):
        bootstrap = group.bootstrap(pe)
        try:
            return exchange(bootstrap, made[pe])
        except StateError as error:
            return str(error)

    return run_threads(len(made), program)


def test_exchange() -> None:
    made = [facts(pe, 3, heap_address=0x1000 * (pe + 1), heap_rkey=pe) for pe in range(3)]
    assert exchanged(made) == [tuple(made)] * 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"link_layer": "InfiniBand"}, r"differ in link_layer (PE 0: Ethernet; PE 1: InfiniBand)"),
        ({"heap_bytes": 1}, "differ in heap_bytes (PE 0: 4294967296; PE 1: 1)"),
        ({"num_qp_per_pe": 1, "queue_pairs": (NO_QUEUE_PAIR,) * 2}, "differ in num_qp_per_pe (PE 0: 2; PE 1: 1)"),
        (
            {"queue_pairs": (QueuePairEnd(9, 0), *[NO_QUEUE_PAIR] * 3)},
            "PE 0 has a queue pair 1 with PE 1, which has none",
        ),
    ],
)
def test_k10_pes_that_do_not_go_together_get_the_same_error(changes: dict[str, object], text: str) -> None:
    errors = exchanged([facts(0), facts(1, **changes)])
    assert errors[0] == errors[1]
    assert text in errors[0]


def test_cards_of_different_makers_go_together() -> None:
    check([facts(0), facts(1, provider="bnxt_re", port=2, mtu=3)])


def test_pes_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    other = facts(1).pack()
    monkeypatch.setattr(connection, "VERSION", 2)
    with pytest.raises(StateError, match="same release"):
        unpack(other, 1)
