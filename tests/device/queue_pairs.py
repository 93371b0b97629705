"""Queue pairs for tests of the device library: laid out by hand after `abi`, doorbells in plain memory, and a card that
is a thread here. What it knows of requests and completions is written from the vendors' layouts, not from the encoders.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mori_triton import abi, bitcode, emulator
from mori_triton.device.launch import launch
from tests.device.pes import Pes, pack, unpack

PROVIDERS = ("mlx5", "bnxt_re", "ionic")
SLOT = {"mlx5": 64, "bnxt_re": 48, "ionic": 64}
CQE = {"mlx5": 64, "bnxt_re": 32, "ionic": 32}
NUMBER, LKEY, RKEY, RESULTS_LKEY = 0x0A1B2, 0x11223344, 0x55667788, 0x99AABBCC
# not where PE 1's heap is: only its card calls it so
REMOTE = 0x7766_5544_0000_1000
DOORBELL_VALUE, CQ_DOORBELL_VALUE = 0x0000_CAFE_0100_0000, 0x0000_CAFE_0200_0000
FILL = 0xA5


def ring_memory(num_bytes: int, fill: int) -> np.ndarray:
    """Bytes that begin at a multiple of 64."""
    raw = np.full(num_bytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


@dataclass
class Rings:
    """The memory of one queue pair, filled so that a byte that nobody writes shows."""

    provider: str
    num_wqes: int
    num_cqes: int
    start: int  # index of the first request
    memory: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.num_wqes
        sizes = {"sq": SLOT[self.provider] * n, "cq": CQE[self.provider] * self.num_cqes, "record": 4, "doorbell": 8}
        sizes |= {"cq_doorbell": 8, "psn_table": 8 * 2 * n, "results": 8 * (abi.RESULT_WORDS + 1), "ready": 8 * n}
        fills = {"ready": 0, "cq": 0xFF if self.provider == "mlx5" else 0}
        self.memory = {name: ring_memory(size, fills.get(name, FILL)) for name, size in sizes.items()}
        if self.provider == "bnxt_re":
            self.u32("cq", 8)[0] = self.start % n
        if self.provider == "mlx5" and self.start:
            self.memory["cq"][60:62] = list(struct.pack(">H", (self.start - 1) & 0xFFFF))
        if self.provider == "ionic":
            # the color of the pass before: not valid yet
            for i in range(self.num_cqes):
                last = (self.start + (i - self.start) % self.num_cqes) & self.num_cqes != 0
                self.memory["cq"][32 * i + 28 : 32 * i + 32] = list(struct.pack(">I", int(last)))

    def address(self, name: str) -> int:
        return self.memory[name].ctypes.data

    def u32(self, name: str, offset: int = 0) -> np.ndarray:
        return self.memory[name][offset : offset + 4].view(np.uint32)

    def u64(self, name: str, offset: int = 0) -> np.ndarray:
        return self.memory[name][offset : offset + 8].view(np.uint64)

    def request(self, index: int) -> bytes:
        size = SLOT[self.provider]
        at = index % self.num_wqes * size
        return self.memory["sq"][at : at + size].tobytes()

    def complete(self, index: int, taken: int, status: int = 0) -> None:
        """Say that requests up to `index` are complete; `taken`: completions before this one. Else index has failed."""
        cq = self.memory["cq"]
        if self.provider == "mlx5":
            # vendor's syndrome, syndrome
            cq[54:56] = [0x51, status]
            opcode = 13 if status else 0
            self.u32("cq", 60)[0] = struct.unpack("<I", struct.pack(">HBB", index & 0xFFFF, 0, opcode << 4))[0]
        elif self.provider == "bnxt_re":
            self.u32("cq", 24)[0] = status << 8
            self.u32("cq", 8)[0] = (index + 1) % self.num_wqes
        else:
            at, color = taken % self.num_cqes * 32, int(taken & self.num_cqes == 0)
            cq[at + 4 : at + 8] = list(struct.pack(">I", (index + 1) & 0xFFFFFF))
            cq[at + 24 : at + 28] = list(struct.pack(">I", status))
            flags = NUMBER << 8 | 2 << 5 | (2 if status else 0) | color
            self.u32("cq", at + 28)[0] = struct.unpack("<I", struct.pack(">I", flags))[0]


class QueuePairs:
    """PE 0 of two, whose PE 1 is not mapped, and `num_qps` queue pairs of `provider` to it."""

    def __init__(
        self,
        arch: str,
        provider: str,
        *,
        num_qps: int = 1,
        num_wqes: int = 4,
        num_cqes: int = 0,
        start: int = 0,
        psn: int = 0,
        mtu: int = 256,
        timeout_s: float = 20.0,
        build: str | None = None,
        heap_bytes: int = 1 << 18,
    ) -> None:
        self.provider, self.arch, self.build = provider, arch, build or provider
        self.pes = Pes(2, arch, heap_bytes=heap_bytes, unreachable={(0, 1), (1, 0)}, timeout_s=timeout_s)
        num_cqes = (num_cqes or 2 * num_wqes) if provider == "ionic" else 1
        self.rings = [Rings(provider, num_wqes, num_cqes, start) for _ in range(num_qps)]
        # those of PE 0, to itself, are all zero
        self.queues = ring_memory(2 * num_qps * abi.QUEUE_SIZE, 0)
        for i, rings in enumerate(self.rings):
            names = ("sq", "cq", "record", "doorbell", "cq_doorbell", "psn_table", "results", "ready")
            values = {name: rings.address(name) for name in names}
            values |= {"doorbell_value": DOORBELL_VALUE, "cq_doorbell_value": CQ_DOORBELL_VALUE}
            values |= {"number": NUMBER + i, "num_wqes": num_wqes, "num_cqes": num_cqes, "num_psns": 2 * num_wqes}
            values |= {"lkey": LKEY, "rkey": RKEY, "results_lkey": RESULTS_LKEY, "mtu": mtu}
            values |= {"remote_base": REMOTE, "remote_bytes": heap_bytes, "free_results": 2**64 - 1}
            values |= {"reserved": start, "posted": start, "done": start, "consumed": start, "psn": psn}
            at = (num_qps + i) * abi.QUEUE_SIZE
            self.queues[at : at + abi.QUEUE_SIZE] = list(pack(abi.QUEUE_FIELDS, abi.QUEUE_SIZE, values))
        values = {"provider": abi.PROVIDERS[provider], "num_qp_per_pe": num_qps, "queues": self.queues.ctypes.data}
        self.network = np.frombuffer(pack(abi.NETWORK_FIELDS, abi.NETWORK_SIZE, values), np.uint8)
        self.pes.contexts[0][abi.CONTEXT_FIELDS["network"].offset // 8] = self.network.ctypes.data

    def queue(self, qp: int = 0) -> dict[str, int]:
        at = (len(self.rings) + qp) * abi.QUEUE_SIZE
        return unpack(abi.QUEUE_FIELDS, self.queues[at : at + abi.QUEUE_SIZE].tobytes())

    @contextmanager
    def current(self) -> Iterator[torch.Tensor]:
        """Launches of this thread run as PE 0; yields its context."""
        with self.pes.current(0) as ctx:
            number = emulator.current_device()
            emulator.allow(number, self.network.ctypes.data, abi.NETWORK_SIZE, "network")
            emulator.allow(number, self.queues.ctypes.data, self.queues.size, "queues")
            for i, rings in enumerate(self.rings):
                for name, memory in rings.memory.items():
                    emulator.allow(number, memory.ctypes.data, memory.size, f"{name} of queue pair {i}")
            yield ctx

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        """`launch()` with the library of this provider."""
        library = bitcode.specialize(self.arch, provider=self.build)
        return launch(kernel, grid, *args, extern_libs={abi.LIBRARY: str(library)}, **kwargs)

    def remote(self, offset: int) -> int:
        """What the card calls the byte at `offset` of PE 1's heap."""
        return REMOTE + offset


