"""The symmetric heap, PEs as threads: agreement, exhaustion, freeing, tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton import abi
from mori_triton.errors import ArgumentError, DriverError, HeapError, StateError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.heap import SymmetricHeap
from tests.host.worlds import error_of, one_heap, run_threads, run_world

pytestmark = pytest.mark.cpu

SYNC_BYTES = abi.BARRIER_WORDS * 8


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
    assert ctx[0] == abi.ABI_VERSION


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
