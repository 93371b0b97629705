"""What the symmetric heap shows to peers and kernels: peers' memory, the device context, the error log."""

import itertools
import json
import struct
import threading
import time

import pytest
import torch

from mori_triton import abi
from mori_triton.errors import ArgumentError, HeapError, KernelFault, PeerTimeout, StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.heap import SYNC_NAME, SymmetricHeap
from mori_triton.wait_sites import register_wait_site
from tests.host.worlds import one_heap, run_threads, run_world

pytestmark = pytest.mark.cpu

SYNC_BYTES = abi.BARRIER_WORDS * 8


def test_peer_memory():
    def program(here):
        heap, pe, n = here.heap, here.pe, here.n_pes
        heap.malloc(48)
        rows = heap.tensor((6, 4), torch.float32, "rows")
        rows.copy_(torch.arange(24).view(6, 4) + 100 * pe)
        here.bootstrap.barrier()
        checked = []
        for peer in range(n):
            for view in (rows, rows[2:4], rows[:, 1], rows.t(), rows[::2, ::3], rows[5, 3]):
                theirs = heap.peer_tensor(view, peer)
                checked.append(torch.equal(theirs, view + 100 * (peer - pe)) and theirs.stride() == view.stride())
            assert heap.describe(heap.peer_address(rows[1].data_ptr(), peer)) == f"rows+16 of PE {peer}"
        here.bootstrap.barrier()
        # writing goes through
        heap.peer_tensor(rows[0], (pe + 1) % n).fill_(pe)
        here.bootstrap.barrier()
        assert rows[0].eq((pe - 1) % n).all()
        assert rows[1, 0] == 100 * pe + 4
        return all(checked)

    assert run_world(3, program) == [True] * 3


def test_i19_peer_address_of_bad_pes_and_pointers():
    def program(here):
        heap = here.heap
        tensor = heap.tensor((64,), torch.int32)
        end = heap.base + heap.num_bytes
        for pe in (-1, 2, 2**31 - 1, 0.0, None):
            with pytest.raises(ArgumentError, match="pe: want 0 to 1"):
                heap.peer_address(tensor.data_ptr(), pe)
            with pytest.raises(ArgumentError, match="pe: want 0 to 1"):
                heap.peer_tensor(tensor, pe)
        peer = 1 - here.pe
        there = heap.peer_address(heap.base, peer)
        assert there != heap.base
        assert heap.peer_address(heap.base, here.pe) == heap.base
        assert heap.peer_address(end - 1, peer) == there + heap.num_bytes - 1
        assert heap.peer_address(heap.base - 1, peer) == 0
        assert heap.peer_address(end, peer) == 0
        assert heap.peer_address(0, peer) == 0
        assert heap.peer_address(tensor[5:].data_ptr(), peer) == heap.peer_address(tensor.data_ptr(), peer) + 20
        with pytest.raises(ArgumentError, match="memory of this PE's symmetric heap"):
            heap.peer_tensor(torch.zeros(4), peer)
        assert heap.describe(0x10) == "0x10 (outside the symmetric heap)"
        assert heap.describe(heap.base) == f"{SYNC_NAME} of PE {here.pe}"

    run_world(2, program)