# ---------------------------------------------------------------------------------------------------------------- card


@dataclass(frozen=True)
class Seen:
    """A request, as a card reads it."""

    verb: str  # write, inline, read, add, compare_swap
    signaled: bool
    remote: int
    local: int
    num_bytes: int
    payload: bytes
    value: int
    compare: int


def decode(provider: str, raw: bytes) -> Seen:
    """A request from its bytes."""

    def at(fmt: str, offset: int) -> int:
        return struct.unpack_from(fmt, raw, offset)[0]

    if provider == "mlx5":
        opcode, signaled, remote = raw[3], raw[11] == 8, at(">Q", 16)
        if opcode in (0x11, 0x12):
            verb = "compare_swap" if opcode == 0x11 else "add"
            return Seen(verb, signaled, remote, at(">Q", 56), at(">I", 48), b"", at(">Q", 32), at(">Q", 40))
        if raw[32] & 0x80:
            size = at(">I", 32) & 0x7FFFFFFF
            return Seen("inline", signaled, remote, 0, size, raw[36 : 36 + size], 0, 0)
        verb = {0x08: "write", 0x10: "read"}[opcode]
        return Seen(verb, signaled, remote, at(">Q", 40), at(">I", 32), b"", 0, 0)
    if provider == "bnxt_re":
        opcode, flags = raw[0], raw[1]
        if opcode in (0x08, 0x0B):
            verb = "compare_swap" if opcode == 0x08 else "add"
            values = at("<Q", 16), at("<Q", 24)
            return Seen(verb, bool(flags & 1), at("<Q", 8), at("<Q", 32), at("<I", 44), b"", *values)
        size = at("<Q", 8)
        if flags & 0x10:
            return Seen("inline", bool(flags & 1), at("<Q", 16), 0, size, raw[32 : 32 + size], 0, 0)
        verb = {0x04: "write", 0x06: "read"}[opcode]
        return Seen(verb, bool(flags & 1), at("<Q", 16), at("<Q", 32), size, b"", 0, 0)
    opcode, flags, remote = raw[8], at(">H", 10), at(">Q", 16)
    signaled = bool(flags & 8)
    if opcode in (0x04, 0x05):
        verb = "compare_swap" if opcode == 0x04 else "add"
        return Seen(verb, signaled, remote, at(">Q", 48), 8, b"", at(">Q", 28), at(">Q", 36))
    size = at(">I", 28)
    if flags & 4:
        return Seen("inline", signaled, remote, 0, size, raw[32 : 32 + size], 0, 0)
    verb = {0x21: "write", 0x02: "read"}[opcode]
    return Seen(verb, signaled, remote, at(">Q", 32), size, b"", 0, 0)


