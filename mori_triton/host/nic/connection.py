"""What a PE tells its peers so that they can connect queue pairs to its own and reach its heap: one record of bytes.

Little-endian, packed, with its kind, version and length in front: PEs of different releases of the package, or in
different calls, find out instead of misreading each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mori_triton.errors import StateError, require
from mori_triton.host.bootstrap.base import Bootstrap

MAGIC = b"MRDM"
VERSION = 1
PROVIDERS = ("mlx5", "bnxt_re", "ionic")
LINK_LAYERS = ("InfiniBand", "Ethernet")

# magic, version, length of the record; PE, PEs, queue pairs to each PE; provider, link layer, port, MTU; LID, GID's
# index, GID, MAC; heap: address, bytes, rkey
_HEAD = struct.Struct("<4sHxxIIIIBBBBHH16s6sxxQQI")
_QUEUE_PAIR = struct.Struct("<II")
_NUMBER_BITS = 24


@dataclass(frozen=True)
class QueuePairEnd:
    """One end of a connection. `number`: of the queue pair, 1 to 2^24 - 1, or 0: there is none. `psn`: of its first
    packet, below 2^24.
    """

    number: int
    psn: int

    def __post_init__(self) -> None:
        require(0 <= self.number < 1 << _NUMBER_BITS, "number", "0 to 2^24 - 1", self.number)
        require(0 <= self.psn < 1 << _NUMBER_BITS, "psn", "0 to 2^24 - 1", self.psn)


NO_QUEUE_PAIR = QueuePairEnd(0, 0)


@dataclass(frozen=True)
class ConnectionFacts:
    """What one PE tells all.

    `queue_pairs[peer * num_qp_per_pe + at]` is its end of connection `at` with `peer`: `NO_QUEUE_PAIR` for peers that
    it reaches otherwise.
    """

    pe: int
    n_pes: int
    num_qp_per_pe: int
    provider: str  # of PROVIDERS
    link_layer: str  # of LINK_LAYERS
    port: int  # of the card
    mtu: int  # as `verbs_api.MTU_…`
    lid: int  # InfiniBand
    gid_index: int
    gid: bytes  # 16 bytes
    mac: bytes  # 6 bytes; Ethernet
    heap_address: int  # what peers call the heap's first byte
    heap_bytes: int
    heap_rkey: int
    queue_pairs: tuple[QueuePairEnd, ...]

    def __post_init__(self) -> None:
        require(0 < self.n_pes < 1 << 32, "n_pes", "1 to 2^32 - 1", self.n_pes)
        require(0 <= self.pe < self.n_pes, "pe", f"0 to {self.n_pes - 1}", self.pe)
        require(0 < self.num_qp_per_pe < 1 << 32, "num_qp_per_pe", "1 to 2^32 - 1", self.num_qp_per_pe)
        require(self.provider in PROVIDERS, "provider", " or ".join(PROVIDERS), self.provider)
        require(self.link_layer in LINK_LAYERS, "link_layer", " or ".join(LINK_LAYERS), self.link_layer)
        require(0 < self.port < 256, "port", "1 to 255", self.port)
        require(1 <= self.mtu <= 5, "mtu", "1 (256 bytes) to 5 (4096)", self.mtu)
        require(len(self.gid) == 16, "gid", "16 bytes", len(self.gid))
        require(len(self.mac) == 6, "mac", "6 bytes", len(self.mac))
        for name, bits in (("lid", 16), ("gid_index", 16), ("heap_address", 64), ("heap_bytes", 64), ("heap_rkey", 32)):
            require(0 <= getattr(self, name) < 1 << bits, name, f"0 to 2^{bits} - 1", getattr(self, name))
        want = self.n_pes * self.num_qp_per_pe
        got = len(self.queue_pairs)
        require(got == want, "len(queue_pairs)", f"{want}, n_pes * num_qp_per_pe", got)

    def end(self, peer: int, at: int) -> QueuePairEnd:
        """Its end of connection `at` with `peer`."""
        return self.queue_pairs[peer * self.num_qp_per_pe + at]

    def pack(self) -> bytes:
        """The record."""
        head = _HEAD.pack(
            MAGIC, VERSION, _HEAD.size + len(self.queue_pairs) * _QUEUE_PAIR.size, self.pe, self.n_pes,
            self.num_qp_per_pe, PROVIDERS.index(self.provider), LINK_LAYERS.index(self.link_layer), self.port, self.mtu,
            self.lid, self.gid_index, self.gid, self.mac, self.heap_address, self.heap_bytes, self.heap_rkey,
        )  # fmt: skip
        return head + b"".join(_QUEUE_PAIR.pack(end.number, end.psn) for end in self.queue_pairs)


def unpack(record: bytes, sender: int) -> ConnectionFacts:
    """The facts in a record that PE `sender` sent.

    Raises:
        StateError: it is something else, of another version, not whole, or of another PE.
    """
    who = f"PE {sender}'s connection facts"
    if record[:4] != MAGIC or len(record) < 6:
        raise StateError(f"{who}: not such a record, it starts with {record[:8]!r}")
    (version,) = struct.unpack_from("<H", record, 4)
    if version != VERSION:
        raise StateError(
            f"{who}: version {version}, this PE's is {VERSION}: all PEs need the same release of the package"
        )
    if len(record) < _HEAD.size:
        raise StateError(f"{who}: {len(record)} bytes, want at least {_HEAD.size}")
    _, _, length, pe, n_pes, per_pe, provider, layer, *rest = _HEAD.unpack_from(record)
    port, mtu, lid, gid_index, gid, mac, heap_address, heap_bytes, heap_rkey = rest
    if length != len(record) or length != _HEAD.size + n_pes * per_pe * _QUEUE_PAIR.size:
        raise StateError(f"{who}: {len(record)} bytes, want {length} for {n_pes} PEs with {per_pe} queue pairs each")
    if pe != sender:
        raise StateError(f"{who}: they are of PE {pe}")
    try:
        ends = tuple(QueuePairEnd(*pair) for pair in _QUEUE_PAIR.iter_unpack(record[_HEAD.size :]))
        return ConnectionFacts(
            pe, n_pes, per_pe, PROVIDERS[provider], LINK_LAYERS[layer], port, mtu, lid, gid_index, gid, mac,
            heap_address, heap_bytes, heap_rkey, ends,
        )  # fmt: skip
    except (IndexError, ValueError) as error:
        raise StateError(f"{who}: {error}") from error


def exchange(bootstrap: Bootstrap, own: ConnectionFacts) -> tuple[ConnectionFacts, ...]:
    """Every PE's facts, by PE. Collective: every PE, same order.

    Raises:
        StateError: on all PEs, if facts of one cannot be read or those of two do not go together.
        PeerTimeout: as every collective.
    """
    records = bootstrap.allgather(own.pack(), "exchange of connection facts")
    facts = tuple(unpack(record, pe) for pe, record in enumerate(records))
    check(facts)
    return facts


def check(facts: Sequence[ConnectionFacts]) -> None:
    """Raise `StateError` unless these facts of all PEs go together."""
    for name in ("n_pes", "num_qp_per_pe", "link_layer", "heap_bytes"):
        if len({getattr(one, name) for one in facts}) > 1:
            each = "; ".join(f"PE {one.pe}: {getattr(one, name)}" for one in facts)
            raise StateError(f"connection facts: the PEs differ in {name} ({each})")
    for one in facts:
        for other in facts[one.pe :]:
            for at in range(one.num_qp_per_pe):
                if bool(one.end(other.pe, at).number) != bool(other.end(one.pe, at).number):
                    has, lacks = (one, other) if one.end(other.pe, at).number else (other, one)
                    raise StateError(
                        f"connection facts: PE {has.pe} has a queue pair {at} with PE {lacks.pe}, which has none"
                    )
