"""The symmetric heap, PEs as threads: agreement, exhaustion, freeing, addresses, errors of kernels."""

import itertools
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton import abi
from mori_triton.errors import ArgumentError, DriverError, HeapError, KernelFault, PeerTimeout, StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.heap import SYNC_NAME, SymmetricHeap
from mori_triton.wait_sites import register_wait_site
from tests.host.worlds import error_of, run_threads, run_world

pytestmark = pytest.mark.cpu

SYNC_BYTES = abi.BARRIER_WORDS * 8


def one_heap(num_bytes=1 << 20, **options):
    return SymmetricHeap(CpuDriver(), ThreadGroup(1).bootstrap(0), num_bytes, **options)


def test_addresses_sizes_and_alignment():
    heap = one_heap()
    assert heap.used_bytes == SYNC_BYTES
    for alignment in (1, 2, 16, 64, 256, 4096, 65536, 1 << 20):
        if alignment < 1 << 20:
            address = heap.malloc(24, alignment)
            assert address % alignment == 0
            assert heap.contains(address, 24)
        else:
            # the only such place is taken, but the heap itself is aligned like this
            assert heap.base % alignment == 0
            with pytest.raises(HeapError, match="no room"):
                heap.malloc(24, alignment)
    assert heap.malloc(24) % 256 == 0
    for alignment in (3, 0, -8, 1 << 21, 256.0):
        with pytest.raises(ArgumentError, match="alignment"):
            heap.malloc(24, alignment)
    for num_bytes in (-1, 2.5, None, "64"):
        with pytest.raises(ArgumentError, match="num_bytes"):
            heap.malloc(num_bytes)


def test_tensors_that_cannot_be():
    heap = one_heap()
    for shape in (64, 64.5, (2, -64), (2.0, 4), ("2",), None, "24"):
        with pytest.raises(ArgumentError, match=r"shape: want a tuple of sizes from 0 on, got "):
            heap.tensor(shape, torch.float32)
    for dtype in ("float32", None, float):
        with pytest.raises(ArgumentError, match=r"dtype: want a torch.dtype such as torch.float32, got "):
            heap.tensor((4,), dtype)
    assert heap.used_bytes == SYNC_BYTES
    assert heap.tensor(torch.Size([2, 3]), torch.float32).shape == (2, 3)
    assert heap.tensor([], torch.float32).shape == ()


def test_i5_heap_exhaustion():
    heap = one_heap()
    before = heap.used_bytes, heap.free_bytes
    for num_bytes in (2 << 20, 2**63, 2**64 - 1, 2**64):
        with pytest.raises(HeapError) as caught:
            heap.malloc(num_bytes, name="tokens")
        text = str(caught.value)
        for fact in ("'tokens'", f"requested {num_bytes} bytes", f"free {before[1]} bytes", "total 1048576 bytes"):
            assert fact in text
        assert "largest free block" in text
        if num_bytes == 2 << 20:
            assert 'MORI_SHMEM_HEAP_SIZE=3M or heap_size="3M"' in text
        else:
            assert "No heap can be that large" in text
    assert (heap.used_bytes, heap.free_bytes) == before
    # what the message says is enough
    larger = one_heap(3 << 20)
    assert larger.malloc(2 << 20)
    # malloc(0): nothing, as in MORI
    assert heap.malloc(0) == 0
    assert heap.used_bytes == before[0]
    assert one_heap(1024).malloc(512)
    for num_bytes in (SYNC_BYTES - 1, 0, -5):
        with pytest.raises(HeapError, match="too small"):
            one_heap(num_bytes)
    # the description of a fragmented heap
    blocks = [heap.malloc(256 << 10) for _ in range(3)]
    heap.free(blocks[0])
    heap.free(blocks[2])
    with pytest.raises(
        HeapError, match=f"free {heap.free_bytes} bytes, largest free block {heap.free_bytes - (256 << 10)}"
    ):
        heap.malloc(heap.free_bytes)


def test_free_errors_name_sizes_and_change_nothing():
    heap = one_heap()
    address = heap.malloc(1000, name="rows")
    other = heap.malloc(64)
    used = heap.used_bytes
    for bad, text in {
        address + 16: r"16 bytes into 'rows' \(1000 bytes",
        address + 999: "999 bytes into 'rows'",
        0x1000: "not from this heap's malloc.*1048576 bytes",
        heap.base - 1: "not from this heap's malloc",
        heap.base + (1 << 20): "not from this heap's malloc",
        heap.base + (1 << 19): "free heap memory",
    }.items():
        with pytest.raises(HeapError, match=text):
            heap.free(bad)
    heap.free(0)
    heap.free(None)
    assert heap.used_bytes == used
    heap.free(address)
    with pytest.raises(HeapError, match=r"'rows' \(1000 bytes\) has been freed before \(double free\)"):
        heap.free(address)
    # freed space is used again, and then the address is a good one
    assert heap.malloc(512, name="again") == address
    heap.free(address)
    heap.free(other)
    assert heap.used_bytes == SYNC_BYTES
    assert heap._allocator.largest_free_bytes == (1 << 20) - SYNC_BYTES


