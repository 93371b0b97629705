"""What one PE of a test does: `python -m tests.host.proxy.programs NAME ID PE N_PES TLS`, ID in hex or "new".

A program gets a `Here`; what it prints is for the test, an exception is its failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mori_triton.errors import PeerTimeout
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.bootstrap.tcp import TcpBootstrap, new_unique_id
from mori_triton.host.proxy import Op, Proxy, descriptor
from mori_triton.host.proxy.layout import Descriptor

HEAP = 1 << 22
SENTINEL = 0xA5
LIMIT_S = 3.0


class Here:
    """A PE: its bootstrap, heap (filled with the sentinel) and proxy."""

    def __init__(self, boot: Bootstrap, tls: str, **options) -> None:
        self.boot = boot
        self.pe, self.n_pes = boot.pe, boot.n_pes
        self.heap = np.frombuffer(mmap.mmap(-1, HEAP), np.uint8)
        self.heap[:] = SENTINEL
        self.boot.barrier()
        options = {"timeout_s": LIMIT_S, "options": {"TLS": tls}, **options}
        self.proxy = Proxy(self.boot, self.heap.ctypes.data, HEAP, **options)

    def finish_all(self) -> None:
        self.proxy.quiet()
        self.boot.barrier()


def pattern(pe: int, what: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng([pe, what]).integers(0, 256, num_bytes, dtype=np.uint8)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


SIZES = [0, 1, 7, 64, 1000, 8192, 65537, 1 << 20]


def copies(here: Here) -> None:
    """Puts to the next PE and to this one, gets from the previous one, every byte of the heap compared."""
    proxy, n = here.proxy, here.n_pes
    places = np.cumsum([0, *SIZES]) + 3 * np.arange(len(SIZES) + 1)
    for pe in {(here.pe + 1) % n, here.pe}:
        half = HEAP // 2 if pe == here.pe else 0
        for i, size in enumerate(SIZES):
            source = pattern(here.pe, i, size)
            proxy.wait(proxy.put(pe, half + int(places[i]), address(source), size))
            source[:] = 0  # done: it may be reused
    here.finish_all()
    want = np.full(HEAP, SENTINEL, np.uint8)
    for sender, half in (((here.pe - 1) % n, 0), (here.pe, HEAP // 2)):
        for i, size in enumerate(SIZES):
            want[half + places[i] : half + places[i] + size] = pattern(sender, i, size)
    np.testing.assert_array_equal(here.heap, want)
    here.boot.barrier()
    for i, size in enumerate(SIZES):
        got = np.full(size + 2, 0x5A, np.uint8)
        proxy.wait(proxy.get((here.pe - 1) % n, int(places[i]), address(got) + 1, size))
        np.testing.assert_array_equal(got[1:-1], pattern((here.pe - 2) % n, i, size))
        assert got[0] == got[-1] == 0x5A
    here.boot.barrier()


OLD, GIVEN, OTHER = 0x80F0_1234_8765_4321, 0xFFFF_FFFF_F00F_0FF0, 0x0123_4567_89AB_CDEF
RESULTS = {
    Op.ADD: lambda y, x: y + x,
    Op.AND: lambda y, x: y & x,
    Op.OR: lambda y, x: y | x,
    Op.XOR: lambda y, x: y ^ x,
    Op.SET: lambda y, x: x,
    Op.FETCH_ADD: lambda y, x: y + x,
    Op.FETCH_AND: lambda y, x: y & x,
    Op.FETCH_OR: lambda y, x: y | x,
    Op.FETCH_XOR: lambda y, x: y ^ x,
    Op.SWAP: lambda y, x: x,
    Op.COMPARE_SWAP: lambda y, x: x,
}


def atomics(here: Here) -> None:
    """Every atomic in both widths, on the next PE and on this one: word, neighbours and fetched value."""
    proxy = here.proxy
    cases = [(op, width, hit) for op in RESULTS for width in (4, 8) for hit in (True, False)]
    for pe, base in (((here.pe + 1) % here.n_pes, 0), (here.pe, 4096)):
        for i, (op, width, hit) in enumerate(cases):
            mask = (1 << 8 * width) - 1
            old = np.array([OLD & mask], np.uint64)
            at = base + 24 * i + 8
            proxy.wait(proxy.put(pe, at, address(old), width))
            proxy.quiet(pe)
            got = np.full(16, 0x5A, np.uint8)
            compare = (OLD if hit else OTHER) & mask
            # negative numbers are the same bits
            value = GIVEN - (1 << 64)
            proxy.wait(
                proxy.atomic(op, pe, at, value, num_bytes=width, result=address(got) + 4, compare=compare)
            )  # fmt: skip
            want = np.full(16, 0x5A, np.uint8)
            if op >= Op.FETCH_ADD:
                want[4 : 4 + width] = old.view(np.uint8)[:width]
            np.testing.assert_array_equal(got, want, str((op, width, hit)))
    here.finish_all()
    want = np.full(HEAP, SENTINEL, np.uint8)
    for base in (0, 4096):
        for i, (op, width, hit) in enumerate(cases):
            mask = (1 << 8 * width) - 1
            word = RESULTS[op](OLD & mask, GIVEN & mask) & mask
            if op is Op.COMPARE_SWAP and not hit:
                word = OLD & mask
            at = base + 24 * i + 8
            want[at : at + width] = np.array([word], np.uint64).view(np.uint8)[:width]
    np.testing.assert_array_equal(here.heap, want)
    here.boot.barrier()


def signals(here: Here) -> None:
    """Put-with-signal, set and add, also of no bytes: data and words by value."""
    proxy, to = here.proxy, (here.pe + 1) % here.n_pes
    here.heap[1 << 20 : (1 << 20) + 64] = 0
    here.boot.barrier()
    data = pattern(here.pe, 0, 5000)
    proxy.put_signal(to, 0, address(data), 5000, 1 << 20, 0x1122_3344_5566_7788)
    for _ in range(3):
        proxy.put_signal(to, 5000, address(data), 100, (1 << 20) + 8, -5, add=True)
    proxy.put_signal(to, 0, 0, 0, (1 << 20) + 16, 7, add=True)
    here.finish_all()
    want = np.full(HEAP, SENTINEL, np.uint8)
    want[:5000] = pattern((here.pe - 1) % here.n_pes, 0, 5000)
    want[5000:5100] = want[:100]
    want[1 << 20 : (1 << 20) + 64] = 0
    words = want[1 << 20 : (1 << 20) + 24].view(np.int64)
    words[:] = 0x1122_3344_5566_7788, -15, 7
    np.testing.assert_array_equal(here.heap, want)
    here.boot.barrier()


def contention(here: Here) -> None:
    """All PEs, four threads each, add to one word of PE 0: each old value is seen once."""
    here.heap[:8] = 0
    here.boot.barrier()
    each, threads = 50, 4
    old = np.full((threads, each), -1, np.int64)

    def add(thread: int) -> None:
        for i in range(each):
            here.proxy.wait(here.proxy.atomic(Op.FETCH_ADD, 0, 0, 1, result=address(old[thread, i:])))

    run_threads([lambda t=t: add(t) for t in range(threads)])
    total = each * threads * here.n_pes
    seen = b"".join(here.boot.allgather(old.tobytes()))
    np.testing.assert_array_equal(np.sort(np.frombuffer(seen, np.int64)), np.arange(total))
    if here.pe == 0:
        assert here.heap[:8].view(np.int64)[0] == total


def run_threads(calls) -> None:
    errors: list[BaseException] = []

    def guarded(call) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def wrap(here: Here) -> None:
    """Eight threads post 8000 adds and puts through 32 slots, in batches: the ring goes round 250 times."""
    proxy, to = here.proxy, (here.pe + 1) % here.n_pes
    here.heap[: 8 * 8] = 0
    here.boot.barrier()
    each, threads = 500, 8
    source = np.arange(threads * each, dtype=np.uint64)

    def post(thread: int) -> None:
        batch = (Descriptor * (2 * each))()
        for i in range(each):
            number = thread * each + i
            batch[2 * i] = descriptor(Op.ADD, to, remote=8 * thread, num_bytes=8, value=i)
            batch[2 * i + 1] = descriptor(
                Op.PUT, to, local=address(source[number:]), remote=4096 + 8 * number, num_bytes=8
            )
        indices = proxy.ring.post(batch, 30.0)
        assert indices == sorted(indices)
        assert proxy.ring.wait(indices[-1], 30.0)

    run_threads([lambda t=t: post(t) for t in range(threads)])
    assert proxy.ring.header.tail == 2 * each * threads >= 4 * proxy.ring.entries
    here.finish_all()
    assert here.heap[:64].view(np.uint64).tolist() == [each * (each - 1) // 2] * threads
    np.testing.assert_array_equal(here.heap[4096 : 4096 + 8 * len(source)].view(np.uint64), source)
    assert proxy.ring.num_errors == 0
    here.boot.barrier()


ROUNDS, BYTES = 60, 65_000


def order(here: Here) -> None:
    """A receiver that looks at its signals all the time never sees one before all of its data."""
    proxy, to = here.proxy, (here.pe + 1) % here.n_pes
    words = here.heap[: 8 * ROUNDS].view(np.uint64)
    words[:] = 0
    rows = here.heap[1 << 16 : (1 << 16) + ROUNDS * BYTES].reshape(ROUNDS, BYTES)
    sources = np.arange(ROUNDS, dtype=np.uint8)[:, None].repeat(BYTES, 1) ^ np.uint8(0x3C)
    here.boot.barrier()

    def send() -> None:
        for i in range(ROUNDS):
            proxy.put_signal(to, (1 << 16) + i * BYTES, address(sources[i]), BYTES, 8 * i, i + 1)

    sender = threading.Thread(target=send)
    sender.start()
    early, limit = [], time.monotonic() + 20
    waiting = set(range(ROUNDS))
    while waiting and time.monotonic() < limit:
        for i in np.flatnonzero(words.copy()):
            if i in waiting:
                row = rows[i].copy()
                assert words[i] == i + 1
                if (row != (np.uint8(i & 255) ^ np.uint8(0x3C))).any():
                    early.append(int(i))
                waiting.discard(int(i))
    sender.join()
    assert not waiting, sorted(waiting)
    assert not early, early
    here.finish_all()


def killed(here: Here) -> None:
    """PE 1 is killed. Who has something for it gets PeerTimeout naming it; the others go on with each other."""
    proxy = here.proxy
    data = np.full(1 << 16, here.pe, np.uint8)
    for pe in range(here.n_pes):
        proxy.put(pe, here.pe << 16, address(data), data.nbytes)
    here.finish_all()
    here.boot.barrier()
    if here.pe == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start, error = time.monotonic(), None
    while error is None and time.monotonic() - start < 4 * LIMIT_S:
        try:
            index = proxy.put_signal(1, here.pe << 16, address(data), data.nbytes, 8, 1, add=True)
            proxy.wait(index)
            proxy.quiet(1)
        except PeerTimeout as caught:
            error = caught
    took = time.monotonic() - start
    assert error is not None
    assert "of PE 1 (operation" in str(error), error
    assert took < LIMIT_S + 1.5, took
    record = proxy.ring.errors()[0]
    assert record.pe == 1
    assert record.op in (Op.PUT_SIGNAL_ADD, Op.FLUSH)
    assert list(proxy.failed_peers()) == [1]
    # the next operation for it fails at once, those for others do not
    start = time.monotonic()
    assert not proxy.ring.wait(proxy.put(1, 0, address(data), 8), 10)
    assert time.monotonic() - start < 1
    other = here.n_pes - 1 if here.pe == 0 else 0
    assert proxy.ring.wait(proxy.put(other, here.pe << 16, address(data), 100), 10)
    assert proxy.ring.wait(proxy.ring.post(descriptor(Op.FLUSH, other), 10)[0], 10)
    print(type(error).__name__, flush=True)
    # both have what they need of each other
    time.sleep(0.5)


def stopped(here: Here, kill: bool = False) -> None:
    """PE 1 takes nothing any more while hundreds of operations of every kind are on their way to it: all fail."""
    proxy = here.proxy
    pids = here.boot.allgather(str(os.getpid()).encode())
    proxy.wait(proxy.atomic(Op.ADD, 1 - here.pe, 0, 1))
    here.finish_all()
    if here.pe == 1:
        time.sleep(60)
    os.kill(int(pids[1]), signal.SIGSTOP)
    tasks = Path("/proc", pids[1].decode(), "task")
    try:
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)
        start, data, old = time.monotonic(), np.zeros(1 << 20, np.uint8), np.zeros(100, np.uint64)
        indices = []
        for i in range(100):
            indices.append(proxy.atomic(Op.FETCH_ADD, 1, 0, 1, result=address(old[i:])))
            indices.append(proxy.atomic(Op.ADD, 1, 0, 1))
            indices.append(proxy.put_signal(1, 4096, address(data), data.nbytes, 8, 1, add=True))
            indices.append(proxy.get(1, 4096, address(data), data.nbytes))
        if kill:
            os.kill(int(pids[1]), signal.SIGKILL)
        assert not any(proxy.ring.wait(index, 3 * LIMIT_S) for index in indices)
        assert time.monotonic() - start < LIMIT_S + 1.5
        assert proxy.ring.num_errors == len(indices)
        assert {record.pe for record in proxy.ring.errors()} == {1}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids[1]), signal.SIGKILL)


def stopped_and_killed(here: Here) -> None:
    stopped(here, kill=True)


def until_cut(here: Here) -> None:
    """Put to the other PE until that fails; says what the failure was and how long it took."""
    data = pattern(here.pe, 0, 4096)
    proxy, to = here.proxy, 1 - here.pe
    proxy.wait(proxy.put(to, 0, address(data), data.nbytes))
    here.finish_all()
    np.testing.assert_array_equal(here.heap[:4096], pattern(to, 0, 4096))
    print("running", flush=True)
    last = time.monotonic()
    try:
        while True:
            proxy.wait(proxy.put_signal(to, 0, address(data), data.nbytes, 8192, 1, add=True))
            last = time.monotonic()
    except PeerTimeout as error:
        print(f"PeerTimeout after {time.monotonic() - last:.2f} s: {error}", flush=True)


def idle(here: Here) -> None:
    """A PE that has nothing to do costs little, and is there when something comes."""
    here.finish_all()
    sleeps, before = here.proxy._state.sleeps, time.process_time()
    time.sleep(2)
    share = (time.process_time() - before) / 2
    assert here.proxy._state.sleeps > sleeps
    assert share < 0.25, share
    here.boot.barrier()
    data = pattern(here.pe, 0, 100)
    here.proxy.wait(here.proxy.put((here.pe + 1) % here.n_pes, 0, address(data), 100))
    here.finish_all()
    np.testing.assert_array_equal(here.heap[:100], pattern((here.pe - 1) % here.n_pes, 0, 100))
    here.boot.barrier()


OPTIONS = {"wrap": {"entries": 32, "timeout_s": 30.0}, "order": {"entries": 64, "timeout_s": 20.0}}
CUT = {"killed", "stopped", "stopped_and_killed", "until_cut"}


def run(name: str, boot: Bootstrap, tls: str) -> None:
    """One program on the PE of this bootstrap."""
    here = Here(boot, tls, **OPTIONS.get(name, {}))
    try:
        globals()[name](here)
    except BaseException:
        here.proxy.close(failed=True)
        raise
    here.proxy.close(failed=name in CUT)


def main() -> None:
    name, given, pe, n_pes, tls = sys.argv[1:]
    unique_id = new_unique_id() if given == "new" else bytes.fromhex(given)
    if given == "new":
        print(unique_id.hex(), flush=True)
    boot = TcpBootstrap(unique_id, int(pe), int(n_pes), timeout_s=30)
    run(name, boot, tls)
    boot.close()
    assert "torch" not in sys.modules
    assert ctypes.sizeof(Descriptor) == 64
    print("ok", flush=True)


if __name__ == "__main__":
    main()
