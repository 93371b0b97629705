"""What tests of the soft HCA post: requests, doorbells and rings written by hand, from the vendors' byte layouts."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from mori_triton.host.nic.soft_hca import CQ_FILL, SoftHca

HEAP_BYTES = 1 << 16
PROVIDERS = ("mlx5", "bnxt_re", "ionic")
OPS = ("write", "read", "inline", "add", "cas")
# what a failure is called by each vendor
STATUS = {
    "length": {"mlx5": 0x01, "bnxt_re": 2, "ionic": 1},
    "operation": {"mlx5": 0x02, "bnxt_re": 3, "ionic": 2},
    "protection": {"mlx5": 0x04, "bnxt_re": 4, "ionic": 3},
    "flush": {"mlx5": 0x05, "bnxt_re": 0xB, "ionic": 4},
    "remote_invalid": {"mlx5": 0x12, "bnxt_re": 6, "ionic": 8},
    "remote_access": {"mlx5": 0x13, "bnxt_re": 7, "ionic": 9},
    "remote_operation": {"mlx5": 0x14, "bnxt_re": 8, "ionic": 10},
    "retry": {"mlx5": 0x15, "bnxt_re": 0xA, "ionic": 11},
    "rnr": {"mlx5": 0x16, "bnxt_re": 9, "ionic": 12},
}


class Memory:
    """Zeroed bytes at a 64-byte-aligned address."""

    def __init__(self, num_bytes: int, fill: int = 0) -> None:
        self._whole = np.full(num_bytes + 64, fill, np.uint8)
        start = -self._whole.ctypes.data % 64
        self.bytes = self._whole[start : start + num_bytes]
        self.address = self.bytes.ctypes.data

    def put(self, at: int, data: bytes | bytearray) -> None:
        self.bytes[at : at + len(data)] = np.frombuffer(bytes(data), np.uint8)

    def get(self, at: int, num_bytes: int) -> bytes:
        return self.bytes[at : at + num_bytes].tobytes()

    def word(self, at: int = 0) -> int:
        return int(self.bytes[at : at + 8].view("<u8")[0])

    def set_word(self, value: int, at: int = 0) -> None:
        # one store: the card may be looking
        self.bytes[at : at + 8].view("<u8")[0] = value


@dataclass
class Request:
    """`local` and `remote` are offsets in the heaps; an inline write carries `data`."""

    op: str
    local: int = 0
    remote: int = 0
    num_bytes: int = 8
    value: int = 0
    compare: int = 0
    data: bytes = b""
    signaled: bool = True


@dataclass
class Completion:
    """`count`: requests that are over, as far as the completion says it."""

    count: int
    failed: bool
    status: int


@dataclass
class QueuePair:
    """One end of a connection, as a kernel sees it."""

    hca: SoftHca
    provider: str
    pe: int
    heaps: list[Memory]
    keys: list[int]
    peer: int
    num_wqes: int = 8
    num_cqes: int = 16
    num_psns: int = 64
    mtu: int = 1024
    first: int = 0
    psn: int = 0
    posted: int = 0
    taken: int = 0
    newest: Completion | None = None
    memory: dict[str, Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.posted = self.first
        fill = CQ_FILL[self.provider]
        self.memory = {"sq": Memory(self.num_wqes * 64), "cq": Memory(self.num_cqes * 64, fill)}
        self.memory |= {name: Memory(8) for name in ("doorbell", "record", "cq_doorbell")}
        self.memory["psn_table"] = Memory(self.num_psns * 8)
        places = {name: memory.address for name, memory in self.memory.items()}
        self.number = self.hca.add_queue_pair(
            self.provider, self.pe, **places,
            num_wqes=self.num_wqes, num_cqes=self.num_cqes, num_psns=self.num_psns, mtu=self.mtu,
            first=self.first, psn=self.psn,
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- requests
    def build(self, r: Request, index: int | None = None) -> bytearray:
        """A request's bytes, every one of them."""
        index = self.posted if index is None else index
        local, remote = self.heaps[self.pe].address + r.local, self.heaps[self.peer].address + r.remote
        lkey, rkey = self.keys[self.pe], self.keys[self.peer]
        return getattr(self, f"_build_{self.provider}")(r, index, local, remote, lkey, rkey)

    def _build_mlx5(self, r: Request, index: int, local: int, remote: int, lkey: int, rkey: int) -> bytearray:
        w = bytearray(64)
        opcode = {"write": 0x08, "read": 0x10, "inline": 0x08, "cas": 0x11, "add": 0x12}[r.op]
        units = 3
        struct.pack_into(">QI", w, 16, remote, rkey)
        if r.op in {"write", "read"}:
            struct.pack_into(">IIQ", w, 32, r.num_bytes, lkey, local)
        elif r.op == "inline":
            struct.pack_into(">I", w, 32, len(r.data) | 0x80000000)
            w[36 : 36 + len(r.data)] = r.data
            units = 3 if len(r.data) <= 12 else 4
        else:
            struct.pack_into(">QQIIQ", w, 32, r.value, r.compare, 8, lkey, local)
            units = 4
        struct.pack_into(">II", w, 0, (index & 0xFFFF) << 8 | opcode, self.number << 8 | units)
        w[11] = 0x08 if r.signaled else 0
        return w

    def _build_bnxt_re(self, r: Request, index: int, local: int, remote: int, lkey: int, rkey: int) -> bytearray:
        w = bytearray(48)
        opcode = {"write": 0x04, "read": 0x06, "inline": 0x04, "cas": 0x08, "add": 0x0B}[r.op]
        flags = (1 if r.signaled else 0) | (0x10 if r.op == "inline" else 0)
        struct.pack_into("<I", w, 0, 3 << 16 | flags << 8 | opcode)
        if r.op in {"write", "read"}:
            struct.pack_into("<IQQI", w, 4, 0, r.num_bytes, remote, rkey)
            struct.pack_into("<QII", w, 32, local, lkey, r.num_bytes)
        elif r.op == "inline":
            struct.pack_into("<IQQI", w, 4, 0, len(r.data), remote, rkey)
            w[32 : 32 + len(r.data)] = r.data
        else:
            struct.pack_into("<IQQQQII", w, 4, rkey, remote, r.value, r.compare, local, lkey, 8)
        return w

    def _build_ionic(self, r: Request, index: int, local: int, remote: int, lkey: int, rkey: int) -> bytearray:
        w = bytearray(64)
        opcode = {"write": 0x21, "read": 0x02, "inline": 0x21, "cas": 0x04, "add": 0x05}[r.op]
        flags = 0x8 if r.signaled else 0
        flags |= 0x4 if r.op == "inline" else 0
        flags |= 0x10 if index & self.num_wqes == 0 else 0
        struct.pack_into("<QBB", w, 0, index, opcode, 0 if r.op == "inline" else 1)
        struct.pack_into(">HIIII", w, 10, flags, 0, remote >> 32, remote & 0xFFFFFFFF, rkey)
        if r.op in {"write", "read"}:
            struct.pack_into(">IQII", w, 28, r.num_bytes, local, r.num_bytes, lkey)
        elif r.op == "inline":
            struct.pack_into(">I", w, 28, len(r.data))
            w[32 : 32 + len(r.data)] = r.data
        else:
            struct.pack_into(">QQIQ", w, 28, r.value, r.compare, lkey, local)
        return w

    def post(self, r: Request, wqe: bytearray | None = None) -> int:
        """Put a request into the ring (bytes `wqe` instead of the right ones) and return its index. Rings nothing."""
        index, stride = self.posted, 48 if self.provider == "bnxt_re" else 64
        self.memory["sq"].put(index % self.num_wqes * stride, self.build(r) if wqe is None else wqe)
        if self.provider == "bnxt_re":
            packets = -(-r.num_bytes // self.mtu) if r.op in {"write", "read"} else 1
            after = (self.psn + packets) % (1 << 24)
            entry = self.psn | after << 24 | (index % self.num_wqes * 3) << 48
            self.memory["psn_table"].set_word(entry, index % self.num_psns * 8)
            self.psn = after
        self.posted += 1
        return index

    # ---------------------------------------------------------------------------------------------------- doorbells
    def doorbell_word(self) -> int:
        """What rings for all that is posted."""
        slot = self.posted % self.num_wqes
        if self.provider == "mlx5":
            last = (self.posted - 1) % self.num_wqes * 64
            return self.memory["sq"].word(last)
        if self.provider == "bnxt_re":
            return slot * 3 | (self.posted // self.num_wqes & 1) << 24 | self.number << 32 | 1 << 58
        return slot | self.number << 24

    def ring(self) -> None:
        if self.provider == "mlx5":
            self.memory["record"].put(0, struct.pack(">I", self.posted & 0xFFFF))
        self.memory["doorbell"].set_word(self.doorbell_word())

    def acknowledge(self) -> None:
        """ionic: tell the card which completions have been taken."""
        self.memory["cq_doorbell"].set_word(self.taken % self.num_cqes | self.number << 24 | 1 << 48)

    # -------------------------------------------------------------------------------------------------- completions
    def completion(self) -> Completion | None:
        """What the completion queue says now; ionic: the next of its completions, None if there is none."""
        cq = self.memory["cq"]
        if self.provider == "mlx5":
            # read at once, as it is written
            last = cq.get(60, 4)
            if last == b"\xff" * 4:
                return Completion(self.first, False, 0)
            counter, opcode = struct.unpack(">H", last[:2])[0], last[3] >> 4
            assert opcode in {0, 13}
            count = self.posted - ((self.posted - counter - 1) & 0xFFFF)
            return Completion(count, opcode == 13, cq.get(55, 1)[0] if opcode == 13 else 0)
        if self.provider == "bnxt_re":
            count, status = struct.unpack("<I", cq.get(8, 4))[0], cq.get(25, 1)[0]
            assert count < self.num_wqes
            if cq.get(0, 32) == bytes(32):
                return Completion(self.first, False, 0)
            return Completion(self.posted - (self.posted - count) % self.num_wqes, status != 0, status)
        entry = cq.get(self.taken % self.num_cqes * 32, 32)
        flags = struct.unpack(">I", entry[28:])[0]
        if flags & 1 == (1 if self.taken & self.num_cqes else 0):
            return None
        assert flags >> 8 == self.number
        assert flags >> 5 & 7 == 2
        self.taken += 1
        count = struct.unpack(">I", entry[4:8])[0]
        count = self.posted - ((self.posted - count) & 0xFFFFFF)
        failed = bool(flags & 2)
        return Completion(count, failed, struct.unpack(">I", entry[24:28])[0] if failed else 0)

    def last_completion(self) -> Completion:
        """The newest there has been."""
        while (found := self.completion()) is not None:
            self.newest = found
            if self.provider != "ionic":
                break
        return self.newest or Completion(self.first, False, 0)


class World:
    """PEs with heaps of random bytes, and connected queue pairs between some of them."""

    def __init__(self, provider: str, n_pes: int = 2, *, late: bool = False, **sizes: int) -> None:
        self.provider, self.sizes = provider, sizes
        self.hca = SoftHca(late=late)
        self.heaps = [Memory(HEAP_BYTES) for _ in range(n_pes)]
        for pe, heap in enumerate(self.heaps):
            heap.put(0, np.random.default_rng(pe).bytes(HEAP_BYTES))
        self.keys = [self.hca.add_memory(pe, heap.address, HEAP_BYTES) for pe, heap in enumerate(self.heaps)]

    def connect(self, pe: int, peer: int) -> tuple[QueuePair, QueuePair]:
        ends = [
            QueuePair(self.hca, self.provider, a, self.heaps, self.keys, b, **self.sizes)
            for a, b in ((pe, peer), (peer, pe))
        ]
        self.hca.connect(ends[0].number, ends[1].number)
        self.hca.connect(ends[1].number, ends[0].number)
        return ends[0], ends[1]

    def drain(self, first_word: int = 0, most: int = 100_000) -> None:
        """Step until there is nothing to do."""
        for word in range(first_word, first_word + most):
            if not self.hca.pending():
                return
            self.hca.step(word)
        raise AssertionError(f"still pending: {self.hca.describe()}")

    def snapshot(self) -> bytes:
        return b"".join(heap.bytes.tobytes() for heap in self.heaps)