def test_i4_repeated_create_and_free():
    def program(here):
        heap, seen = here.heap, []
        for _ in range(20):
            first = heap.tensor((100, 3), torch.bfloat16, "first")
            second = heap.tensor((7,), torch.int64, "second")
            heap.free_tensor(first)
            second.fill_(here.pe)
            seen.append(first.data_ptr() - heap.base)
            heap.free_tensor(second)
            assert heap.used_bytes == SYNC_BYTES
        return seen

    results = run_world(3, program)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 1


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (
            [{"num_bytes": 8192}, {"num_bytes": 4096}, {"num_bytes": 8192}],
            ["size", "PE 0: 8192", "PE 1: 4096", "PE 2: 8192"],
        ),
        ([{"num_bytes": 64, "alignment": a} for a in (256, 256, 512)], ["alignment", "PE 2: 512"]),
        ([{"num_bytes": 64, "name": n} for n in "aba"], ["name", "'a' or 'b'", "PE 1: b"]),
        ([{"num_bytes": n} for n in (64, -1, 64)], ["size", "PE 1: -1"]),
        ([{"num_bytes": n} for n in (64, "x", 64)], ["size", "PE 1: 'x'"]),
    ],
)
def test_i6_different_sizes(calls, parts):
    """An error on every PE, naming every PE's value; the heap stays usable."""

    def program(here):
        error = error_of(here.heap.malloc, **calls[here.pe])
        used = here.heap.used_bytes
        return error, used, here.heap.malloc(128) - here.heap.base

    results = run_world(3, program)
    for error, used, offset in results:
        assert isinstance(error, HeapError)
        for part in parts:
            assert part in str(error)
        assert used == SYNC_BYTES
        assert offset == results[0][2]


def test_i6_order_and_frees_differ():
    def program(here):
        heap = here.heap
        names = ["a", "b"] if here.pe else ["b", "a"]
        order = [error_of(heap.malloc, 64, name=name) for name in names]
        kept = [heap.malloc(64, name=f"kept {i}") for i in range(3)]
        if here.pe == 1:
            heap.free(kept[1])
        skipped = error_of(heap.malloc, 64)
        if here.pe != 1:
            heap.free(kept[1])
        # any order is fine, as long as all have freed the same
        for address in kept[::2] if here.pe else kept[::-2]:
            heap.free(address)
        return order, skipped, heap.malloc(64) - heap.base

    for order, skipped, offset in run_world(2, program):
        assert all(isinstance(error, HeapError) and "'a' or 'b'" in str(error) for error in order)
        assert isinstance(skipped, HeapError)
        assert "live allocations" in str(skipped)
        assert "PE 0: 4 with" in str(skipped)
        assert "PE 1: 3 with" in str(skipped)
        assert offset == SYNC_BYTES


def test_malloc_against_another_call():
    def program(here):
        return error_of(here.heap.malloc, 64) if here.pe else error_of(here.bootstrap.barrier, "the end")

    for error in run_world(2, program):
        assert isinstance(error, StateError)
        assert "PE 0: the end" in str(error)
        assert "PE 1: symmetric malloc" in str(error)


def test_all_pes_fail_together_at_set_up():
    group = ThreadGroup(3, timeout_s=5)

    def program(pe):
        return error_of(SymmetricHeap, CpuDriver(), group.bootstrap(pe), (1 << 20) + (pe == 2))

    for error in run_threads(3, program):
        assert isinstance(error, HeapError)
        assert "heap size (PE 0: 1048576; PE 1: 1048576; PE 2: 1048577)" in str(error)

    class Poor(CpuDriver):
        def alloc(self, num_bytes, **options):
            raise DriverError("out of memory, says the system")

    class Blind(CpuDriver):
        def import_handle(self, handle):
            raise DriverError("cannot map it")

    for broken, text in ((Poor, "PE 1: out of memory, says the system"), (Blind, "PE 1: cannot map it")):
        group = ThreadGroup(2, timeout_s=5)

        def start(pe, broken=broken, group=group):
            driver = broken() if pe else CpuDriver()
            return error_of(SymmetricHeap, driver, group.bootstrap(pe), 1 << 20), driver

        for error, driver in run_threads(2, start):
            assert isinstance(error, HeapError)
            assert text in str(error)
            # nothing is left behind
            assert not driver._owned
            assert not driver._imported


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000), st.sampled_from([16, 256, 4096])), max_size=25))
def test_i7_offsets_depend_on_the_calls_only(steps):
    """PEs have different bases (and may have had other heaps before); offsets are equal."""

    def program(here):
        live, offsets = [], []
        for what, num_bytes, alignment in steps:
            if what == 0 and live:
                here.heap.free(live.pop(num_bytes % len(live)))
            else:
                error = error_of(lambda n=num_bytes, a=alignment: live.append(here.heap.malloc(n, a)))
                offsets.append(type(error) if error else live[-1] - here.heap.base)
        return here.heap.base, offsets

    results = run_world(3, program, heap_bytes=40000)
    assert len({base for base, _ in results}) == 3
    assert results[0][1] == results[1][1] == results[2][1]


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

    run_world(4, program, **options)


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
        assert struct.unpack_from("<IiiI", raw) == (1, here.pe, 3, 0)
        base, size, peers, sync, errors, ticks, reserved = struct.unpack_from("<7Q", raw, 16)
        assert (base, size, ticks, reserved) == (heap.base, 1 << 20, 500_000_000, 0)
        assert raw[72:] == bytes(56)
        bases = struct.unpack("<3Q", here.driver.read(peers, 24))
        assert bases == tuple(heap.peer_address(heap.base, peer) for peer in range(3))
        assert heap.contains(sync, 512)
        assert here.driver.read(sync, 512) == bytes(512)
        assert here.driver.read(errors, 16) == struct.pack("<QQ", 0, 15)
        # everything a kernel may touch is listed once, and nothing overlaps
        regions = sorted(heap.regions())
        for address, num_bytes in ((ctx.data_ptr(), 128), (peers, 24), (errors, 976), (sync, 512), (bases[1], size)):
            assert sum(r.address <= address and address + num_bytes <= r.address + r.num_bytes for r in regions) == 1
        assert all(a.address + a.num_bytes <= b.address for a, b in itertools.pairwise(regions))
        return sync - heap.base

    assert len(set(run_world(3, program))) == 1


