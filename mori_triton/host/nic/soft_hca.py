"""A network card in software: reads the queues that kernels post to, as a vendor's card does, and carries them out.

One serves all PEs of a process. Its code is `bitcode/x86_64/soft_hca.bc`; docs/soft_hca.md says what it models.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from mori_triton.errors import ArgumentError, StateError, require
from mori_triton.host.native import Native, once

PROVIDERS = {"mlx5": 1, "bnxt_re": 2, "ionic": 3}
# what every byte of a completion queue has to be at the start
CQ_FILL = {"mlx5": 0xFF, "bnxt_re": 0, "ionic": 0}
# in the order of `Fault` in hip_src/soft_hca.h
FAULTS = (
    "none", "length", "operation", "protection", "flush", "remote_invalid", "remote_access", "remote_operation",
    "retry", "rnr",
)  # fmt: skip

_NEXT = (1 << 64) - 1  # the request that is fetched next
_MAX_VIOLATIONS, _MAX_QUEUE_PAIRS, _MAX_REGIONS = 256, 4096, 4096

_U32, _U64, _PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mori_soft_hca_new": (_PTR, _U32, _U64),
    "mori_soft_hca_free": (None, _PTR),
    "mori_soft_hca_add_memory": (_U32, _PTR, _PTR, _U32, _U64, _U64, _U32),
    "mori_soft_hca_remove_memory": (None, _PTR, _U32),
    "mori_soft_hca_add_queue_pair": (_U32, _PTR, _PTR, _PTR),
    "mori_soft_hca_connect": (None, _PTR, _U32, _U32),
    "mori_soft_hca_remove_queue_pair": (None, _PTR, _U32),
    "mori_soft_hca_inject": (None, _PTR, _U32, _U32, _U64),
    "mori_soft_hca_counts": (None, _PTR, _U32, _PTR),
    "mori_soft_hca_rung": (_U32, _PTR, _U32),
    "mori_soft_hca_violation": (_U64, _PTR, _U64, _PTR),
    "mori_soft_hca_pending": (_U32, _PTR),
    "mori_soft_hca_step": (_U32, _PTR, _U64),
    "mori_soft_hca_stop": (None, _PTR, _U64),
    "mori_soft_hca_run": (None, _PTR),
}


@once
def _native() -> Native:
    """This process' code."""
    return Native("soft_hca.bc", _SIGNATURES)


class _Violation(ctypes.Structure):
    _fields_ = (
        ("number", _U64),
        ("index", _U64),
        ("want", _U64),
        ("got", _U64),
        ("what", ctypes.c_char_p),
        ("fault", _U64),
        ("pe", _U64),
    )


def doorbell_values(number: int) -> tuple[int, int]:
    """The bits around the index in an ionic queue pair's doorbells: of its send queue, of its completion queue."""
    return number << 24, number << 24 | 1 << 48


class Counts(NamedTuple):
    """Of a queue pair: requests that its doorbells cover, that were fetched, whose data is at its place, that are over;
    bytes that were moved; whether one has failed.
    """

    producer: int
    fetched: int
    placed: int
    completed: int
    bytes: int
    broken: bool


@dataclass(frozen=True)
class Violation:
    """What went wrong first on a queue pair; `what` in words."""

    provider: str
    number: int
    pe: int
    peer: int | None
    index: int
    fault: str
    what: str

    def __str__(self) -> str:
        to = "not connected" if self.peer is None else f"to PE {self.peer}"
        pair = f"soft {self.provider}, queue pair {self.number:#x} of PE {self.pe} {to}"
        return f"{pair}, request {self.index}: {self.what} ({self.fault})"


@dataclass
class _QueuePair:
    provider: str
    pe: int
    peer: int | None = None