@pytest.mark.parametrize("options", [{"gpus_per_node": 2}, {"disable_p2p": True}])
def test_unreachable_peers(options):
    def program(here):
        heap, pe = here.heap, here.pe
        tensor = heap.tensor((4,), torch.int32)
        reached = [heap.reaches(peer) for peer in range(4)]
        same = [peer == pe if "disable_p2p" in options else peer // 2 == pe // 2 for peer in range(4)]
        assert reached == same
        bases = struct.unpack("<4Q", here.driver.read(int(heap.ctx[4]), 32))
        assert [base != 0 for base in bases] == same
        for peer in range(4):
            assert (heap.peer_address(tensor.data_ptr(), peer) != 0) == same[peer]
            if not same[peer]:
                with pytest.raises(StateError, match=f"PE {pe} cannot load from or store to PE {peer}"):
                    heap.peer_tensor(tensor, peer)
        assert {region.pe for region in heap.regions()} == {peer for peer in range(4) if same[peer]}

    run_world(4, program, transport="p2p", **options)


def test_different_nodes_by_id():
    group = ThreadGroup(2, timeout_s=5)

    def program(pe):
        heap = SymmetricHeap(CpuDriver(), group.bootstrap(pe), 4096, node=f"node {pe}")
        return [heap.reaches(0), heap.reaches(1)]

    assert run_threads(2, program) == [[True, False], [False, True]]


def test_context_holds_what_the_table_says():
    """Read back with plain struct offsets, from the memory that kernels are given."""

    def program(here):
        heap = here.heap
        ctx = heap.ctx
        assert ctx.dtype == torch.int64
        assert ctx.data_ptr() == heap.ctx_address
        raw = ctx.numpy().tobytes()
        assert len(raw) == 128
        assert struct.unpack_from("<IiiI", raw) == (2, here.pe, 3, 0)
        base, size, peers, sync, errors, ticks, network, profile = struct.unpack_from("<8Q", raw, 16)
        assert (base, size, ticks, network) == (heap.base, 1 << 20, 500_000_000, 0)
        assert raw[80:] == bytes(48)
        bases = struct.unpack("<3Q", here.driver.read(peers, 24))
        assert bases == tuple(heap.peer_address(heap.base, peer) for peer in range(3))
        assert heap.contains(sync, 512)
        assert here.driver.read(sync, 512) == bytes(512)
        assert here.driver.read(errors, 16) == struct.pack("<QQ", 0, abi.ERROR_CAPACITY)
        count, room = struct.unpack("<QQ", here.driver.read(profile, 16))
        assert (count, room > 1000) == (0, True)
        # everything a kernel may touch is listed once, and nothing overlaps
        regions = sorted(heap.regions())
        for address, num_bytes in (
            (ctx.data_ptr(), 128),
            (peers, 24),
            (errors, abi.ERROR_LOG_SIZE),
            (profile, 16 + room * abi.PROFILE_RECORD_SIZE),
            (sync, 512),
            (bases[1], size),
        ):
            assert sum(r.address <= address and address + num_bytes <= r.address + r.num_bytes for r in regions) == 1
        assert all(a.address + a.num_bytes <= b.address for a, b in itertools.pairwise(regions))
        return sync - heap.base

    assert len(set(run_world(3, program))) == 1


def test_no_wait_limit():
    assert one_heap(timeout_s=None).ctx[7] == 0
    # the smallest limit is not "no limit"
    assert one_heap(timeout_s=1e-12).ctx[7] == 1


def record(kind, pe, peer, tag, address, expected, seen, compare):
    return struct.pack("<IiiiQQQI", kind, pe, peer, tag, address, expected, seen, compare)


def test_d20_errors_of_kernels():
    heap = one_heap()
    counts = heap.tensor((8,), torch.int64, "recv counts")
    log = int(heap.ctx[6])
    heap.check_errors()
    tag = register_wait_site("test_heap wait")
    wait = record(1, 0, 3, tag, counts.data_ptr() + 16, 5, 2, 4)
    refused = record(2, 0, 7, 0, counts.data_ptr() + 1, 16, 0, 0)

    def write(*records):
        """As kernels do: count, then the record, if the host has left room for it."""
        for one in records:
            slot, limit = struct.unpack("<QQ", heap.driver.read(log, 16))
            heap.driver.write(log, struct.pack("<Q", slot + 1))
            if slot < limit:
                heap.driver.write(log + 16 + slot % 16 * 64, one + struct.pack("<I16x", slot + 1))

    assert not heap.errors_pending()
    write(wait)
    assert heap.errors_pending()
    with pytest.raises(PeerTimeout) as caught:
        heap.check_errors()
    line = "test_heap wait on PE 0 waiting for PE 3: recv counts+16 of PE 0, expected >= 5, saw 2"
    assert line in str(caught.value)
    # taken
    assert not heap.errors_pending()
    heap.check_errors()
    # more errors than records
    write(*[wait] * 20)
    with pytest.raises(PeerTimeout, match="and 4 more"):
        heap.check_errors()
    write(wait, refused, record(2, 0, 0, 0, 0x10, 2**64 - 1, 0, 0))
    with pytest.raises(KernelFault) as caught:
        heap.check_errors()
    assert line in str(caught.value)
    assert "PE 0, to PE 7: recv counts+1 of PE 0: 16 bytes refused (no such PE" in str(caught.value)
    assert "0x10 (outside the symmetric heap): an unknown operation refused" in str(caught.value)
    write(record(1, 0, -1, -1, heap.base, 3, 1, 1), record(9, 0, 0, 77, 0, 0, 0, 0))
    records, count = heap.take_errors()
    assert count == 2
    assert str(records[0]) == f"barrier_all on PE 0 waiting: {SYNC_NAME} of PE 0, expected == 3, saw 1"
    assert "wait site 77 on PE 0: error of unknown kind 9" in str(records[1])
    # counted, but not written within a moment: not lost from the count, and not taken twice
    heap.driver.write(log, struct.pack("<Q", int.from_bytes(heap.driver.read(log, 8), "little") + 1))
    assert heap.errors_taken == 26
    assert heap.take_errors() == ([], 1)
    assert heap.errors_taken == 27
    assert not heap.errors_pending()


def test_errors_recorded_while_others_are_taken(monkeypatch):
    # a thread may be off its core for longer than a kernel takes for a record
    monkeypatch.setattr("mori_triton.host.error_log._RECORD_S", 10.0)
    heap = one_heap()
    log, total = int(heap.ctx[6]), 3000

    def kernel():
        for slot in range(total):
            while slot >= struct.unpack("<Q", heap.driver.read(log + 8, 8))[0]:
                time.sleep(0)
            heap.driver.write(log, struct.pack("<Q", slot + 1))
            # a stale record of the ring's last round is there until now
            heap.driver.write(log + 16 + slot % 16 * 64, record(1, 0, slot, 0, 0, 0, 0, 4))
            heap.driver.write(log + 16 + slot % 16 * 64 + 44, struct.pack("<I", slot + 1))

    thread = threading.Thread(target=kernel)
    thread.start()
    peers, counted = [], 0
    while counted < total:
        records, count = heap.take_errors()
        peers += [one.peer for one in records]
        counted += count
    thread.join()
    assert peers == list(range(total))


class Recorder:
    """A driver or bootstrap that notes the order of calls to the one it wraps."""

    def __init__(self, inner, log):
        self._inner, self._log = inner, log

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            self._log.append((name, args))
            return value(*args, **kwargs)

        return call


def test_peers_are_unmapped_before_anybody_frees():
    """`disconnect`, a barrier, `close`: in between a PE has its own memory and names, and no peer's."""

    def program(pe):
        log = []
        heap = SymmetricHeap(Recorder(CpuDriver(), log), group.bootstrap(pe), 1 << 20)
        rows = heap.tensor((4,), torch.int32, "rows")
        there = [heap.peer_address(rows.data_ptr(), peer) for peer in range(3)]
        log.clear()
        heap.disconnect()
        heap.disconnect()
        assert [name for name, _ in log] == ["close_import"] * 2
        heap.bootstrap.barrier()
        assert heap.describe(there[(pe + 1) % 3]) == f"rows of PE {(pe + 1) % 3}"
        heap.check_errors()
        rows.fill_(pe)
        heap.close()
        assert [name for name, _ in log[2:]] == ["free"] * 4

    group = ThreadGroup(3, timeout_s=5)
    run_threads(3, program)


def test_d8_words_are_cleared_before_the_closing_barrier():
    """A late PE must not clear words that a fast peer has signalled: alloc, clear, device sync, then the rendezvous."""
    log = []
    heap = SymmetricHeap(Recorder(CpuDriver(), log), Recorder(ThreadGroup(1).bootstrap(0), log), 1 << 20)
    names = [name for name, _ in log]
    sync = int(heap.ctx[5])
    clear = log.index(("memset", (sync, 0, SYNC_BYTES)))
    assert names.index("alloc") < clear < len(names) - 1 - names[::-1].index("synchronize")
    last = len(names) - 1 - names[::-1].index("allgather")
    assert names.index("synchronize") < last
    # nothing is written after it, but where the PEs' marks were
    assert not {"write", "copy"} & set(names[last:])
    cleared = [args[0] - heap.base for name, args in log[last:] if name == "memset"]
    assert cleared == [SYNC_BYTES, (1 << 20) - 16]
    assert heap.driver.read(heap.base, 1 << 20) == bytes(1 << 20)


@pytest.mark.parametrize("place", ["another PE's", "its own", "shifted"])
def test_k12_a_mapping_of_other_memory_is_refused(place):
    """A library that reports success and maps something else, here for PE 1 as PE 2 sees it."""

    class Wrong(CpuDriver):
        def import_handle(self, handle):
            at = super().import_handle(handle)
            if json.loads(handle)["address"] == bases[1]:
                return {"another PE's": bases[0], "its own": bases[2], "shifted": at + 16}[place]
            return at

        def close_import(self, address):
            pass

    group, bases = ThreadGroup(3, timeout_s=5), {}

    def program(pe):
        driver = Wrong() if pe == 2 else CpuDriver()
        inner = driver.alloc

        def alloc(num_bytes, **options):
            address = inner(num_bytes, **options)
            if options.get("exportable"):
                bases[pe] = address
            return address

        driver.alloc = alloc
        with pytest.raises(
            HeapError, match=r"\(PE 2: what was mapped at 0x\w+ as the heap of PE 1 is not that PE's memory"
        ):
            SymmetricHeap(driver, group.bootstrap(pe), 1 << 16)

    run_threads(3, program)


def test_small_heaps_have_no_room_for_marks():
    for num_bytes in (SYNC_BYTES, SYNC_BYTES + 31, SYNC_BYTES + 32, SYNC_BYTES + 48):
        group = ThreadGroup(2, timeout_s=5)

        def program(pe, group=group, num_bytes=num_bytes):
            heap = SymmetricHeap(CpuDriver(), group.bootstrap(pe), num_bytes)
            heap.bootstrap.barrier()
            return heap.driver.read(heap.peer_address(heap.base, 1 - pe), num_bytes)

        assert run_threads(2, program) == [bytes(num_bytes)] * 2


def test_d8_late_pe():
    """Behaviour of the same: PE 0 signals at once, PE 1 is slow to set up; the signal survives."""

    class Slow(CpuDriver):
        def memset(self, *args):
            time.sleep(0.05)
            super().memset(*args)

    group = ThreadGroup(2, timeout_s=5)

    def program(pe):
        heap = SymmetricHeap(Slow() if pe else CpuDriver(), group.bootstrap(pe), 1 << 20)
        sync = int(heap.ctx[5])
        if pe == 0:
            heap.driver.write(heap.peer_address(sync, 1), b"\x05")
        heap.bootstrap.barrier()
        return heap.driver.read(sync, 1)

    assert run_threads(2, program) == [b"\0", b"\x05"]