def test_no_wait_limit():
    assert one_heap(timeout_s=None).ctx[7] == 0
    # the smallest limit is not "no limit"
    assert one_heap(timeout_s=1e-12).ctx[7] == 1


def record(kind, pe, peer, tag, address, expected, seen, compare):
    return struct.pack("<IiiiQQQI20x", kind, pe, peer, tag, address, expected, seen, compare)


def test_d20_errors_of_kernels():
    heap = one_heap()
    counts = heap.tensor((8,), torch.int64, "recv counts")
    log = int(heap.ctx[6])
    heap.check_errors()
    tag = register_wait_site("test_heap wait")
    wait = record(1, 0, 3, tag, counts.data_ptr() + 16, 5, 2, 4)
    refused = record(2, 0, 7, 0, counts.data_ptr() + 1, 16, 0, 0)

    def write(count, *records):
        heap.driver.write(log, struct.pack("<QQ", count, 15) + b"".join(records))

    write(1, wait)
    with pytest.raises(PeerTimeout) as caught:
        heap.check_errors()
    line = "test_heap wait on PE 0 waiting for PE 3: recv counts+16 of PE 0, expected >= 5, saw 2"
    assert line in str(caught.value)
    # cleared
    heap.check_errors()
    # more errors than records
    write(20, *[wait] * 15)
    with pytest.raises(PeerTimeout, match="and 5 more"):
        heap.check_errors()
    write(3, wait, refused, record(2, 0, 0, 0, 0x10, 2**64 - 1, 0, 0))
    with pytest.raises(KernelFault) as caught:
        heap.check_errors()
    assert line in str(caught.value)
    assert "PE 0, to PE 7: recv counts+1 of PE 0: 16 bytes refused (no such PE" in str(caught.value)
    assert "0x10 (outside the symmetric heap): an unknown operation refused" in str(caught.value)
    write(2, record(1, 0, -1, -1, heap.base, 3, 1, 1), record(9, 0, 0, 77, 0, 0, 0, 0))
    records, count = heap.take_errors()
    assert count == 2
    assert str(records[0]) == f"barrier_all on PE 0 waiting: {SYNC_NAME} of PE 0, expected == 3, saw 1"
    assert "wait site 77 on PE 0: error of unknown kind 9" in str(records[1])


def test_use_after_close():
    heap = one_heap()
    tensor = heap.tensor((4,), torch.int32)
    ctx = heap.ctx
    heap.close()
    heap.close()
    for call in (
        lambda: heap.malloc(8),
        lambda: heap.free(1),
        lambda: heap.ctx,
        lambda: heap.ctx_address,
        lambda: heap.peer_address(0, 0),
        lambda: heap.tensor((1,), torch.int32),
        heap.check_errors,
        heap.regions,
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    # a tensor that is still held is stale memory, not a crash
    tensor.fill_(7)
    assert tensor.sum() == 28
    assert ctx[0] == 1


def test_tensor_shapes_and_dtypes():
    heap = one_heap()
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.int32,
        torch.float64,
        torch.complex128,
    ):
        tensor = heap.tensor((3, 5), dtype)
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (3, 5), True)
        assert tensor.data_ptr() % 256 == 0
        assert tensor.__symm_tensor__
        heap.free_tensor(tensor)
    scalar = heap.tensor((), torch.int64)
    assert scalar.shape == ()
    heap.free_tensor(scalar)
    empty = heap.tensor((0, 7), torch.float32)
    assert empty.shape == (0, 7)
    assert heap.peer_tensor(empty, 0).shape == (0, 7)
    heap.free_tensor(empty)
    assert heap.used_bytes == SYNC_BYTES


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
    # nothing is written after it
    assert not {"write", "memset"} & set(names[last:])


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