class SoftHca:
    """The cards of all PEs of this process. Any thread may call anything at any time.

    Args:
        late: data arrives as late and completions as scattered as the ordering rules allow.
        seed: of the thread's choices.
    """

    def __init__(self, *, late: bool = False, seed: int = 0) -> None:
        self._functions = _native().functions
        self._lock = threading.RLock()
        self._dma: dict[int, ctypes.Array[Any]] = {}
        self._queue_pairs: dict[int, _QueuePair] = {}
        # for messages: also of those that are gone
        self._known: dict[int, _QueuePair] = {}
        self._thread: threading.Thread | None = None
        self._hca: int | None = self._functions["mori_soft_hca_new"](late, seed % (1 << 64))
        if self._hca is None:
            raise MemoryError("soft HCA")
        # also for one that nobody closes; at the process' end there may be no code any more that could be called
        self._free = weakref.finalize(self, self._functions["mori_soft_hca_free"], self._hca)
        self._free.atexit = False

    def __enter__(self) -> SoftHca:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._hca is None:
            raise StateError(f"soft HCA: {name} after close")
        return self._functions[f"mori_soft_hca_{name}"](self._hca, *arguments)

    # ------------------------------------------------------------------------------------------- memory and queue pairs
    def use_dma(self, pe: int, dma: tuple[int, int, int, int]) -> None:
        """How PE `pe`'s card reaches what is added for it from here on: context, read, write, atomic.

        The caller keeps them. An aligned access of 4 or 8 bytes has to be one access. Without them: plain memory.
        """
        with self._lock:
            self._dma[pe] = (_U64 * 4)(*dma)

    def add_memory(self, pe: int, address: int, num_bytes: int, *, remote: bool = True) -> int:
        """Let PE `pe`'s card use this memory, and with `remote` its peers' too: its key, as lkey and as rkey."""
        require(pe >= 0, "pe", "at least 0", pe)
        require(num_bytes > 0, "num_bytes", "above 0", num_bytes)
        require(0 < address <= (1 << 64) - num_bytes, "address", "a process' address", hex(address))
        with self._lock:
            key = self._call("add_memory", self._dma.get(pe), pe, address, num_bytes, remote)
        require(key != 0, "memory registered", f"at most {_MAX_REGIONS}", _MAX_REGIONS + 1)
        return key

    def remove_memory(self, key: int) -> None:
        """Nothing touches it any more once this has returned; what still names it fails."""
        self._call("remove_memory", key)

    def add_queue_pair(
        self,
        provider: str,
        pe: int,
        *,
        sq: int,
        cq: int,
        doorbell: int,
        num_wqes: int,
        record: int = 0,
        cq_doorbell: int = 0,
        num_cqes: int = 1,
        psn_table: int = 0,
        num_psns: int = 0,
        mtu: int = 4096,
        first: int = 0,
        psn: int = 0,
    ) -> int:
        """Serve a queue pair; names are those of the device's `Queue`. Returns its number.

        All memory is the caller's and stays until `remove_queue_pair`. It is zero at the start, but each byte of the
        completion queue is `CQ_FILL[provider]`. `first`: index of the first request; `psn`: its packet number.
        """
        require(provider in PROVIDERS, "provider", " or ".join(PROVIDERS), repr(provider))
        require(pe >= 0, "pe", "at least 0", pe)
        sizes = {"num_wqes": (num_wqes, 2)}
        places = {"sq": sq, "cq": cq, "doorbell": doorbell}
        if provider == "mlx5":
            places["record"] = record
        elif provider == "bnxt_re":
            places["psn_table"] = psn_table
            sizes["num_psns"] = num_psns, num_wqes
            require(256 <= mtu <= 4096 and mtu & (mtu - 1) == 0, "mtu", "a power of two from 256 to 4096", mtu)
        else:
            places["cq_doorbell"] = cq_doorbell
            sizes["num_cqes"] = num_cqes, 2
        require(0 <= first < 1 << 63, "first", "0 to 2^63 - 1", first)
        require(0 <= psn < 1 << 24, "psn", "0 to 2^24 - 1", psn)
        for name, (size, least) in sizes.items():
            fits = least <= size <= 1 << 15 and size & (size - 1) == 0
            require(fits, name, f"a power of two from {least} to {1 << 15}", size)
        for name, place in places.items():
            align = 4 if name == "record" else 16 if name in {"sq", "cq"} else 8
            require(place > 0 and place % align == 0, name, f"an address that is a multiple of {align}", hex(place))
        facts = [PROVIDERS[provider], pe, sq, cq, doorbell, record, cq_doorbell, psn_table]
        facts += [num_wqes, num_cqes, num_psns, mtu, first, psn]
        with self._lock:
            number = self._call("add_queue_pair", self._dma.get(pe), (_U64 * len(facts))(*facts))
            require(number != 0, "queue pairs", f"at most {_MAX_QUEUE_PAIRS}", _MAX_QUEUE_PAIRS + 1)
            self._queue_pairs[number] = self._known[number] = _QueuePair(provider, pe)
        return number

    def _pair(self, number: int, name: str = "number") -> _QueuePair:
        found = self._queue_pairs.get(number)
        if found is None:
            raise ArgumentError(f"{name}: want the number of a queue pair, got {number:#x}")
        return found

    def connect(self, number: int, peer: int) -> None:
        """Let queue pair `number` send to queue pair `peer`. Each end has to be connected before anything is sent."""
        with self._lock:
            own, other = self._pair(number), self._pair(peer, "peer")
            require(own.peer is None, "number", "a queue pair that is not connected", hex(number))
            require(own.provider == other.provider, "peer", f"a queue pair of {own.provider}", other.provider)
            own.peer = other.pe
            self._call("connect", number, peer)

    def remove_queue_pair(self, number: int) -> None:
        """Its rings are not touched any more once this has returned."""
        with self._lock:
            self._pair(number)
            self._call("remove_queue_pair", number)
            del self._queue_pairs[number]

    # -------------------------------------------------------------------------------------------------------- progress
    def pending(self) -> bool:
        """Whether there is a doorbell to take, a request to fetch or to finish."""
        return bool(self._call("pending"))

    def step(self, word: int) -> bool:
        """Do at most one action; `word` alone decides which. False: there was none, or (late mode) it is put off."""
        if self._thread is not None:
            raise StateError("soft HCA: step() while its thread runs")
        return bool(self._call("step", word % (1 << 64)))

    def start(self) -> None:
        """Serve the queue pairs by a thread of their own, without the interpreter's lock, until `stop`."""
        with self._lock:
            if self._thread is not None:
                raise StateError("soft HCA: start() while its thread runs")
            self._call("stop", 0)
            run = self._functions["mori_soft_hca_run"]
            thread = threading.Thread(target=run, args=(self._hca,), name="mori soft hca", daemon=True)
            thread.start()
            self._thread = thread
            # the thread runs code that the interpreter takes away when it ends
            atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, if it runs. What is under way goes on with the next `start` or `step`."""
        with self._lock:
            if self._thread is not None:
                self._call("stop", 1)
                self._thread.join()
                self._thread = None
                atexit.unregister(self.stop)

    def close(self) -> None:
        """Stop and forget everything. Idempotent."""
        with self._lock:
            self.stop()
            self._free()
            self._hca = None
            self._queue_pairs.clear()
            self._dma.clear()

    # ---------------------------------------------------------------------------------------------------------- reports
    def inject(self, number: int, fault: str = "retry", index: int | None = None) -> None:
        """Let request `index` (None: the one that is fetched next) fail. A queue pair keeps the last one asked for."""
        require(fault in FAULTS[1:], "fault", " or ".join(FAULTS[1:]), repr(fault))
        with self._lock:
            self._pair(number)
            self._call("inject", number, FAULTS.index(fault), _NEXT if index is None else index)

    @property
    def errors(self) -> list[Violation]:
        """What has gone wrong, oldest first, without what was flushed because of it."""
        found = []
        with self._lock:
            record = _Violation()
            for i in range(min(self._call("violation", _NEXT, None), _MAX_VIOLATIONS)):
                self._call("violation", i, ctypes.byref(record))
                pair = self._known[record.number]
                what = record.what.decode().format(want=record.want, got=record.got)
                found.append(
                    Violation(
                        pair.provider, record.number, record.pe, pair.peer, record.index, FAULTS[record.fault], what
                    )
                )
        return found

    def counts(self, number: int) -> Counts:
        """How far a queue pair is."""
        with self._lock:
            self._pair(number)
            words = (_U64 * 6)()
            self._call("counts", number, words)
        producer, fetched, placed, completed, moved, broken = words
        return Counts(producer, fetched, placed, completed, moved, bool(broken))

    def describe(self) -> list[str]:
        """A line for each queue pair that has something unfinished."""
        lines = []
        with self._lock:
            for number, pair in self._queue_pairs.items():
                counts = self.counts(number)
                rung = bool(self._call("rung", number))
                if rung or counts.completed < counts.producer:
                    to = "not connected" if pair.peer is None else f"to PE {pair.peer}"
                    state = f"{counts.completed} of {counts.producer} requests over, {counts.fetched} fetched"
                    more = ", a doorbell not taken" if rung else ""
                    lines.append(f"soft {pair.provider}, queue pair {number:#x} of PE {pair.pe} {to}: {state}{more}")
        return lines