class Card:
    """Serves the queue pairs of one `QueuePairs` on a thread: with `with`.

    `hold`: while set, nothing is served. `fail`: (queue pair, index) -> status; that request and all after it do
    nothing.
    """

    def __init__(self, pairs: QueuePairs) -> None:
        self.pairs = pairs
        self.hold = threading.Event()
        self.fail: dict[tuple[int, int], int] = {}
        n = len(pairs.rings)
        self.served = [rings.start for rings in pairs.rings]
        self.taken = list(self.served)
        self.given_back = list(self.served)
        self.most_outstanding = 0
        self.signaled = [0] * n
        self.dead = [False] * n
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Card:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # what kernels have left behind is served first
        deadline = time.monotonic() + 5
        while not self.hold.is_set() and any(map(self._ahead, range(len(self.served)))) and time.monotonic() < deadline:
            if self.error is not None or any(self.dead):
                break
            time.sleep(0.001)
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                busy = False
                if not self.hold.is_set():
                    for qp in range(len(self.served)):
                        busy |= self._serve(qp)
                if not busy:
                    time.sleep(0.0002)
        except BaseException as e:
            self.error = e

    def _ahead(self, qp: int) -> int:
        """How many requests the doorbell covers that were not served."""
        rings, served = self.pairs.rings[qp], self.served[qp]
        n, doorbell = rings.num_wqes, rings.memory["doorbell"].tobytes()
        if doorbell == bytes([FILL] * 8):
            return 0
        if rings.provider == "mlx5":
            produced = struct.unpack(">I", rings.memory["record"].tobytes())[0]
            assert produced < 1 << 16
            # of the beginning of some request below the record
            assert struct.unpack(">I", doorbell[4:])[0] >> 8 == NUMBER + qp
            return (produced - served) % (1 << 16)
        if rings.provider == "bnxt_re":
            low, high = struct.unpack("<II", doorbell)
            assert (high & 0xFFFFF, high >> 20) == (NUMBER + qp, 1 << 6)
            slot, epoch = low & 0xFFFFFF, low >> 24
            assert slot % 3 == 0
            return (slot // 3 + epoch * n - served) % (2 * n)
        (value,) = struct.unpack("<Q", doorbell)
        assert value & ~(n - 1) == DOORBELL_VALUE
        return (value - served) % n

    def _completions(self, qp: int) -> int:
        """How many completions the kernels have not given back."""
        rings, doorbell = self.pairs.rings[qp], self.pairs.rings[qp].memory["cq_doorbell"]
        if rings.provider != "ionic":
            return 0
        if not (doorbell == FILL).all():
            value = int(doorbell.view(np.uint64)[0])
            assert value & ~(rings.num_cqes - 1) == CQ_DOORBELL_VALUE
            self.given_back[qp] += (value - self.given_back[qp]) % rings.num_cqes
        return self.taken[qp] - self.given_back[qp]

    def _serve(self, qp: int) -> bool:
        ahead = self._ahead(qp)
        self.most_outstanding = max(self.most_outstanding, ahead)
        rings = self.pairs.rings[qp]
        assert ahead < rings.num_wqes
        for _ in range(ahead):
            if self.hold.is_set() or self.dead[qp]:
                return True
            index = self.served[qp]
            request = decode(rings.provider, rings.request(index))
            status = self.fail.get((qp, index), 0)
            if status == 0:
                self._execute(rings, request)
            self.served[qp] += 1
            if status or request.signaled:
                self.signaled[qp] += 1
                # before this one: after it all of a small ring may have been given back, which looks like none
                assert self._completions(qp) + 1 < max(rings.num_cqes, 2)
                rings.complete(index, self.taken[qp], status)
                self.taken[qp] += 1
            self.dead[qp] = status != 0
        return ahead > 0

    def _execute(self, rings: Rings, request: Seen) -> None:
        pes = self.pairs.pes
        there = pes.heaps[1].numpy()[request.remote - REMOTE :][: request.num_bytes]
        assert there.size == request.num_bytes
        if request.verb == "inline":
            there[:] = list(request.payload)
            return
        if request.verb in ("write", "read"):
            here = pes.heaps[0].numpy()[request.local - pes.base(0) :][: request.num_bytes]
            assert here.size == request.num_bytes
            if request.verb == "write":
                there[:] = here
            else:
                here[:] = there
            return
        word = there.view(np.uint64)
        old = int(word[0])
        if request.verb == "add":
            word[0] = (old + request.value) % 2**64
        elif old == request.compare:
            word[0] = request.value
        rings.u64("results", request.local - rings.address("results"))[0] = old
